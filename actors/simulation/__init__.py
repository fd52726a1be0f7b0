"""The conversation actors in a simulated world."""
