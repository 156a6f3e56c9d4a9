"""Training in one process: what it builds from a plan, and the loop over an epoch."""
