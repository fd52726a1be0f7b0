"""Tests that the project's own checks can fail."""
