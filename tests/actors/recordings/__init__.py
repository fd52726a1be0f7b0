"""Recorded chats, and the account of a replay."""
