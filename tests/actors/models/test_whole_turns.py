"""Whole turns of a `ToolAgent` on each adapter, with a provider that has a bad day."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.actors.models.asking import asking
from tests.actors.models.servers import Answer, Call, Reply, Status
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    Prices,
    RollingCondenser,
    ToolAgent,
)
from turnkeeper.actors.events import StepFinishedEvent
from turnkeeper.runtime import Backoff

pytestmark = pytest.mark.anyio

every_api = pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])

TOO_LONG = {
    "chat": {"code": "context_length_exceeded", "param": "messages"},
    "responses": {"code": "context_length_exceeded", "param": "input"},
    "anthropic": {"message": "prompt is too long: 9 tokens > 8 maximum"},
}


async def look(at: str) -> str:
    """Look somewhere."""
    return f"seen {at}"


async def play(
    api: str, replies: Sequence[Reply], messages: Sequence[str] = ("where is it?",)
) -> tuple[list[str], list[StepFinishedEvent], int]:
    """Each message's reply or how its turn ended, the steps, and the number of requests."""
    ends: list[str] = []
    async with asking(api, prices=Prices(1_000_000.0, 0.0)) as one:
        one.server.replies.extend(replies)
        agent = ToolAgent(one.model, [look], backoff=Backoff(first_s=0))
        async with Conversations(
            agent, journal=MemoryJournal(), condenser=RollingCondenser()
        ) as conversations:
            alice = conversations["alice"]
            for message in messages:
                end = await (await alice.send(message)).end()
                ends.append(end.reply if end.outcome == "completed" else str(end.detail))
            events = [logged.event async for logged in alice.events(live=False)]
        steps = [event for event in events if isinstance(event, StepFinishedEvent)]
        return ends, steps, len(one.server.bodies)


@every_api
async def test_a_turn_with_calls_gets_through_limits_cuts_and_failures(api: str) -> None:
    calls = [Call("look", ['{"at"', ': "a"}'], "c1"), Call("look", ['{"at": "b"}'], "c2")]
    ends, steps, requests = await play(
        api,
        [
            Status(429, {"message": "slow down"}, {"retry-after": "0"}),
            Status(503),
            Answer(["let me"], calls, events_max=3, after="drop"),
            Answer(["let me look"], calls, input_tokens=10),
            Answer(["it is ", "he"], events_max=3, after="drop"),
            Answer(["it is ", "here"], input_tokens=20),
        ],
    )
    assert ends == ["it is here"]
    assert requests == 6
    assert [step.usage.cost for step in steps] == [10.0, 20.0]


@every_api
async def test_a_call_with_malformed_arguments_is_answered_and_the_turn_goes_on(api: str) -> None:
    ends, _, requests = await play(
        api, [Answer(calls=[Call("look", ['{"at": '])]), Answer(["sorry"])]
    )
    assert ends == ["sorry"]
    assert requests == 2


@every_api
async def test_a_refusal_fails_its_turn_and_the_next_message_gets_its_own(api: str) -> None:
    refused = Answer(["no"], ending="refusal") if api == "anthropic" else Answer(refusal="no")
    ends, _, _ = await play(api, [refused, Answer(["yes"])], ["first", "second"])
    assert ends[0].startswith("ModelRefusal")
    assert ends[1] == "yes"


@every_api
async def test_a_view_that_is_too_long_is_condensed_and_asked_about_again(api: str) -> None:
    filler = [Answer([f"answer {n}"]) for n in range(6)]
    ends, _, requests = await play(
        api,
        [*filler, Status(400, TOO_LONG[api]), Answer(["done"])],
        [f"message {n}" for n in range(7)],
    )
    assert ends[-1] == "done"
    assert requests == 8
