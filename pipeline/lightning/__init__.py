"""The hand-over of a pipeline to Lightning."""
