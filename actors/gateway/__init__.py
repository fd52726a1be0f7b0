"""The gateway: conversations over HTTP, for clients in any language.

`app` makes an ASGI application of opened `Conversations`. A `Node` connects it with others of the
same journal. Needs the extra `gateway`.
"""

try:
    from .access import Action, Authenticate, Authorize, BearerTokens, Place, Principal, Share
    from .application import Gateway, app
    from .limits import GatewayLimits
    from .node import Node, NodeLimits, node_address
    from .node_keys import NodeKeys
except ModuleNotFoundError as missing:
    raise ImportError(
        f"the gateway needs the package {missing.name}, which is not installed; "
        "install turnkeeper[gateway]"
    ) from missing

__all__ = [
    "Action",
    "Authenticate",
    "Authorize",
    "BearerTokens",
    "Gateway",
    "GatewayLimits",
    "Node",
    "NodeKeys",
    "NodeLimits",
    "Place",
    "Principal",
    "Share",
    "app",
    "node_address",
]
