"""Recorded conversations that the demo, the examples and the tests share."""
