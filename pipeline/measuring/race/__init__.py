"""Racing pipelines to an accuracy."""
