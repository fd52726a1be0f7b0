"""Recorded chats: import, export, replay, and the audit of a replay."""
