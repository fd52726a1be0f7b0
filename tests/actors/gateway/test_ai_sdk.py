"""The AI SDK's stock client, from npm: it leaves at any chunk, resumes, shows the transcript."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import pytest

from turnkeeper.actors import (
    Agent,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
    TurnContext,
)
from turnkeeper.actors.events import ActionEvent, LoggedEvent, UserMessageEvent
from turnkeeper.actors.gateway import GatewayLimits

from .node import Client, client, install
from .worlds import BOUND_S, World, gateway_world

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(4)]

CHAT = "/v1/ai-sdk/chat"


@pytest.fixture(scope="module")
async def node(anyio_backend: object) -> AsyncIterator[Client]:
    """One process of node for all tests: it starts slowly."""
    async with client(install(), "client.mjs") as program:
        yield program


class Talk(NamedTuple):
    """A gateway, and the client in node."""

    world: World
    client: Client

    async def open(self, chat: str = "a", **options: object) -> None:
        api = self.world.address + CHAT
        await self.client.do("open", chat, id="chat", api=api, **options)

    async def said(self, text: str, chat: str = "a", **options: object) -> dict[str, Any]:
        """Send a message, and wait for the end of the stream."""
        await self.client.do("send", chat, text=text, **options)
        return await self.client.do("done", chat)

    async def transcript(self) -> list[dict[str, Any]]:
        reply = await self.world.http.get("/v1/conversations/chat/messages?shape=ai-sdk")
        messages: list[dict[str, Any]] = reply.json()["messages"]
        return messages


@asynccontextmanager
async def talking(node: Client, agent: Agent | None = None) -> AsyncIterator[Talk]:
    async with gateway_world(agent) as world:
        talk = Talk(world, node)
        await talk.open()
        yield talk


@pytest.fixture
async def talk(node: Client) -> AsyncIterator[Talk]:
    async with talking(node) as talk:
        yield talk


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [
        f"{message['role']}: " + "".join(part.get("text", "") for part in message["parts"])
        for message in messages
    ]


async def refund(order: int) -> str:
    """Pay an order back."""
    return f"order {order} is paid back"


def asking_agent() -> ToolAgent:
    """Calls two tools that wait for the user, then says that it is done."""
    calls = [ToolCall("refund", {"order": n}) for n in (1, 2)]
    model = ScriptedModel([ModelResponse("May I?", calls=calls), "Done, all of it."])
    return ToolAgent(model, [refund], confirm=["refund"])


# --- one client ----------------------------------------------------------------------------------


async def test_a_plain_turn_is_shown_as_the_transcript_has_it(talk: Talk) -> None:
    shown = await talk.said("stream one")
    shown = await talk.said("two")

    assert texts(shown["messages"]) == [
        "user: stream one",
        "assistant: a(stream one)",
        "user: two",
        "assistant: a(two)",
    ]
    assert shown["status"] == "ready"
    assert shown["messages"] == await talk.transcript()


async def test_tools_are_shown_with_their_results(talk: Talk) -> None:
    shown = await talk.said("two tools")

    parts = shown["messages"][1]["parts"]
    calls = [part for part in parts if part["type"] == "dynamic-tool"]
    assert [(call["state"], call["output"]) for call in calls] == [
        ("output-available", "seen ")
    ] * 2
    assert shown["messages"] == await talk.transcript()


async def test_a_turn_that_fails_is_an_error(talk: Talk) -> None:
    shown = await talk.said("fail")

    assert shown["status"] == "error"
    assert shown["error"] == "the turn failed"
    assert "no answer" not in str(shown)


async def test_a_message_whose_reply_was_lost_is_sent_again_and_written_once(talk: Talk) -> None:
    await talk.said("one", id="m1")
    await talk.open("b")
    shown = await talk.said("one", chat="b", id="m1")

    assert texts(shown["messages"]) == ["user: one", "assistant: a(one)"]
    assert shown["messages"] == await talk.transcript()


async def test_files_come_to_the_agent_and_are_shown_as_they_were_sent(talk: Talk) -> None:
    png = "iVBORw0KGgo="
    files = [
        {
            "type": "file",
            "mediaType": "text/plain",
            "filename": "notes.txt",
            "url": "data:text/plain;base64,YnV5IG1pbGs=",
        },
        {"type": "file", "mediaType": "image/png", "url": f"data:image/png;base64,{png}"},
        {
            "type": "file",
            "mediaType": "application/pdf",
            "filename": "order.pdf",
            "url": "https://files.example/order.pdf",
        },
    ]

    shown = await talk.said("what is this?", id="m1", files=files)

    assert shown["messages"][0]["parts"][:3] == files
    assert shown["messages"] == await talk.transcript()
    (message, *_) = await talk.world.conversations["chat"].view()
    assert isinstance(message, UserMessageEvent)
    assert message.files[0].text == "buy milk"
    assert [file.url for file in message.files] == [None, None, "https://files.example/order.pdf"]
    head = (await talk.world.conversations["chat"].at()).seq
    await talk.open("b")
    again = await talk.said("what is this?", "b", id="m1", files=files)
    assert again["messages"] == shown["messages"]
    assert (await talk.world.conversations["chat"].at()).seq == head


async def test_an_edited_message_replaces_what_came_from_it_on(talk: Talk) -> None:
    await talk.said("one", id="m1")
    await talk.said("two", id="m2")
    await talk.said("three", id="m3")

    for text in ("two again", "two, at last", "two again"):
        shown = await talk.said(text, messageId="m2")
        assert texts(shown["messages"]) == [
            "user: one",
            "assistant: a(one)",
            f"user: {text}",
            f"assistant: a({text})",
        ]
        assert shown["messages"] == await talk.transcript()
    view = await talk.world.conversations["chat"].view()
    assert len(view) == 4


async def test_an_edit_whose_reply_was_lost_is_sent_again_and_written_once(talk: Talk) -> None:
    await talk.said("one", id="m1")
    await talk.said("other", messageId="m1")
    head = (await talk.world.conversations["chat"].at()).seq

    await talk.open("b")
    shown = await talk.said("other", "b", id="m1")

    assert texts(shown["messages"]) == ["user: other", "assistant: a(other)"]
    assert shown["messages"] == await talk.transcript()
    assert (await talk.world.conversations["chat"].at()).seq == head


async def test_an_answer_is_made_anew(node: Client) -> None:
    agent = ToolAgent(ScriptedModel(["first", "second", "third"]), [])
    async with talking(node, agent) as talk:
        await talk.said("one", id="m1")
        for answer in ("second", "third"):
            await talk.client.do("regenerate")
            shown = await talk.client.do("done")
            assert texts(shown["messages"]) == ["user: one", f"assistant: {answer}"]
            assert shown["messages"] == await talk.transcript()
            assert shown["messages"][0]["id"] == "m1"


async def test_a_regeneration_that_is_sent_again_while_it_runs_is_one(talk: Talk) -> None:
    await talk.said("stream one", id="m1")
    messages = await talk.transcript()
    agent = talk.world.agent
    agent.hold("stream one")
    for chat in ("b", "c"):
        await talk.open(chat, messages=messages)
    await talk.client.do("regenerate", "b")
    while texts((await talk.client.do("show", "b"))["messages"])[-1:] != ["assistant: a("]:
        pass
    await talk.client.do("regenerate", "c")
    while texts((await talk.client.do("show", "c"))["messages"])[-1:] != ["assistant: a("]:
        pass
    agent.release("stream one")

    first, second = await talk.client.do("done", "b"), await talk.client.do("done", "c")

    assert first["messages"] == second["messages"] == await talk.transcript()
    assert agent.turns == ["stream one"] * 2


async def test_a_regeneration_of_a_named_answer_that_is_sent_again_is_one(talk: Talk) -> None:
    """A reply was lost, and the turn is over by the time that the client asks again."""
    await talk.said("one", id="m1")
    messages = await talk.transcript()
    named = messages[-1]["id"]
    for chat in ("b", "c"):
        await talk.open(chat, messages=messages)
        await talk.client.do("regenerate", chat, messageId=named)
        shown = await talk.client.do("done", chat)
        assert shown["messages"] == await talk.transcript()
    assert talk.world.agent.turns == ["one"] * 2

    newest = (await talk.transcript())[-1]["id"]
    assert newest != named
    await talk.client.do("regenerate", "c", messageId=newest)
    await talk.client.do("done", "c")
    assert talk.world.agent.turns == ["one"] * 3


# --- leaving and coming back ---------------------------------------------------------------------


class Gated:
    """Calls a tool, then writes an answer and stops in the middle of it until it is let go on."""

    def __init__(self) -> None:
        self.gate = anyio.Event()

    async def run(self, turn: TurnContext) -> None:
        await turn.call_tools([ToolCall("look")], self._look)
        await turn.stream(self._pieces())

    async def _look(self, _: ActionEvent) -> str:
        return "seen"

    async def _pieces(self) -> AsyncIterator[str]:
        yield "so far, "
        await self.gate.wait()
        yield "so good"


async def test_a_client_that_was_cut_at_any_chunk_resumes_and_shows_the_transcript(
    node: Client,
) -> None:
    agent = Gated()
    async with talking(node, agent) as talk:
        # As many chunks come before the gate: start, start-step, call, output, finish-step,
        # start-step, text-start, and the first piece.
        for after in range(8):
            agent.gate = anyio.Event()
            messages = await talk.transcript() if after else []
            await talk.open(messages=messages)
            await talk.client.do("cut", after=after)
            await talk.client.do("send", text=f"cut after {after}")
            cut = await talk.client.do("done")
            assert (cut["status"], cut["error"]) == ("error", "network error"), after
            await talk.client.do("resume")
            while len((await talk.client.do("show"))["statuses"]) < 2:
                pass
            agent.gate.set()
            shown = await talk.client.do("done")
            assert shown["statuses"] == [200, 200]
            assert texts(shown["messages"])[-1] == "assistant: so far, so good"
            assert shown["messages"] == await talk.transcript()


async def test_a_reload_in_the_middle_of_an_answer_shows_what_was_said_so_far(talk: Talk) -> None:
    agent = talk.world.agent
    agent.hold("stream long")
    await talk.client.do("send", text="stream long")
    await agent.reached["stream long"].wait()

    await talk.open("b", messages=await talk.transcript())
    await talk.client.do("resume", "b")
    while texts((await talk.client.do("show", "b"))["messages"])[-1:] != ["assistant: a("]:
        pass
    agent.release("stream long")
    reloaded = await talk.client.do("done", "b")
    first = await talk.client.do("done")

    assert first["messages"] == reloaded["messages"] == await talk.transcript()


async def test_nothing_runs_and_nothing_is_resumed(talk: Talk) -> None:
    await talk.client.do("resume")
    shown = await talk.client.do("done")
    assert (shown["status"], shown["statuses"], shown["messages"]) == ("ready", [204], [])


async def test_stopping_interrupts_the_turn_that_was_seen(talk: Talk) -> None:
    agent = talk.world.agent
    agent.hold("stream long")
    await talk.client.do("send", text="stream long")
    while texts((shown := await talk.client.do("show"))["messages"])[-1:] != ["assistant: a("]:
        pass
    seen = shown["messages"][1]["id"]

    late = await talk.world.http.post(f"{CHAT}/chat/stop", json={"messageId": "another"})
    hit = await talk.world.http.post(f"{CHAT}/chat/stop", json={"messageId": seen})
    shown = await talk.client.do("done")

    assert (late.json(), hit.json()) == ({"changed": False}, {"changed": True})
    assert texts(shown["messages"]) == ["user: stream long", "assistant: a("]
    assert shown["messages"] == await talk.transcript()


# --- several at once -----------------------------------------------------------------------------


async def test_a_second_tab_interrupts(talk: Talk) -> None:
    agent = talk.world.agent
    agent.hold("stream one")
    await talk.open("b", body={"on_overlap": "interrupt"})
    await talk.client.do("send", text="stream one")
    await agent.reached["stream one"].wait()

    second = await talk.said("two", "b")
    first = await talk.client.do("done")

    assert texts(first["messages"]) == ["user: stream one", "assistant: a("]
    assert texts(second["messages"]) == ["user: two", "assistant: a(two)"]
    assert [*first["messages"], *second["messages"]] == await talk.transcript()


async def test_a_message_that_waits_says_so_and_then_gets_its_own_answer(talk: Talk) -> None:
    agent = talk.world.agent
    agent.hold("one")
    await talk.open("b", body={"on_overlap": "queue"})
    await talk.client.do("send", text="one")
    await agent.reached["one"].wait()
    await talk.client.do("send", "b", text="two", id="m2")
    while not (shown := await talk.client.do("show", "b"))["data"]:
        pass
    assert shown["data"][0]["data"] == {"messageId": "m2"}
    assert texts((await talk.transcript())[-1:]) == ["user: two"]
    agent.release("one")

    first, second = await talk.client.do("done"), await talk.client.do("done", "b")

    assert texts(second["messages"]) == ["user: two", "assistant: a(two)"]
    assert [*first["messages"], *second["messages"]] == await talk.transcript()


async def test_a_message_is_refused_while_a_turn_runs(talk: Talk) -> None:
    agent = talk.world.agent
    agent.hold("one")
    await talk.open("b", body={"on_overlap": "reject"})
    await talk.client.do("send", text="one")
    await agent.reached["one"].wait()

    refused = await talk.said("two", "b")
    agent.release("one")

    assert (refused["status"], refused["statuses"]) == ("error", [409])
    assert (await talk.client.do("done"))["messages"] == await talk.transcript()


async def test_a_turn_that_is_rolled_back_is_marked_and_left_out(talk: Talk) -> None:
    agent = talk.world.agent
    agent.hold("stream one")
    await talk.open("b", body={"on_overlap": "rollback"})
    await talk.client.do("send", text="stream one")
    await agent.reached["stream one"].wait()

    second = await talk.said("two", "b")
    first = await talk.client.do("done")

    kinds = [part["type"] for part in first["messages"][1]["parts"]]
    assert "data-retracted" in kinds
    assert second["messages"] == await talk.transcript()


async def test_a_message_that_steers_shares_the_answer_under_one_id(node: Client) -> None:
    reached, gate = anyio.Event(), anyio.Event()

    async def look() -> str:
        """Look."""
        reached.set()
        await gate.wait()
        return "seen"

    model = ScriptedModel([ModelResponse(calls=[ToolCall("look")]), "both answered"])
    async with talking(node, ToolAgent(model, [look])) as talk:
        await talk.open("b", body={"on_overlap": "steer"})
        await talk.client.do("send", text="one")
        await reached.wait()
        await talk.client.do("send", "b", text="two", id="m2")
        while not (await talk.client.do("show", "b"))["data"]:
            pass
        gate.set()

        first, second = await talk.client.do("done"), await talk.client.do("done", "b")

        assert first["messages"][1] == second["messages"][1]
        parts = first["messages"][1]["parts"]
        assert [part.get("id") for part in parts if part["type"] == "steering-message"] == ["m2"]
        assert first["messages"] == await talk.transcript()


async def test_a_turn_that_waited_is_resumed_as_one_message(talk: Talk) -> None:
    """The client added an empty message before it, for the `start` of the time of waiting."""
    agent, chat = talk.world.agent, talk.world.conversations["chat"]
    agent.hold("one")
    agent.hold("stream two")
    await chat.send("one")
    await agent.reached["one"].wait()
    await chat.send("stream two")
    agent.release("one")
    await agent.reached["stream two"].wait()

    await talk.open("b", messages=await talk.transcript())  # its last is the question
    await talk.client.do("resume", "b")
    with anyio.fail_after(BOUND_S):
        while not (await talk.client.do("show", "b"))["messages"][3:]:
            pass
    agent.release("stream two")

    assert (await talk.client.do("done", "b"))["messages"] == await talk.transcript()


async def test_a_message_whose_turn_was_rolled_back_is_resumed_in_the_turn_that_answers_it(
    node: Client,
) -> None:
    """The turn that it had joined was streamed to its end, so the answer never came."""
    reached = [anyio.Event() for _ in range(3)]
    gates = [anyio.Event() for _ in range(3)]

    async def look(n: int) -> str:
        """Look."""
        reached[n].set()
        await gates[n].wait()
        return f"seen {n}"

    looks = [ModelResponse(f"Wait {n}.", calls=[ToolCall("look", {"n": n})]) for n in range(3)]
    model = ScriptedModel([*looks[:2], "three", looks[2], "two"])
    async with talking(node, ToolAgent(model, [look])) as talk:
        chat = talk.world.conversations["chat"]
        await chat.send("one")
        await reached[0].wait()
        await chat.send("two", message_id="m2", on_overlap="steer")
        gates[0].set()
        await reached[1].wait()
        await chat.send("three", on_overlap="rollback")
        await reached[2].wait()

        *before, question, said = await talk.transcript()
        await talk.open("b", messages=[*before, question])
        await talk.client.do("resume", "b")
        await talk.open("c", messages=before)
        await talk.client.do("send", "c", text="two", id="m2")
        with anyio.fail_after(BOUND_S):
            for name in ("b", "c"):
                shown: dict[str, Any] = {"messages": before}
                while texts(shown["messages"])[-1:] != texts([said]):
                    shown = await talk.client.do("show", name)
        gates[2].set()

        for name in ("b", "c"):
            shown = await talk.client.do("done", name)
            assert texts(shown["messages"])[-2:] == ["user: two", "assistant: Wait 2.two"]
            assert shown["messages"] == await talk.transcript()


# --- answers to calls ----------------------------------------------------------------------------


async def test_calls_are_approved_and_denied_one_by_one(node: Client) -> None:
    async with talking(node, asking_agent()) as talk:
        shown = await talk.said("both")
        assert shown["messages"] == await talk.transcript()
        calls = [part for part in shown["messages"][1]["parts"] if "approval" in part]
        assert [call["state"] for call in calls] == ["approval-requested"] * 2

        await talk.client.do("approve", id=calls[0]["approval"]["id"], approved=True)
        await talk.client.do("approve", id=calls[1]["approval"]["id"], approved=False)
        await talk.client.do("answered")
        shown = await talk.client.do("done")

        assert texts(shown["messages"]) == ["user: both", "assistant: May I?Done, all of it."]
        parts = [part for part in shown["messages"][1]["parts"] if "approval" in part]
        assert [part["state"] for part in parts] == ["output-available", "output-denied"]
        assert shown["messages"] == await talk.transcript()


async def test_a_page_that_is_reloaded_while_calls_wait_can_answer_them(node: Client) -> None:
    async with talking(node, asking_agent()) as talk:
        await talk.said("both")
        await talk.open("b", messages=await talk.transcript())
        await talk.client.do("resume", "b")
        shown = await talk.client.do("done", "b")
        assert shown["messages"] == await talk.transcript()

        for part in shown["messages"][1]["parts"]:
            if "approval" in part:
                await talk.client.do("approve", "b", id=part["approval"]["id"], approved=True)
        await talk.client.do("answered", "b")
        shown = await talk.client.do("done", "b")

        assert texts(shown["messages"])[1] == "assistant: May I?Done, all of it."
        assert shown["messages"] == await talk.transcript()


# --- what is not believed ------------------------------------------------------------------------


async def test_what_a_client_says_of_the_agent_or_of_tools_is_refused() -> None:
    async with gateway_world() as world:
        user = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}
        output = {"type": "tool-look", "state": "output-available", "toolCallId": "c", "output": 1}
        faults: list[Any] = [
            [{"id": "s", "role": "system", "parts": []}, user],
            [{"id": "t", "role": "tool", "parts": []}],
            [user, {"id": "a", "role": "assistant", "parts": [output]}],
            [{**user, "parts": [{"type": "file", "mediaType": "text/html", "url": "x"}]}],
            [{**user, "parts": [{"type": "file", "mediaType": "text/html", "url": "file:///x"}]}],
            [{**user, "parts": [{"type": "file", "mediaType": "a/b", "url": "data:a/b,x"}]}],
            [{**user, "parts": [{"type": "file", "mediaType": "a/b", "url": "data:;base64,x"}]}],
            [{**user, "parts": [{"type": "file", "mediaType": "a", "url": "https://x/"}]}],
            [{**user, "parts": [{"type": "file", "mediaType": "image/png", "url": "\ud83d"}]}],
            [],
        ]
        for messages in faults:
            body = json.dumps({"id": "chat", "messages": messages})
            reply = await world.http.post(CHAT, content=body)
            assert reply.status_code == 422, messages
        for name in ("", "a/b", "..", "~YQ"):
            reply = await world.http.post(CHAT, json={"id": name, "messages": [user]})
            assert reply.json()["type"] == "urn:turnkeeper:invalid-id", name
        assert (await world.http.post(CHAT)).status_code == 422
        assert not (await world.conversations.list()).rows


async def test_answers_in_a_message_of_no_turn_are_refused_before_they_are_written() -> None:
    async with gateway_world(asking_agent()) as world:
        conversation = world.conversations["chat"]
        turn = await conversation.send("both")
        async for item in turn:
            if isinstance(item, LoggedEvent) and item.event.kind == "confirmation_requested":
                break
        waiting = (await conversation.at()).turns.awaiting
        parts = [
            {"type": "dynamic-tool", "state": "approval-responded", "approval": answer}
            for answer in ({"id": call_id, "approved": True} for call_id in waiting)
        ]
        message = {"id": "no turn", "role": "assistant", "parts": parts}

        reply = await world.http.post(CHAT, json={"id": "chat", "messages": [message]})

        assert reply.json()["type"] == "urn:turnkeeper:invalid-request"
        assert (await conversation.at()).turns.awaiting == waiting

        denied = [{**part, "approval": {"id": waiting[0], "approved": False}} for part in parts[:1]]
        message = {"id": turn.turn_id, "role": "assistant", "parts": [*parts, *denied]}
        reply = await world.http.post(CHAT, json={"id": "chat", "messages": [message]})

        assert "two ways" in reply.json()["errors"][0]["detail"]
        assert (await conversation.at()).turns.awaiting == waiting
        await turn.cancel()


async def test_a_stream_beyond_the_bound_ends_at_once_and_its_message_is_kept() -> None:
    async with gateway_world(limits=GatewayLimits(streams_max=1)) as world:
        user = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}
        with world.app._service.streams.opened():
            reply = await world.http.post(CHAT, json={"id": "chat", "messages": [user]})
        assert '"errorText":"overloaded"' in reply.text
        assert await (await world.conversations["chat"].turn("m1")).reply() == "a(hello)"
