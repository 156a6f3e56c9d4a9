"""FFCV's `.beton` format: its layout, its tables, and opening a file."""
