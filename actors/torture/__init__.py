"""Unruly users of a chat server, over HTTP, and a check of what they got.

The torture knows nothing of the server's side, so you can point it at any server with one of the
protocols. Needs the extra `torture`.
"""
