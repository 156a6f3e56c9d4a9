"""A full run: on one process or several ranks, with its folder and its result."""
