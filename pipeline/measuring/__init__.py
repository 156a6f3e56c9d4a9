"""How variants of a training run are timed and compared: budgets, trials, statistics."""
