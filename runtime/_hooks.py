"""An actor as the runtime calls it: its hooks, and the facts that hold for a whole class."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from ._messages import Delivery
from ._stats import Stats

__all__ = ["NO_TRAITS", "Factory", "Hooks", "Traits"]


class Hooks(Protocol):
    """The part of an actor that the runtime calls; `Actor` is its only implementation."""

    batch_max: ClassVar[int]

    # Any, twice: the runtime hands over messages of every type.
    def receive(self, message: Any) -> object: ...  # noqa: ANN401

    def receive_batch(self, deliveries: Sequence[Delivery[Any]]) -> Coroutine[Any, Any, None]: ...

    def on_start(self) -> Coroutine[Any, Any, None]: ...

    def on_stop(self) -> Coroutine[Any, Any, None]: ...

    def on_restart(self, error: BaseException) -> Coroutine[Any, Any, None]: ...


Factory: TypeAlias = Callable[..., Hooks]
"""Makes an actor. A region has one factory for all its keys, which it calls with the key."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The facts about an actor class, found once for all its actors."""

    is_batching: bool
    """It overrides `receive_batch`."""
    batch_max: int
    is_inline: bool
    """Its handler is a `def`: an ask can be answered in the asker's own stack."""
    has_on_start: bool
    has_last_hook: bool
    """It overrides `on_stop` or `on_restart`."""
    stats: Stats


NO_TRAITS: Final = Traits(
    is_batching=False,
    batch_max=1,
    is_inline=False,
    has_on_start=False,
    has_last_hook=False,
    stats=Stats(),
)
"""The traits of a cell whose actor has not been made yet."""
