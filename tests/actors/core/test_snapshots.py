"""Snapshots are written and read in slices, so that the event loop never stands still for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from tests.actors.core.logs import Maker
from turnkeeper.actors.core import snapshots
from turnkeeper.actors.core.snapshots import SLICE_EVENTS, Slices, run_whole
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.view_index import IndexedEvents
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Snapshot
from turnkeeper.actors.owner.loading import in_slices

LENGTH = 3 * SLICE_EVENTS + 1


def long_state() -> Folded:
    make, state = Maker(), Folded()
    for n in range(LENGTH):
        state.fold(make.user(f"message {n}\nin two lines", message_id=f"m{n}"))
    return state


def most_between_yields(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, begin: Callable[[], Slices[object]]
) -> tuple[int, int]:
    """Return how many events this function had at most in a slice, and in all."""
    calls = [0]
    real = getattr(place, name)

    def counted(*args: object, **options: object) -> object:
        result = real(*args, **options)
        calls[-1] += len(result) if isinstance(result, list) else 1
        return result

    monkeypatch.setattr(place, name, counted)
    for _ in begin():
        calls.append(0)  # noqa: PERF401 - the calls of the next slice are counted in it
    return max(calls), sum(calls)


@pytest.mark.parametrize(
    ("place", "name", "is_reading"),
    [
        (snapshots, "encode_event", False),
        (snapshots, "decode_known", True),
        (IndexedEvents, "fold", True),
    ],
    ids=["encoding", "decoding", "folding"],
)
def test_no_slice_of_a_snapshot_has_more_than_a_few_events(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, is_reading: bool
) -> None:
    state = long_state()
    begin: Callable[[], Slices[object]] = state.writing_snapshot
    if is_reading:
        begin = partial(Folded.restoring, state.to_snapshot())

    assert most_between_yields(monkeypatch, place, name, begin) == (SLICE_EVENTS, LENGTH)


def test_no_slice_of_a_comparison_has_more_than_a_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = long_state()
    other = Folded.from_snapshot(state.to_snapshot())
    assert other is not None
    begin = partial(state.comparing_with, other)

    assert run_whole(begin())
    most, _ = most_between_yields(monkeypatch, UserMessageEvent, "__eq__", begin)

    assert most == SLICE_EVENTS


def test_a_snapshot_holds_the_folds_as_they_were_when_it_was_begun() -> None:
    state = long_state()
    before = state.to_snapshot()
    slices = state.writing_snapshot()
    next(slices)

    state.fold(Maker().user("late", message_id="late"))

    assert run_whole(slices) == before


def test_each_slice_of_the_view_has_a_line_of_the_json() -> None:
    state = long_state()
    snapshot = state.to_snapshot()
    in_one_line = json.dumps(json.loads(snapshot.payload)).encode()

    assert len(json.loads(snapshot.payload)["view"]) == LENGTH
    assert snapshot.payload.count(b"\n") == -(-LENGTH // SLICE_EVENTS) + 1
    assert Folded.from_snapshot(snapshot) == state
    assert Folded.from_snapshot(snapshot._replace(payload=in_one_line)) is None


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        (b'"content":"message 7', b'"content":7, "rest":"'),
        (b'{"kind":"user_message"', b'{"kind":"from_the_future"'),
        (b'{"kind":"user_message"', b'{"kind"'),
        (b'{"kind":"user_message"', b'{"kind":"'),
        (b'"id":"e1",', b""),  # each would be drawn anew
        (b'"timestamp":"2025-01-01T00:00:01Z",', b""),
        (b"\n]}", b"\n]"),
    ],
)
def test_a_snapshot_with_an_event_that_cannot_be_read_is_as_none(
    found: bytes, instead: bytes
) -> None:
    seq, version, payload = long_state().to_snapshot()
    spoilt = payload.replace(found, instead, 1)

    assert spoilt != payload
    assert Folded.from_snapshot(Snapshot(seq, version, spoilt)) is None


@pytest.mark.parametrize("place", [b"{", b'"turns":{', b'"details":{', b'"metrics":{'])
def test_a_snapshot_that_holds_more_than_the_folds_of_this_version_is_as_none(place: bytes) -> None:
    """Its writer's folds had another shape, under a version that should have risen with it."""
    seq, version, payload = long_state().to_snapshot()
    spoilt = payload.replace(place, place + b'"more":1,', 1)

    assert spoilt != payload
    assert Folded.from_snapshot(Snapshot(seq, version, spoilt)) is None


@pytest.mark.anyio
async def test_other_tasks_run_after_each_slice() -> None:
    ran = 0

    def work() -> Slices[str]:
        for _ in range(5):
            yield
        return "done"

    async def other() -> None:
        nonlocal ran
        while True:
            await anyio.lowlevel.checkpoint()
            ran += 1

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        assert await in_slices(work()) == "done"
        group.cancel_scope.cancel()
    assert ran >= 3
