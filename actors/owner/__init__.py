"""The owner of one conversation: the actor with the five moves, and what it drives."""
