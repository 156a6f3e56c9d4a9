"""One process that trains: its parts built from a plan, and the loop over an epoch."""
