"""Agents: what runs in a turn, and the tools it may call."""
