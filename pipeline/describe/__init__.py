"""A pipeline's description, the rules it must satisfy, and its resolved plan."""
