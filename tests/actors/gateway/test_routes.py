"""What runs, what was, and what operators ask: each route by what it does to the conversation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import Match
from starlette.types import Scope

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import (
    Conversation,
    Conversations,
    MemoryJournal,
    MemoryStore,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
    gateway,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import JournalUnavailable
from turnkeeper.actors.events import ObservationEvent
from turnkeeper.actors.journals.transfer import export_lines, import_lines

from .worlds import World, gateway_world

pytestmark = pytest.mark.costly

MERGE = {"Content-Type": "application/merge-patch+json"}
HERE = "/v1/conversations/alice"


async def refund(order: int) -> str:
    """Pay an order back."""
    return f"order {order} is paid back"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with gateway_world() as world:
        yield world


async def test_a_gateway_is_complete_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FastAPI completes its routes at the first match, for which the loop stood still for 34 ms."""
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        transport = httpx.ASGITransport(gateway.app(conversations))
        made: list[object] = []
        make = TypeAdapter.__init__

        def counted(adapter: TypeAdapter[object], *args: Any, **options: Any) -> None:  # noqa: ANN401 - pydantic's
            made.append(args)
            make(adapter, *args, **options)

        monkeypatch.setattr(TypeAdapter, "__init__", counted)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/v1/conversations")).status_code == 200
            assert (await http.get("/nowhere")).status_code == 404
        assert made == []


