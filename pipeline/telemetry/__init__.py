"""What a training reports: history, meters, progress bar, loggers, curves and provenance."""
