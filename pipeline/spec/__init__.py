"""What a pipeline is: its description as a value, the rules of what fits together, and the resolved plan."""
