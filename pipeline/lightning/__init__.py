"""Hand a pipeline over to Lightning."""
