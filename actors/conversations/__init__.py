"""The front door: conversations, their handles, and their turns."""
