"""A load of unruly users for chat servers, over HTTP, and the check of what they got.

It knows nothing of the server's side, so that it can be pointed at any server that speaks one of
the protocols. Needs the extra `torture`.
"""
