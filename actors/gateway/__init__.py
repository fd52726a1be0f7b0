"""The gateway: conversations over HTTP, for clients in any language.

`app` makes an ASGI application of opened `Conversations`. Needs the extra `gateway`.
"""

from .access import Action, Authenticate, Authorize, BearerTokens, Place, Principal, Share
from .application import Gateway, app
from .limits import GatewayLimits

__all__ = [
    "Action",
    "Authenticate",
    "Authorize",
    "BearerTokens",
    "Gateway",
    "GatewayLimits",
    "Place",
    "Principal",
    "Share",
    "app",
]
