"""Helpers shared by several strategies."""
