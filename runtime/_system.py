"""The system: the world of the actors of one runtime, and how actors are made and counted in it.

Owns the count of actors that are busy while the runtime drains. The makers are handed in by
`_runtime.py`, so that cells need not know the classes above them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from ._backend import OneShot
from ._hooks import Hooks, Traits
from ._incarnation import Incarnation
from ._mailbox import SPARE_LANES_MAX
from ._messages import Item
from ._world import Limits, World
from .ports import Ports

__all__ = ["Makers", "System"]

_INLINE_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Makers:
    """The functions that make objects of classes above the cell."""

    bind: Callable[[Hooks, Incarnation], None]
    """Gives an actor its incarnation."""
    traits: Callable[[type[Hooks]], Traits]


class System(World):
    """The world, with the makers of actors and the actors that are busy."""

    def __init__(
        self, ports: Ports, limits: Limits, fail: Callable[[BaseException], None], makers: Makers
    ) -> None:
        super().__init__(ports, limits, fail)
        self.makers = makers
        # Weak: a program may make a class for each actor.
        self.traits: WeakKeyDictionary[type[Hooks], Traits] = WeakKeyDictionary()
        self.spare_lanes: deque[deque[Item]] = deque(maxlen=SPARE_LANES_MAX)
        """Lanes of actors that came to rest, for those that get mail next."""
        self._busy: dict[object, None] = {}
        self._drained: OneShot[None] | None = None
        self._inline = 0

    def traits_of(self, kind: type[Hooks]) -> Traits:
        """Return the traits of an actor class; computed once."""
        traits = self.traits.get(kind)
        if traits is None:
            traits = self.traits[kind] = self.makers.traits(kind)
        return traits

    def note_inline_ask(self) -> bool:
        """Count an ask that may be answered inline; True if other tasks are due first."""
        self._inline += 1
        if self._inline < _INLINE_MAX:
            return False
        self._inline = 0
        return True

    # --- draining --------------------------------------------------------------------------------

    def note_busy(self, actor: object) -> None:
        """Have `wait_until_drained` wait for this actor."""
        self._busy[actor] = None

    def note_done(self, actor: object) -> None:
        """Have `wait_until_drained` wait for this actor no more."""
        self._busy.pop(actor, None)
        if not self._busy and self._drained is not None:
            self._drained.set(None)

    async def wait_until_drained(self) -> None:
        """Wait until no actor has mail or is handling a message."""
        if self._busy:
            self._drained = OneShot()
            await self._drained.wait()
