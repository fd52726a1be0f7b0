"""The bounds of a gateway, in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..values.text import check_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["GatewayLimits", "check_limits"]


def check_limits(limits: DataclassInstance) -> None:
    """Raise `InvalidInput` unless each of these is more than 0, and whole if its default is."""
    for field in fields(limits):
        limit = getattr(limits, field.name)
        if isinstance(field.default, int):
            whole = "a whole number from 1 on"
            check_number(field.name, limit, whole, least=1, is_whole=True)
        else:
            check_number(field.name, limit, "more than 0", above=0)


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The bounds on one request, one stream and one principal. Raises `InvalidInput`."""

    body_bytes_max: int = 4 << 20
    header_bytes_max: int = 16 << 10
    depth_max: int = 32
    """How deeply the JSON of a body may be nested."""
    body_s: float = 30.0
    """Within how many seconds a body must arrive."""
    write_stall_s: float = 30.0
    """After how many seconds a client that reads nothing of its response is cut off."""
    heartbeat_s: float = 15.0
    """How often a stream without events sends a comment, so that no proxy closes it as idle."""
    pieces_gathered_s: float = 0.02
    """How long to wait after a piece of an answer was sent; the pieces of that time go out as
    one."""
    changes_every_s: float = 1.0
    """How often a stream of changed rows reads the journal; less often if many streams are open."""
    wait_s_max: float = 45.0
    """How long a request may wait for the end of a turn. The usual proxies give up after 50 s or
    60 s without a byte of the response, and their client gets 504."""
    streams_max: int = 10_000
    page_max: int = 1_000
    requests_per_s: float = 50.0
    """How many requests a principal may send per second on average."""
    requests_at_once: int = 200
    """How many requests a principal may send at once, after a pause."""

    def __post_init__(self) -> None:
        check_limits(self)
