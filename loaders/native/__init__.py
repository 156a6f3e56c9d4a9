"""The native core: C sources, and their binding."""
