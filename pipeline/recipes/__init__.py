"""Recipes: dicts of JSON values that name everything a pipeline needs, read, checked, written and printed."""
