"""A whole training: on one process or several ranks, its folder, and its result."""