async def test_the_state_at_a_seq_is_that_of_the_library(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")

    for seq in range(9):
        state = (await world.http.get(f"{HERE}/state", params={"at": seq})).json()
        folded = await world.conversations["alice"].at(seq)
        assert state["seq"] == seq
        assert state["status"] == folded.agent_execution_status.value.lower()
        view = (await world.http.get(f"{HERE}/view", params={"at": seq})).json()
        assert [event["id"] for event in view["events"]] == [event.id for event in folded.view]
    beyond = await world.http.get(f"{HERE}/state", params={"at": 9})
    assert beyond.status_code == 422


async def test_the_state_tells_what_runs_and_what_waits(world: World) -> None:
    world.agent.hold("slow")
    running = (await world.send("alice", "slow", idempotency_key="m1")).json()
    await world.send("alice", "next", idempotency_key="m2")

    state = (await world.http.get(f"{HERE}/state")).json()

    assert state["running"] == {"turn_id": running["turn_id"], "message_ids": ["m1"]}
    assert [message["message_id"] for message in state["queued"]] == ["m2"]
    world.agent.release("slow")


async def test_a_turn_is_asked_for_by_its_message(world: World) -> None:
    world.agent.hold("slow")
    sent = await world.send("alice", "slow", idempotency_key="a/1")
    place = f"{HERE}/messages/~YS8x/turn"

    running = (await world.http.get(place)).json()
    assert sent.url.join(sent.headers["Location"]).path == place
    world.agent.release("slow")
    ended = (await world.http.get(place, headers={"Prefer": "wait=60"})).json()

    assert running == {name: sent.json()[name] for name in ("message_id", "seq", "turn_id")} | {
        "end": None
    }
    assert ended["end"]["outcome"] == "completed"
    assert (await world.http.get(place)).json() == ended
    unknown = await world.http.get(f"{HERE}/messages/other/turn")
    assert unknown.json()["type"] == "urn:turnkeeper:message-not-found"


async def test_an_interrupt_hits_the_turn_that_was_seen_alone(world: World) -> None:
    world.agent.hold("slow")
    sent = (await world.send("alice", "slow", idempotency_key="m1")).json()
    await world.agent.reached["slow"].wait()

    late = await world.http.post(f"{HERE}/interrupt", json={"turn_id": "another"})
    hit = await world.http.post(f"{HERE}/interrupt", json={"turn_id": sent["turn_id"]})

    assert (late.json(), hit.json()) == ({"changed": False}, {"changed": True})
    ended = (await world.http.get(f"{HERE}/messages/m1/turn")).json()
    assert ended["end"]["outcome"] == "interrupted"
    nowhere = await world.http.post("/v1/conversations/none/interrupt", json={})
    assert nowhere.status_code == 404


@pytest.mark.parametrize("body", [b"", b"{}", b'{"turn_id": null}'])
async def test_an_interrupt_without_a_turn_hits_whichever_runs(world: World, body: bytes) -> None:
    world.agent.hold("slow")
    await world.send("alice", "slow", idempotency_key="m1")
    await world.agent.reached["slow"].wait()

    hit = await world.http.post(f"{HERE}/interrupt", content=body)

    assert hit.json() == {"changed": True}
    schema = world.app.api.openapi()["paths"]["/v1/conversations/{conversation_id}/interrupt"]
    assert not schema["post"]["requestBody"].get("required", False)


async def test_undo_takes_the_newest_turn_back_and_returns_its_messages(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")

    undone = (await world.http.post(f"{HERE}/undo")).json()

    assert [message["content"] for message in undone["messages"]] == ["two"]
    view = (await world.http.get(f"{HERE}/view")).json()
    assert [event["content"] for event in view["events"]] == ["one", "a(one)"]


async def test_an_undo_that_is_sent_again_takes_no_other_turn_back(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")
    two = (await world.http.get(f"{HERE}/view")).json()["events"][-1]
    body = {"turn_id": two["turn_id"]}

    first = await world.http.post(f"{HERE}/undo", json=body)
    again = await world.http.post(f"{HERE}/undo", json=body)

    assert (first.status_code, first.json()) == (again.status_code, again.json())
    assert [message["content"] for message in again.json()["messages"]] == ["two"]
    view = (await world.http.get(f"{HERE}/view")).json()
    assert [event["content"] for event in view["events"]] == ["one", "a(one)"]
    await world.answered("alice", "three")
    late = await world.http.post(f"{HERE}/undo", json={"turn_id": view["events"][0]["turn_id"]})
    assert (late.status_code, late.json()["reason"]) == (409, "not_newest")


async def cursor_of_the_newest_event(world: World) -> str:
    page = await world.http.get(f"{HERE}/events", headers={"Accept": "application/json"})
    cursor: str = page.json()["cursor"]
    return cursor


async def test_a_deletion_that_is_sent_again_late_leaves_the_conversation_begun_meanwhile(
    world: World,
) -> None:
    await world.answered("alice", "one")
    condition = {"If-Match": f'"{await cursor_of_the_newest_event(world)}"'}

    assert (await world.http.delete(HERE, headers=condition)).status_code == 200
    assert (await world.http.delete(HERE, headers=condition)).status_code == 404
    await world.answered("alice", "two")
    await world.answered("alice", "three")
    late = await world.http.delete(HERE, headers=condition)
    malformed = await world.http.delete(HERE, headers={"If-Match": "x"})
    none = await world.http.delete(HERE, headers={"If-Match": "0"})

    assert late.status_code == 412
    assert late.json()["type"] == "urn:turnkeeper:precondition-failed"
    assert (malformed.status_code, none.status_code) == (422, 412)
    view = (await world.http.get(f"{HERE}/view")).json()
    assert [event["content"] for event in view["events"]] == ["two", "a(two)", "three", "a(three)"]
    assert (await world.http.delete(HERE)).status_code == 200, "without it, it deletes once more"


NAMED = {"Idempotency-Key": "again", "Prefer": "wait=60"}


@pytest.mark.parametrize(
    ("asked", "repeat"),
    [
        (("POST", "/messages", '{"content": "x"}', NAMED), "same"),
        (("PATCH", "", '{"title": "T"}', NAMED), "same"),
        (("POST", "/undo", '{"turn_id": "TURN"}', {}), "same"),
        (("POST", "/pause", "", {}), "unchanged"),
        (("POST", "/resume", "", {}), "unchanged"),
        (("POST", "/retract", '{"turn_id": "TURN"}', {}), "nothing-to-retract"),
        (("POST", "/retract", '{"event_ids": ["EVENT"]}', {}), "not-admitted"),
        (("POST", "/fork", '{"id": "copy", "at": 4}', {}), "same"),
        (("POST", "/fork", '{"id": "copy"}', {}), "conversation-exists"),
        (("DELETE", "", "", {}), "conversation-not-found"),
        (("DELETE", "", "", {"If-Match": "CURSOR"}), "conversation-not-found"),
        (("POST", "/messages", '{"content": "x"}', {"Prefer": "wait=60"}), "once more"),
        (("PATCH", "", '{"title": "T"}', {}), "once more"),
        (("POST", "/undo", "", {}), "once more"),
    ],
)
async def test_a_request_that_is_sent_again_does_what_the_page_says(
    world: World, asked: tuple[str, str, str, dict[str, str]], repeat: str
) -> None:
    method, part, body, headers = asked
    await world.answered("alice", "one")
    await world.answered("alice", "two")
    if part == "/resume":
        await world.http.post(f"{HERE}/pause")
    newest = (await world.http.get(f"{HERE}/view")).json()["events"][-1]
    body = body.replace("TURN", newest["turn_id"]).replace("EVENT", newest["id"])
    if "If-Match" in headers:
        headers = {"If-Match": await cursor_of_the_newest_event(world)}

    async def ask() -> httpx.Response:
        return await world.http.request(method, HERE + part, content=body, headers=headers)

    async def head() -> int | None:
        head: int | None = (await world.http.get(HERE)).json().get("head")
        return head

    first, written, second = await ask(), await head(), await ask()

    assert first.is_success
    assert (await head() == written) is (repeat != "once more")
    match repeat:
        case "same":
            assert second.json() == first.json()
        case "unchanged":
            assert (first.json(), second.json()) == ({"changed": True}, {"changed": False})
        case "once more":
            assert second.is_success
        case problem:
            assert second.json()["type"] == f"urn:turnkeeper:{problem}"


async def test_a_message_replaces_an_earlier_one_and_what_came_after_it(world: World) -> None:
    await world.send("alice", "one", idempotency_key="m1", prefer="wait=60")
    await world.answered("alice", "two")
    body = {"content": "other", "replaces": "m1"}

    async def send() -> httpx.Response:
        headers = {"Idempotency-Key": "m3", "Prefer": "wait=60"}
        return await world.http.post(f"{HERE}/messages", json=body, headers=headers)

    sent, again = await send(), await send()

    assert sent.json()["end"]["reply"] == "a(other)"
    assert again.json()["seq"] == sent.json()["seq"]
    view = (await world.http.get(f"{HERE}/view")).json()
    assert [event["content"] for event in view["events"]] == ["other", "a(other)"]
    refused = await world.http.post(f"{HERE}/messages", json=body)
    assert refused.json()["type"] == "urn:turnkeeper:not-replaceable"
    assert refused.json()["reason"] == "not_in_view"


async def test_a_title_and_labels_are_changed_by_a_merge_patch(world: World) -> None:
    await world.answered("alice", "one")

    async def patch(body: object) -> tuple[object, object]:
        reply = await world.http.patch(HERE, json=body, headers=MERGE)
        return reply.json()["title"], reply.json()["labels"]

    assert await patch({"title": "Books", "labels": {"a": "1", "b": "2"}}) == (
        "Books",
        {"a": "1", "b": "2"},
    )
    assert await patch({"labels": {"a": None, "c": "3"}}) == ("Books", {"b": "2", "c": "3"})
    assert await patch({}) == ("Books", {"b": "2", "c": "3"})
    assert await patch({"title": None, "labels": None}) == ("", {})
    assert (await world.http.get(HERE)).json()["status"] == "finished"
    for labels in ({"planted": 1}, ["planted"], {"planted": {"planted": None}}):
        refused = await world.http.patch(HERE, json={"labels": labels})
        assert refused.json()["errors"] == [
            {"pointer": "#/labels", "detail": "must be an object of texts; null removes a label"}
        ]
        assert "planted" not in refused.text


async def test_a_removal_of_all_labels_is_sent_again_as_what_it_was(world: World) -> None:
    """At the repeat there are other labels than those that were removed, or none."""
    await world.answered("alice", "one")
    await world.http.patch(HERE, json={"labels": {"a": "1", "b": "2"}})
    body = {"title": "Books", "labels": None}

    async def patch() -> tuple[int, object]:
        reply = await world.http.patch(HERE, json=body, headers={"Idempotency-Key": "change-1"})
        return reply.status_code, reply.json().get("labels")

    first, again = await patch(), await patch()
    await world.http.patch(HERE, json={"labels": {"c": "3"}})
    later = await patch()

    assert (first, again, later) == ((200, {}), (200, {}), (200, {"c": "3"}))
    other = await world.http.patch(
        HERE, json={"title": "Other", "labels": None}, headers={"Idempotency-Key": "change-1"}
    )
    assert other.json()["type"] == "urn:turnkeeper:event-id-conflict"


async def test_a_change_that_was_made_is_not_told_as_if_nothing_had_happened(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.answered("alice", "hello")

    async def away(self: Conversation, seq: int | None = None) -> NoReturn:
        raise JournalUnavailable("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(Conversation, "at", away)
        reply = await world.http.patch("/v1/conversations/alice", json={"title": "Hello"})

    assert reply.status_code == 504
    assert reply.json()["type"] == "urn:turnkeeper:outcome-unknown"
    assert (await world.conversations["alice"].at()).details.title == "Hello"


async def test_a_pause_holds_and_a_resume_lets_go_on(world: World) -> None:
    await world.answered("alice", "one")

    assert (await world.http.post(f"{HERE}/pause")).json() == {"changed": True}
    assert (await world.http.post(f"{HERE}/pause")).json() == {"changed": False}
    sent = await world.send("alice", "two", idempotency_key="m2")
    assert sent.json()["waits_for"] == "resume"
    assert (await world.http.get(f"{HERE}/state")).json()["status"] == "paused"
    assert (await world.http.post(f"{HERE}/resume")).json() == {"changed": True}

    again = await world.send("alice", "two", idempotency_key="m2", prefer="wait=60")
    assert again.json()["end"]["reply"] == "a(two)"


async def test_a_turn_is_retracted_from_the_view_and_stays_in_the_log(world: World) -> None:
    turn_id = (await world.answered("alice", "one")).json()["turn_id"]

    reply = await world.http.post(f"{HERE}/retract", json={"turn_id": turn_id})

    assert reply.json() == {"seq": 5}
    assert (await world.http.get(f"{HERE}/view")).json()["events"] == []
    again = await world.http.post(f"{HERE}/retract", json={"turn_id": turn_id})
    assert again.json()["type"] == "urn:turnkeeper:nothing-to-retract"


async def test_a_fork_begins_with_the_log_up_to_its_place(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")

    made = await world.http.post(f"{HERE}/fork", json={"id": "bob", "at": 4})
    again = await world.http.post(f"{HERE}/fork", json={"id": "bob", "at": 4})
    other = await world.http.post(f"{HERE}/fork", json={"id": "bob", "at": 5})
    nowhere = [
        await world.http.post(f"{HERE}/fork", json={"id": "eve", "at": at}) for at in (0, 99)
    ]

    assert made.status_code == 201
    assert (again.status_code, again.json()) == (201, made.json())
    place = made.url.join(made.headers["Location"])
    assert (await world.http.get(place)).json()["id"] == "bob"
    assert other.json()["type"] == "urn:turnkeeper:conversation-exists"
    assert [reply.status_code for reply in nowhere] == [422, 422]
    view = (await world.http.get("/v1/conversations/bob/view")).json()
    assert [event["content"] for event in view["events"]] == ["one", "a(one)"]


async def test_a_fork_is_not_made_under_an_odd_id(world: World) -> None:
    await world.answered("alice", "one")

    for name in ("", ".", "..", "a/b", "\x07", "a" * 257):
        made = await world.http.post(f"{HERE}/fork", json={"id": name})
        assert made.json()["type"] == "urn:turnkeeper:invalid-id"
    assert len((await world.conversations.list()).rows) == 1


async def test_a_deletion_gives_its_receipt(world: World) -> None:
    await world.answered("alice", "one")
    await world.http.post(f"{HERE}/fork", json={"id": "bob"})

    receipt = await world.http.delete(HERE)

    assert receipt.json() == {
        "kept": 4,
        "forks": ["bob"],
        "forks_of_others": 0,
        "is_erased": True,
    }
    assert (await world.http.get(f"{HERE}/state")).status_code == 404
    assert (await world.http.delete(HERE)).status_code == 404


async def test_conversations_are_listed_by_pages(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.answered(name, f"hello {name}")

    async def page(**query: object) -> tuple[list[str], str | None]:
        given = {name: str(value) for name, value in query.items()}
        found = (await world.http.get("/v1/conversations", params=given)).json()
        return [row["id"] for row in found["conversations"]], found["cursor"]

    first, cursor = await page(limit=2)
    assert first == ["a", "b"]
    assert await page(limit=2, cursor=cursor) == (["c"], None)
    assert (await page(order="activity"))[0] == ["c", "b", "a"]
    await world.http.patch("/v1/conversations/b", json={"labels": {"team": "books"}})
    assert (await page(label="team=books"))[0] == ["b"]
    row = (await world.http.get("/v1/conversations?prefix=b")).json()["conversations"][0]
    assert (row["last_message"], row["status"]) == ("a(hello b)", "finished")
    forged = await world.http.get("/v1/conversations", params={"cursor": "planted"})
    assert (forged.status_code, "planted" in forged.text) == (422, False)


async def test_messages_are_searched_by_pages() -> None:
    async with gateway_world(journal=MemoryJournal(search=True)) as world:
        await world.answered("a", "where is my order")
        await world.answered("b", "another order")

        found = (await world.http.get("/v1/search", params={"words": "ORD*", "limit": 3})).json()
        assert [(hit["conversation_id"], hit["by"]) for hit in found["hits"]] == [
            ("b", "agent"),
            ("b", "user"),
            ("a", "agent"),
        ]
        assert (found["is_complete"], found["complete_to"]) == (True, None)
        assert found["hits"][1]["snippet"] == "another order"
        params = {"words": "ORD*", "limit": "3", "cursor": found["cursor"]}
        rest = (await world.http.get("/v1/search", params=params)).json()
        assert [hit["snippet"] for hit in rest["hits"]] == ["where is my order"]
        assert rest["cursor"] is None
        for status, count in (("finished", 4), ("error", 0)):
            params = {"words": "order", "status": status}
            found = (await world.http.get("/v1/search", params=params)).json()
            assert len(found["hits"]) == count
        odd_status = {"words": "order", "status": "planted"}
        for odd in ({}, {"words": "!"}, {"words": "order", "cursor": "planted"}, odd_status):
            assert (await world.http.get("/v1/search", params=odd)).status_code == 422


async def test_a_search_is_refused_where_none_is_kept(world: World) -> None:
    found = await world.http.get("/v1/search?words=order")
    assert (found.status_code, found.json()["type"]) == (404, "urn:turnkeeper:search-is-off")


async def test_an_export_can_be_imported_again(world: World) -> None:
    await world.answered("alice", "one")

    lines = (await world.http.get(f"{HERE}/export")).text.splitlines()

    async with MemoryJournal() as other:
        await import_lines(other, lines)
        assert [line async for line in export_lines(other)] == lines


async def test_a_sound_log_is_verified(world: World) -> None:
    await world.answered("alice", "one")

    assert (await world.http.post(f"{HERE}/verify")).json() == {"events": 4, "is_sound": True}
    assert (await world.http.post("/v1/conversations/none/verify")).status_code == 404


async def test_a_log_is_sound_whatever_the_limits_of_its_earlier_owner() -> None:
    store = MemoryStore()
    limits = Limits(known_messages_max=2, snapshot_events=2)
    async with Conversations(
        HeldAgent(), journal=MemoryJournal(store), limits=limits, queued_messages_max=1
    ) as conversations:
        for _ in range(8):
            await (await conversations["alice"].send("one")).reply()

    async with gateway_world(journal=MemoryJournal(store)) as world:
        found = await world.http.post(f"{HERE}/verify")
    assert found.json() == {"events": 32, "is_sound": True}


async def test_what_admission_refused_is_shown(world: World) -> None:
    await world.answered("alice", "one")
    result = ObservationEvent(tool_call_id="never called", content="x")
    with pytest.raises(Exception, match="unmatched_tool_result"):
        await world.conversations["alice"].append(result)

    (rejected,) = (await world.http.get(f"{HERE}/rejections")).json()["rejections"]

    assert rejected["violation"] == "unmatched_tool_result"
    assert rejected["event"]["id"] == result.id


async def test_operators_see_the_actors_and_dead_letters_without_messages(world: World) -> None:
    await world.answered("alice", "planted")

    tree = await world.http.get("/v1/runtime/tree")
    letters = (await world.http.get("/v1/dead-letters")).json()

    def names(actors: Sequence[Mapping[str, Any]]) -> list[object]:
        return [(actor["name"], names(actor["children"])) for actor in actors]

    assert "alice" in tree.text
    assert "planted" not in tree.text
    assert names(tree.json()["actors"]) == names(
        asdict(world.conversations.runtime.tree())["actors"]
    )
    assert letters == {"count": 0, "by_reason": {}}


async def test_a_caller_is_told_who_it_is(world: World) -> None:
    assert (await world.http.get("/v1/self")).json() == {
        "principal": None,
        "scopes": None,
        "is_read_only": False,
    }


async def test_what_is_not_there_is_told_as_a_problem(world: World) -> None:
    nowhere = await world.http.get("/v1/nowhere")
    other_method = await world.http.put(f"{HERE}/state", json={})

    assert (nowhere.status_code, nowhere.json()["type"]) == (404, "urn:turnkeeper:not-found")
    assert "openapi.json" in nowhere.json()["detail"]
    assert other_method.json()["type"] == "urn:turnkeeper:method-not-allowed"
    assert json.loads(other_method.text)["status"] == other_method.status_code == 405
    assert other_method.headers["Allow"] == "GET, HEAD"
    assert (await world.http.put(HERE, json={})).headers["Allow"] == "DELETE, GET, HEAD, PATCH"


async def test_the_route_of_a_request_is_looked_for_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI looks twice in a router that is included, and this took a tenth of a message."""
    asked = Counter[str]()
    matches = APIRoute.matches

    def counted(route: APIRoute, scope: Scope) -> tuple[Match, Scope]:
        asked[f"{route.methods} {route.path}"] += 1
        return matches(route, scope)

    monkeypatch.setattr(APIRoute, "matches", counted)
    await world.send("alice", "hello")

    assert asked
    assert set(asked.values()) == {1}


async def test_each_step_names_the_view_that_its_model_saw() -> None:
    agent = ToolAgent(ScriptedModel(["one", "two"]), [])
    async with gateway_world(agent) as world:
        await world.answered("alice", "first")
        await world.answered("alice", "second")
        steps = (await world.http.get(f"{HERE}/steps")).json()["steps"]
        views = [
            (await world.http.get(f"{HERE}/view", params={"at": step["view_seq"]})).json()
            for step in steps
        ]

    assert [[event["content"] for event in view["events"]] for view in views] == [
        ["first"],
        ["first", "one", "second"],
    ]
    assert [step["outcome"] for step in steps] == ["finished"] * 2


async def test_calls_are_answered_one_by_one() -> None:
    calls = [ToolCall("refund", {"order": n}) for n in (1, 2)]
    model = ScriptedModel([ModelResponse(calls=calls), "done"])
    agent = ToolAgent(model, [refund], confirm=["refund"])
    async with gateway_world(agent) as world:
        await world.send("alice", "both")
        awaiting: list[str] = []
        while not awaiting:
            state = await world.http.get(f"{HERE}/state")
            awaiting = state.json().get("awaiting", [])
        answers = {awaiting[0]: True, awaiting[1]: "not this one"}

        part = await world.http.post(f"{HERE}/answer", json={"answers": {awaiting[0]: True}})
        whole = await world.http.post(f"{HERE}/answer", json={"answers": answers})
        again = await world.http.post(f"{HERE}/answer", json={"answers": answers})
        page = await world.http.get(f"{HERE}/events", headers={"Accept": "application/json"})

    assert part.json()["type"] == "urn:turnkeeper:not-confirmable"
    assert sorted(part.json()["awaiting"]) == sorted(awaiting)
    assert whole.json() == again.json() == {"answered": sorted(awaiting)}
    kinds = [logged["event"]["kind"] for logged in page.json()["events"]]
    assert "user_reject" in kinds
