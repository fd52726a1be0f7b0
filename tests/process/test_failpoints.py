"""A process that holds conversations dies at each boundary that matters; its clients go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..drawn import drawn
from .mortal_worker import JOURNAL_POINTS, POINTS
from .stressing import check, database, small_stress

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(3)]

ALL_POINTS = (*JOURNAL_POINTS, *POINTS)
PAIRS = tuple(zip(ALL_POINTS[::2], ALL_POINTS[1::2], strict=True))
RARE = ("snapshot", "condensation", "claim", "log is read")


def nth_of(point: str, base: int) -> int:
    """Early where it is passed seldom; else in the middle of things."""
    return 1 + base % 3 if any(word in point for word in RARE) else 1 + base


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with database() as name:
        yield name


@pytest.mark.sweep
@pytest.mark.parametrize(("point", "other"), drawn(PAIRS, 2))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nothing_acknowledged_is_lost_when_the_process_dies(
    tmp_path: Path, point: str, other: str
) -> None:
    """In the middle of things at both, and at one of them as soon as it can while it recovers."""
    points = [(point, nth_of(point, 23)), (other, nth_of(other, 29)), (point, 1)]
    backend = ("asyncio", "trio")[ALL_POINTS.index(point) // 2 % 2]
    stress = small_stress(str(tmp_path / "chats.db"), points=points, backend=backend)

    await stress.run()

    assert stress.died_at == [point, other, point]
    await check(stress)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nothing_acknowledged_is_lost_on_postgresql_when_the_process_dies(url: str) -> None:
    """One life after the other on one database, each ended at another boundary."""
    points = [
        ("before a commit", 20),
        ("after a commit, before it is acknowledged", 20),
        ("after a claim, before the log is read", 2),
        ("in a tool call", 12),
    ]
    stress = small_stress(url, points=points, backend="trio")

    await stress.run()

    assert stress.died_at == [point for point, _ in points]
    await check(stress)


@pytest.mark.slow
@pytest.mark.parametrize("point", ALL_POINTS)
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_acknowledged_is_lost_on_postgresql_at_any_point(
    url: str, point: str, seed: int, anyio_backend_name: str
) -> None:
    points = [(point, nth_of(point, 17 * seed)), (point, 1), (point, nth_of(point, 3))]
    stress = small_stress(url, points=points, backend=anyio_backend_name, seed=seed)

    await stress.run()

    assert stress.died_at == [point] * 3
    await check(stress)


@pytest.mark.slow
@pytest.mark.parametrize("point", ALL_POINTS)
@pytest.mark.parametrize("base", range(1, 60, 7))
async def test_nothing_acknowledged_is_lost_whenever_the_process_dies(
    tmp_path: Path, point: str, base: int, anyio_backend_name: str
) -> None:
    points = [(point, nth_of(point, base)), (point, nth_of(point, base // 7)), (point, 2)]
    stress = small_stress(
        str(tmp_path / "chats.db"), points=points, backend=anyio_backend_name, seed=base
    )

    await stress.run()

    await check(stress)
