"""Adapters for other frameworks: their agents, sessions and tools work with turnkeeper."""
