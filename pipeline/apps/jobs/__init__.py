"""Job files for schedulers of clusters: text that the user submits."""
