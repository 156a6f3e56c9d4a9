"""Finding the fastest way to run the same training on this machine."""
