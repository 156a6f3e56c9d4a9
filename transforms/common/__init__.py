"""Helpers shared by several transforms."""
