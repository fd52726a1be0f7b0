"""A torture of chat servers, over the wire alone.

It knows nothing of the server's side, so that it can be pointed at any server that speaks one of
the protocols. Needs the extra `torture`.
"""
