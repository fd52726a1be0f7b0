"""The gateway: conversations over HTTP, for clients in any language.

`app` serves opened `Conversations` as an ASGI application. A `Node` connects this process with the
others that use the same journal. Needs the extra `gateway`.
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
