"""The owner: the five moves, and what it drives."""
