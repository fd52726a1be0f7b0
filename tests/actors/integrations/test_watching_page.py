"""The tables of `docs/watching.md`: every span and metric is in them, with all its attributes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from tests.actors.integrations.test_otel import World
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelResponse,
    ScriptedModel,
    TokenUsage,
    ToolAgent,
    ToolCall,
    tool,
)
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.models.base import ModelUnavailable
from turnkeeper.runtime import Unavailable

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[3] / "docs/watching.md").read_text()
ON_EVERY_SPAN = {"gen_ai.conversation.id"}
OF_FAILURES = {"error.type", "turnkeeper.is_cancelled"}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.meters.shutdown()


def rows(heading: str) -> Iterator[Sequence[str]]:
    """Return the rows of the table below a heading, without its two first lines."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", cell))


class Busy:
    """A model that fails once, then calls two tools, and reports all tokens that there are."""

    model = "busy-1"
    provider = "example"

    def __init__(self) -> None:
        usage = TokenUsage(
            input_tokens=9,
            output_tokens=8,
            cached_tokens=3,
            cache_written_tokens=2,
            reasoning_tokens=1,
            model="busy-1-0613",
        )
        calls = [ToolCall("find", {"order": 7}), ToolCall("fail", {})]
        self.respond = ScriptedModel(
            [
                ModelUnavailable("busy-1", "503"),
                ModelResponse("Let me see.", calls, usage, provider_response_id="r1"),
                "Here it is.",
                "And the other.",
            ]
        ).respond


class Fragile(MemoryJournal):
    """A journal whose next append fails once, if so told."""

    is_broken = False

    async def append(self, *args: object, **kwargs: object) -> Sequence[int]:
        if self.is_broken:
            self.is_broken = False
            raise Unavailable("broken")
        return await super().append(*args, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
async def played(world: World) -> AsyncIterator[World]:
    """A world with a failed attempt, a failed tool, a message that waits, and a failed commit."""
    reached, go_on = anyio.Event(), anyio.Event()

    @tool
    async def find(order: int) -> str:
        """Find an order."""
        reached.set()
        await go_on.wait()
        return f"order {order}"

    @tool
    async def fail() -> str:
        """Fail."""
        raise InvalidInput("no")

    journal = Fragile()
    async with world.instrument(
        Conversations(ToolAgent(Busy(), [find, fail]), journal=journal)
    ) as conversations:
        alice = conversations["alice"]
        first = await alice.send("order 7")
        await reached.wait()
        second = await alice.send("and order 8", on_overlap="queue")
        go_on.set()
        assert await first.reply() == "Here it is."
        assert await second.reply() == "And the other."
        failed = await alice.send("the script has ended")
        assert (await failed.end()).outcome == "failed"
        journal.is_broken = True
        with pytest.raises(Unavailable):
            await alice.send("not now")
        yield world


async def test_every_span_is_in_the_table_with_all_its_attributes(played: World) -> None:
    made: defaultdict[str, set[str]] = defaultdict(set)
    kinds = {}
    for span in played.exporter.get_finished_spans():
        of = span.name.partition(" ")[0]
        made[of] |= set(span.attributes or {})
        assert (span.attributes or {})["gen_ai.conversation.id"] == "alice"
        kinds[of] = span.kind.name.lower()

    table = {row[0].strip("`").partition(" ")[0]: row for row in rows("Spans")}

    assert {of: row[1] for of, row in table.items()} == kinds
    assert {of: names_in(row[4]) for of, row in table.items()} == {
        of: attributes - ON_EVERY_SPAN - OF_FAILURES for of, attributes in made.items()
    }


async def test_every_metric_is_in_the_table_with_all_its_attributes(played: World) -> None:
    made: defaultdict[str, set[str]] = defaultdict(set)
    for name, attributes, _ in played.points():
        made[name] |= set(attributes)

    table = {name: names_in(row[-1]) for row in rows("Metrics") for name in names_in(row[0])}

    made["turnkeeper.loop.lateness"] |= set()  # recorded only after a tenth of a second
    assert table == made
