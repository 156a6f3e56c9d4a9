"""Recipes: dicts of JSON values with everything a pipeline needs. Read, check, write and print them."""
