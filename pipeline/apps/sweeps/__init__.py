"""Many runs of a recipe with other values: the space of values, and running it."""
