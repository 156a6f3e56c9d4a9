"""What a pipeline trains for: one file per task."""
