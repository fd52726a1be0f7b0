"""One look at the store serves all waiting readers, while readers come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from turnkeeper.actors.journals.shared.log_watch import LogWatch, mark_of

pytestmark = pytest.mark.anyio


class Logs:
    """Where some logs end, and what was asked."""

    def __init__(self) -> None:
        self.heads = {"a": 3}
        self.asked: list[list[str]] = []
        self.returned: list[str] = []
        self.error: Exception | None = None
        self.watch = LogWatch(self.read_heads, poll_s=3600)

    async def read_heads(self, names: Sequence[str]) -> Mapping[str, int]:
        self.asked.append(sorted(names))
        await anyio.lowlevel.checkpoint()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return {name: self.heads[name] for name in names if name in self.heads}

    async def wait(self, name: str, after: int) -> None:
        await self.watch.wait(name, after)
        self.returned.append(name)

    def grow(self, name: str) -> None:
        self.heads[name] = self.heads.get(name, 0) + 1
        self.watch.call()


@pytest.fixture
def logs() -> Logs:
    return Logs()


async def test_who_is_behind_or_beyond_the_end_does_not_wait(logs: Logs) -> None:
    for name, after in (("a", 2), ("a", 4), ("new", 1)):
        await logs.wait(name, after)
    assert logs.asked == [["a"], ["a"], ["new"]]


async def test_a_call_is_one_look_however_many_wait(logs: Logs) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(logs.wait, "a", 3)
            group.start_soon(logs.wait, "new", 0)
        await wait_all_tasks_blocked()
        logs.asked.clear()

        logs.watch.call()
        await wait_all_tasks_blocked()
        assert len(logs.asked) == 1
        assert sorted(logs.asked[0]) == ["a", "new"]
        assert logs.returned == []
        logs.grow("new")
        await wait_all_tasks_blocked()
        assert logs.returned == ["new"] * 50
        logs.grow("a")

    assert sorted(logs.returned) == ["a"] * 50 + ["new"] * 50


async def test_when_the_one_that_looks_for_all_leaves_another_looks(logs: Logs) -> None:
    scopes = [anyio.CancelScope() for _ in range(3)]

    async def wait(scope: anyio.CancelScope) -> None:
        with scope:
            await logs.wait("a", 3)

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(wait, scope)
            await wait_all_tasks_blocked()
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        scopes[1].cancel()
        await wait_all_tasks_blocked()

        logs.grow("a")

    assert logs.returned == ["a"]


async def test_a_look_that_fails_is_told_to_one_and_the_others_look_again(logs: Logs) -> None:
    failed: list[str] = []

    async def wait() -> None:
        try:
            await logs.wait("a", 3)
        except ConnectionError as error:
            failed.append(str(error))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(wait)
        await wait_all_tasks_blocked()
        logs.error = ConnectionError("away")
        logs.watch.call()
        await wait_all_tasks_blocked()
        assert failed == ["away"]
        assert logs.asked[-1] == ["a"]

        logs.grow("a")

    assert logs.returned == ["a", "a"]


async def test_what_is_written_during_a_look_is_looked_for_again(logs: Logs) -> None:
    """The look that had begun may not have seen it."""

    async def late(names: Sequence[str]) -> Mapping[str, int]:
        heads = await Logs.read_heads(logs, names)
        if len(logs.asked) == 2:
            logs.grow("a")
        return heads

    logs.watch = LogWatch(late, poll_s=3600)
    async with anyio.create_task_group() as group:
        group.start_soon(logs.wait, "a", 3)
        await wait_all_tasks_blocked()
        logs.watch.call()

    assert len(logs.asked) == 3
    assert logs.returned == ["a"]


async def test_a_look_that_is_cut_off_is_made_by_the_one_that_leads_next(logs: Logs) -> None:
    looking, held = anyio.Event(), anyio.Event()

    async def slow(names: Sequence[str]) -> Mapping[str, int]:
        if len(logs.asked) == 2:
            looking.set()
            logs.asked.append([])
            await held.wait()
        return await Logs.read_heads(logs, names)

    logs.watch = LogWatch(slow, poll_s=3600)
    leader = anyio.CancelScope()

    async def lead() -> None:
        with leader:
            await logs.wait("a", 3)

    async with anyio.create_task_group() as group:
        group.start_soon(lead)
        await wait_all_tasks_blocked()
        group.start_soon(logs.wait, "a", 3)
        await wait_all_tasks_blocked()
        logs.grow("a")
        await looking.wait()

        leader.cancel()

    assert logs.returned == ["a"]


async def test_a_call_for_some_logs_looks_at_these_alone(logs: Logs) -> None:
    async with anyio.create_task_group() as group:
        for name in ("a", "b", "c"):
            logs.heads[name] = 3
            group.start_soon(logs.wait, name, 3)
        await wait_all_tasks_blocked()
        logs.asked.clear()

        logs.watch.call({mark_of("read by none")})
        await wait_all_tasks_blocked()
        assert logs.asked == []
        assert not logs.watch.awaits({mark_of("read by none")})
        assert logs.watch.awaits({mark_of("read by none"), mark_of("c")})

        logs.heads["b"] = logs.heads["c"] = 4
        logs.watch.call({mark_of("b"), mark_of("read by none")})
        await wait_all_tasks_blocked()
        assert (logs.asked, logs.returned) == ([["b"]], ["b"])

        logs.watch.call()
        await wait_all_tasks_blocked()
        assert (logs.asked, logs.returned) == ([["b"], ["a", "c"]], ["b", "c"])
        logs.grow("a")
    assert not logs.watch.is_awaited


async def test_calls_for_some_logs_do_not_put_off_the_look_at_all(logs: Logs) -> None:
    """So a call that was lost is made good within the interval, however many others come."""
    async with anyio.create_task_group() as group:
        for name in ("a", "b"):
            logs.heads[name] = 3
            group.start_soon(logs.wait, name, 3)
        await wait_all_tasks_blocked()
        logs.heads["b"] = 4  # and the call for it was lost
        logs.asked.clear()
        logs.watch._poll_at = anyio.current_time()

        logs.watch.call({mark_of("a")})
        await wait_all_tasks_blocked()
        assert (logs.asked, logs.returned) == ([["a", "b"]], ["b"])
        logs.grow("a")
