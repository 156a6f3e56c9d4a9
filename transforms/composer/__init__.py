"""Algorithms of MosaicML Composer's as transforms."""
