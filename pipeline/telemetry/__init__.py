"""What a run reports: history, meters, progress bar, loggers, curves and provenance."""
