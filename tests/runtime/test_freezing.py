"""`freeze_objects`: what has survived a collection is not looked at again."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest

from turnkeeper.runtime import Runtime
from turnkeeper.runtime._freezing import _DUE_AFTER, _OVERDUE_AFTER
from turnkeeper.runtime.testing import VirtualClock

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Without what pytest itself holds, each collection here is a short one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _are_frozen(objects: Sequence[object]) -> bool:
    """True if all are, False if none is. A count would miss that other frozen objects are freed."""
    looked_at = {id(each) for each in gc.get_objects()}
    (answer,) = {id(each) not in looked_at for each in objects}
    return answer


async def test_by_default_nothing_is_frozen() -> None:
    clock = VirtualClock()
    frozen = gc.get_freeze_count()
    async with Runtime(ports=clock.ports()):
        for _ in range(_OVERDUE_AFTER):
            gc.collect(1)
        await clock.advance(1.0)

        assert gc.get_freeze_count() <= frozen


async def test_what_survived_is_frozen_once_it_is_due_and_the_loop_is_quiet() -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), freeze_objects=True):
        kept: list[object] = [[] for _ in range(1_000)]

        gc.collect(1)
        await clock.advance(1.0)
        assert not _are_frozen(kept), "too early"
        for _ in range(_DUE_AFTER):
            gc.collect(1)
        await clock.advance(1.0)

        assert _are_frozen(kept)
    assert gc.get_freeze_count() == 0, "a runtime that was left leaves nothing frozen"


async def test_a_busy_loop_is_left_alone_until_a_long_collection_would_come_by_itself() -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), freeze_objects=True) as runtime:
        freezer = runtime._freezer
        assert freezer is not None
        kept: list[object] = [[] for _ in range(1_000)]
        runtime._system.pool.ready.append(runtime._system)  # type: ignore[arg-type]

        for _ in range(_DUE_AFTER):
            gc.collect(1)
        freezer._look()
        assert not _are_frozen(kept)
        for _ in range(_OVERDUE_AFTER - _DUE_AFTER):
            gc.collect(1)
        freezer._look()

        assert _are_frozen(kept)
        runtime._system.pool.ready.clear()


async def test_a_frozen_object_goes_with_the_last_that_holds_it() -> None:
    async with Runtime(freeze_objects=True) as runtime:
        freezer = runtime._freezer
        assert freezer is not None
        kept: list[object] = [[] for _ in range(1_000)]
        freezer._freeze()
        frozen = gc.get_freeze_count()

        kept.clear()

        assert gc.get_freeze_count() <= frozen - 1_000
