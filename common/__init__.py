"""Helpers that every package uses: errors, checks of values from users, the machine, terminals, threads."""
