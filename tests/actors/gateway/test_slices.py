"""A long log does not hold up the other requests, whatever is asked about it.

What runs between two passes of the event loop is counted in calls, which repeat; times do not.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import anyio
import httpx
import pytest

from tests.actors.conversations.worlds import HeldAgent
from tests.browser.stories import Story
from tests.runtime.actors import Counter, Get
from turnkeeper.actors import Conversations, Journal, MemoryJournal, SQLiteJournal, gateway

from .worlds import JSON

T = TypeVar("T")

pytestmark = [pytest.mark.anyio, pytest.mark.costly]

TURNS = 150
SHORT = 8
ROWS = 600
MORE_CALLS_MAX = 9_000
"""The calls between two passes that a long log may add: three slices, as trio runs the tasks of a
pass in any order. An answer that is made in one go adds 11,500 at least."""


class Passes:
    """Counts the calls of this thread between the passes of the event loop."""

    def __init__(self) -> None:
        self.most = 0
        self.calls = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        def count(_frame: FrameType, what: str, _of: object) -> None:
            self.calls += what in ("call", "c_call")

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    async def note(self) -> None:
        while True:
            self.calls = 0
            await anyio.lowlevel.checkpoint()
            self.most = max(self.most, self.calls)


def story_of(turns: int, name: str | None = None) -> Story:
    """Return a log in which each turn has a call and an answer."""
    story = Story(name or f"of-{turns}")
    for number in range(turns):
        story.says(f"m{number}", f"Where is order {number}?")
        (call,) = story.calls(("look_up", {"order": number}), took=0.1)
        story.results(call, "on its way")
        story.answers("It is on its way.", took=0.1)
        story.ends("completed")
    return story


@asynccontextmanager
async def reading(journal: Journal, *stories: Story) -> AsyncIterator[httpx.AsyncClient]:
    async with journal:
        for story in stories:
            await story.write(journal)
    async with Conversations(HeldAgent(), journal=journal, recover="on_message") as conversations:
        app = gateway.app(conversations, limits=gateway.GatewayLimits(page_max=10_000))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost/v1/", headers=JSON
        ) as client:
            yield client


async def most_calls(client: httpx.AsyncClient, method: str, path: str) -> tuple[int, int]:
    """Return the most calls between two passes while this is asked, and the answer's length."""
    passes = Passes()
    accept = {} if "live=false" in path else {"accept": "application/json"}
    async with anyio.create_task_group() as group:
        group.start_soon(passes.note)
        await anyio.lowlevel.checkpoint()
        with passes.counting():
            reply = await client.request(method, path, headers=accept)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()  # so that what came last is counted too
        group.cancel_scope.cancel()
    assert reply.status_code == 200, reply.text
    return passes.most, len(reply.content)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with reading(MemoryJournal(), story_of(SHORT), story_of(TURNS)) as client:
        yield client


@pytest.mark.parametrize(
    "asked",
    [
        "GET conversations/{}/messages?shape=ag-ui",
        "GET conversations/{}/messages?shape=ai-sdk",
        "GET conversations/{}/messages?shape=openai-chat",
        "GET conversations/{}/messages?shape=openai-responses",
        "GET conversations/{}/messages?shape=anthropic",
        "GET conversations/{}/messages?limit=10000",
        "GET conversations/{}/messages?of=view",
        "GET conversations/{}/messages?of=view&shape=anthropic",
        "GET conversations/{}/events?limit=10000",
        "GET conversations/{}/events?live=false",
        "GET conversations/{}/view",
        "GET conversations/{}/view?brief=10",
        "GET conversations/{}/steps",
        "GET conversations/{}/log?limit=10000",
        "GET conversations/{}/outline",
        "GET conversations/{}/bars",
        "GET conversations/{}/difference?first=0&last={}&limit=10000",
        "GET conversations/{}/export",
        "POST conversations/{}/verify",
        "GET ag-ui/{}/connect",
    ],
)
async def test_other_tasks_run_while_a_long_log_is_made_into_an_answer(
    client: httpx.AsyncClient, asked: str
) -> None:
    method, path = asked.split(" ")

    async def most(turns: int) -> tuple[int, int]:
        story = story_of(turns)
        name, head = story.name, str(story.seq)
        return await most_calls(client, method, path.replace("{}", name, 1).replace("{}", head))

    await most(SHORT)  # what is made once, at the first request
    short, short_length = await most(SHORT)
    long, long_length = await most(TURNS)

    assert long_length > short_length or method == "POST"
    assert long <= short + MORE_CALLS_MAX


@pytest.mark.parametrize("asked", ["conversations?prefix=row-", "changes?live=false&prefix=row-"])
async def test_other_tasks_run_while_many_rows_are_made_into_an_answer(
    tmp_path: Path, asked: str
) -> None:
    stories = (story_of(1, f"row-{number}") for number in range(ROWS))
    async with reading(SQLiteJournal(tmp_path / "chats.db"), *stories) as client:
        await most_calls(client, "GET", f"{asked}&limit={SHORT}")
        few, _ = await most_calls(client, "GET", f"{asked}&limit={SHORT}")
        many, _ = await most_calls(client, "GET", f"{asked}&limit={ROWS}")

    assert many <= few + MORE_CALLS_MAX


async def test_other_tasks_run_while_many_actors_are_made_into_an_answer() -> None:
    """The state of the actors is taken in one go, because it is that of one moment."""
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        actors = conversations.runtime.region("many", lambda _: Counter())
        limits = gateway.GatewayLimits(page_max=ROWS)
        transport = httpx.ASGITransport(gateway.app(conversations, limits=limits))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost/v1/", headers=JSON
        ) as client:

            async def add_actors(first: int) -> None:
                for number in range(first, first + ROWS):
                    await actors[f"actor-{number}"].ask(Get())

            await most_calls(client, "GET", "runtime/tree")
            few, _ = await most_calls(client, "GET", "runtime/tree")
            await add_actors(0)
            taking, tree = count_calls(conversations.runtime.tree)
            many, length = await most_calls(client, "GET", f"runtime/tree?limit={10 * ROWS}")
            await add_actors(ROWS)
            taking_more, _ = count_calls(partial(conversations.runtime.tree, limit=ROWS))
            more, _ = await most_calls(client, "GET", f"runtime/tree?limit={10 * ROWS}")

    assert str(tree).count("actor-") == ROWS
    assert length > 100 * ROWS
    assert many <= few + taking + MORE_CALLS_MAX
    # Not with `many`: on trio, the pass that takes the tree may be the last, which none counts.
    assert taking_more <= taking + MORE_CALLS_MAX, "what is left out is only counted"
    assert more <= few + taking_more + MORE_CALLS_MAX


def count_calls(function: Callable[[], T]) -> tuple[int, T]:
    """Return how many calls a function makes, and what it returns."""
    passes = Passes()
    with passes.counting():
        returned = function()
    return passes.calls, returned
