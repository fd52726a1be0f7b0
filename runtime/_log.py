"""Log lines, with the actor they are about.

Binding log context per message costs ten times what handling one does. So nothing is bound while
messages are handled: `add_actor` looks up, when a record is emitted, whose code is running.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import structlog

from ._cell import current_cell

__all__ = ["add_actor", "bind_log", "logger"]

# Through the standard library, so that a program which configures nothing gets warnings on
# standard error, and nothing on standard output.
logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
    logging.getLogger("turnkeeper.runtime")
)

_NO_FIELDS: Mapping[str, object] = {}
_fields: ContextVar[Mapping[str, object]] = ContextVar("turnkeeper_log_fields", default=_NO_FIELDS)


def bind_log(**fields: object) -> None:
    """Have `add_actor` add these fields to every record of this actor, or of this effect."""
    _fields.set({**_fields.get(), **fields})


# Any: a structlog processor gets whatever the program logs.
def add_actor(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: adds `actor`, and what `bind_log` was given, to each record."""
    if (cell := current_cell.get(None)) is not None:
        event.setdefault("actor", cell.name)
    for name, value in _fields.get().items():
        event.setdefault(name, value)
    return event
