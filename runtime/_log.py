"""Log records, each with the actor that it is about.

Binding log context for each message would cost ten times as much as handling it. So nothing is
bound while messages are handled: `add_actor` looks up the running actor when a record is emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

from ._asking import current_actor

__all__ = ["add_actor", "bind_log"]

_NO_FIELDS: Mapping[str, object] = {}
_fields: ContextVar[Mapping[str, object]] = ContextVar("turnkeeper_log_fields", default=_NO_FIELDS)


def bind_log(**fields: object) -> None:
    """Add these fields, through `add_actor`, to every record of this actor or effect."""
    _fields.set({**_fields.get(), **fields})


# Any: a structlog processor is given all that the program logs.
def add_actor(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add `actor`, and the fields of `bind_log`, to a record. A structlog processor."""
    if (running := current_actor.get(None)) is not None:
        event.setdefault("actor", running.name)
    for name, value in _fields.get().items():
        event.setdefault(name, value)
    return event
