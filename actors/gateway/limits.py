"""The bounds of a gateway, at one place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import InvalidInput

__all__ = ["GatewayLimits"]


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The bounds on one request, one stream and one principal."""

    body_bytes_max: int = 4 << 20
    header_bytes_max: int = 16 << 10
    depth_max: int = 32
    """How deeply the JSON of a body may be nested."""
    body_s: float = 30.0
    """Within how many seconds a body has to arrive."""
    write_stall_s: float = 30.0
    """After how many seconds a client that takes nothing is cut off."""
    heartbeat_s: float = 15.0
    """How often a stream without events sends a comment, so that nothing on the way closes it."""
    pieces_gathered_s: float = 0.02
    """How long the pieces of an answer gather after one was written, to be sent as one."""
    changes_every_s: float = 1.0
    """How often a stream of changed rows looks at the journal; less often if there are many."""
    wait_s_max: float = 60.0
    """How long a request may wait for the end of a turn."""
    streams_max: int = 10_000
    page_max: int = 1_000
    requests_per_s: float = 50.0
    """How many requests a principal may send on average, and at once."""
    requests_at_once: int = 200

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise InvalidInput(f"{each.name} is {getattr(self, each.name)}; it is above 0")
