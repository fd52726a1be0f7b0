"""Conversations, their handles, and their turns."""
