"""Checkpoints: their format, what they capture, which ones are kept, resuming, and exporting weights."""
