"""Short collections of garbage, however many actors are held in memory.

A full collection looks at every object that may hold others: with 50,000 active conversations
these are two million, and the loop stands still meanwhile. Most of them live long. So this module
freezes all objects that have survived a collection (`gc.freeze`). Later collections skip them and
look only at newer objects, and come often enough to find few.

A frozen object is still freed when the last reference to it goes. A reference cycle of frozen
objects is never freed: the runtime leaves none behind when an actor ends, but an application may.
"""

from __future__ import annotations

import gc
from typing import Final

from ._world import World

__all__ = ["Freezer"]

_LOOK_EVERY_S: Final = 0.05
# By default a collection of the middle generation comes after 7,000 new objects, and a full one
# after eleven of those. We collect earlier, when the loop is quiet, so Python begins no full one.
_DUE_AFTER: Final = 2
_OVERDUE_AFTER: Final = 5


class Freezer:
    """Collects and freezes at quiet moments, from `start` until the runtime's clock stops."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = 0

    def start(self) -> None:
        """Collect and freeze now; from then on, look regularly if it is due again."""
        self._freeze()
        self._look_later()

    def stop(self) -> None:
        """Unfreeze all objects of the process; other runtimes in it will freeze them again."""
        gc.unfreeze()

    def _look_later(self) -> None:
        self._world.clock.call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        passed = _middle_collections() - self._seen
        is_quiet = not self._world.pool.ready
        if passed >= (_DUE_AFTER if is_quiet else _OVERDUE_AFTER):
            self._freeze()
        self._look_later()

    def _freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self._seen = _middle_collections()


def _middle_collections() -> int:
    return int(gc.get_stats()[1]["collections"])
