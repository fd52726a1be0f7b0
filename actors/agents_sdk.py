"""Sessions for the OpenAI Agents SDK, kept in conversations. Needs `turnkeeper[openai-agents]`.

    async with TurnkeeperSession("alice", conversations) as session:
        result = await Runner.run(agent, "Where is my order?", session=session)

The block is a turn: whoever enters one for the same conversation meanwhile waits until it is left,
first come, first served, and is then given the history with the whole of the first. It promises:

1. `add_items` is all or nothing, and durable when it returns. Called again after it failed or was
   cancelled, with the same items and next of all in its turn, it adds them once.
2. Items come back as they were given, of any type, over restarts too: they are kept as JSON.
3. No item of another turn stands between those of one, and no run starts from half a turn. A
   result that comes turns after its call, for an approval say, takes its place behind the call.
4. What maps is in the log as ordinary events too, in the same commit, for the view, subscribers
   and `turnkeeper show`: what users and agents said, and each function call with its result.
5. `pop_item` and `clear_session` delete nothing: they are events of the log, which take the items
   out of the session and what shows them out of the view. `Conversations.delete` deletes.

Outside a turn, `get_items` reads, and all else is `OutsideTurn`, which a run meets before its model
is asked. Two runs at once within one turn are `RunsOverlap`; a turn within a turn of the same
conversation is `AskCycle`.

Turns are taken in the one process that owns the conversation, and end with it: what a run had added
when it was killed stays, and the next run goes on from there. A turn does not hold back chat
messages that come through `send`; one of both for a conversation. Condensers shorten the view, not
the session; for that, the SDK has limits and filters of its own.

The SDK runs on asyncio alone, and so does all that passes through its `Runner`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio

from turnkeeper.runtime import AskCycle, Ports, Refused

from ._frozen import FrozenObject
from ._text import storable
from .conversations import Conversation, Conversations
from .errors import ConversationNotFound, CorruptLog, InvalidInput
from .events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ImageContent,
    ObservationEvent,
    RetractionEvent,
    UnknownEvent,
    UserMessageEvent,
    decode_event,
)

try:
    from agents.items import TResponseInputItem
    from agents.memory import SessionSettings
    from agents.run_context import RunContextWrapper
except ImportError as error:
    raise ImportError(
        "sessions for the OpenAI Agents SDK need openai-agents, which is not installed; "
        "install turnkeeper[openai-agents]"
    ) from error

__all__ = ["OutsideTurn", "RunsOverlap", "TurnkeeperSession"]

ITEMS_KIND = "openai_agents_items"
"""The kind of the event that keeps what one call of a session has changed.

The core does not know it, and passes it on as it came. Its `removed` says how many of the last
items go (null: all of them), and its `added` holds, for each item that comes, the item as JSON text
and the ids of the events that show it.
"""

_Item: TypeAlias = Mapping[str, Any]
_ports = Ports()


class OutsideTurn(Refused):
    """A session was used to run or to write without `async with`; nothing was written."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session {session_id} has no turn here; nothing was written; run inside "
            "`async with TurnkeeperSession(...) as session`, and give the runner that session"
        )
        self.session_id = session_id


class RunsOverlap(Refused):
    """Another run has begun in this turn, and this one would write into it; nothing was written."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"a run on session {session_id} would write after another began in the same turn; "
            "nothing was written; give each run a turn of its own: one "
            "`async with TurnkeeperSession(...)` for each"
        )
        self.session_id = session_id


class _Kept(NamedTuple):
    """An item in the session."""

    text: str
    """The item, as JSON; what is given out is made of this each time."""
    item: _Item
    shown_by: Sequence[str]
    """The events that show it."""


@dataclass(frozen=True, slots=True)
class _Change:
    """What one call of a session changes: how many of the last items go, and what comes."""

    removed: int | None
    added: Sequence[str]
    gone: Sequence[_Kept]
    after: Sequence[_Kept]
    events: Sequence[Event]


class _Line:
    """Those who want a turn of one conversation, and the one that is taken."""

    def __init__(self) -> None:
        # Unlike a lock, it can be given back by another task than the one that took it.
        self.turn = anyio.Semaphore(1, max_value=1)
        self.taken: _Turn | None = None


# A line lasts as long as a session that holds it: as long as anybody can be in it.
_lines: WeakKeyDictionary[Conversations, WeakValueDictionary[str, _Line]] = WeakKeyDictionary()
_inside: ContextVar[tuple[_Turn, ...]] = ContextVar("turnkeeper_sdk_turns", default=())


class TurnkeeperSession:
    """A `Session` of the SDK: the items of one conversation, and a turn in it while entered.

    It can be entered again, after it was left. Sessions of one `session_id` and one `Conversations`
    wait for each other, whichever object is entered.
    """

    def __init__(
        self,
        session_id: str,
        conversations: Conversations,
        *,
        session_settings: SessionSettings | None = None,
    ) -> None:
        """Nothing is read or written yet. `session_settings`: as for the SDK's own sessions."""
        self.session_id = session_id
        self.session_settings = session_settings
        self._conversation: Conversation = conversations[session_id]
        lines = _lines.setdefault(conversations, WeakValueDictionary())
        self._line = lines.setdefault(session_id, _Line())
        self._turn: _Turn | None = None

    async def __aenter__(self) -> Self:
        """Wait for the turn. Raises `AskCycle`, and `OwnedElsewhere` before anything has run."""
        if self._line.taken in _inside.get():
            raise AskCycle((self.session_id, self.session_id))
        await self._line.turn.acquire()
        try:
            turn = _Turn(self._conversation)
            await turn.load()
        except BaseException:
            self._line.turn.release()
            raise
        self._line.taken = self._turn = turn
        _inside.set((*_inside.get(), turn))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        _inside.set(tuple(turn for turn in _inside.get() if turn is not self._turn))
        self._line.taken = self._turn = None
        self._line.turn.release()

    async def get_items(
        self, limit: int | None = None, *, wrapper: RunContextWrapper[Any] | None = None
    ) -> list[TResponseInputItem]:
        """The items, oldest first; with `limit`, the newest so many.

        `wrapper` is the runner's, here as in the other methods: it says which run this is.
        """
        if self._turn is not None:
            if wrapper is not None:
                self._turn.begin_run(wrapper)
            kept = await self._turn.load()
        elif wrapper is None:
            kept = await _read(self._conversation)
        else:
            raise OutsideTurn(self.session_id)
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        first = 0 if limit is None or limit < 0 else max(0, len(kept) - limit)
        return [_given(one) for one in kept[first:]]

    async def add_items(
        self,
        items: list[TResponseInputItem],
        *,
        wrapper: RunContextWrapper[Any] | None = None,
    ) -> None:
        """Add these items, all or none; durable when this returns.

        After it failed or was cancelled, the same call, if it is the next in this turn, adds them
        once. Raises `OutsideTurn`, `RunsOverlap`, `InvalidInput` and the journal's own errors.
        """
        turn = self._taken()
        if wrapper is not None:
            turn.check_run(wrapper)
        if items:
            await turn.change(0, [_json(item) for item in items])

    async def pop_item(
        self,
        *,
        wrapper: RunContextWrapper[Any] | None = None,  # noqa: ARG002 - all methods take it, or none gets it
    ) -> TResponseInputItem | None:
        """Take the last item out of the session, and give it; None where there is none.

        The event that does it is durable when this returns. It can be repeated as `add_items` can.
        """
        gone = await self._taken().change(1, ())
        return _given(gone[0]) if gone else None

    async def clear_session(
        self,
        *,
        wrapper: RunContextWrapper[Any] | None = None,  # noqa: ARG002 - as for `pop_item`
    ) -> None:
        """Take all items out of the session, by an event; the log keeps them."""
        await self._taken().change(None, ())

    def _taken(self) -> _Turn:
        if self._turn is None:
            raise OutsideTurn(self.session_id)
        return self._turn


class _Turn:
    """One turn of one session. Invariant: nobody else adds items to the conversation meanwhile."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._turn_id = _ports.ids.new()
        self._kept: Sequence[_Kept] | None = None
        """What the session holds; None while that is not known."""
        self._unsettled: _Change | None = None
        """The last change, where it is not known whether it is in the log."""
        self._run: RunContextWrapper[Any] | None = None
        """The run that began last."""
        self._earlier_runs: list[RunContextWrapper[Any]] = []

    async def load(self) -> Sequence[_Kept]:
        """What the session holds."""
        if self._kept is None:
            # Asks the owner and takes its answer: so this process owns the conversation, and what
            # was on its way when a call was cancelled is in the log, or never will be.
            await self._conversation.append_all(())
            self._kept = await _read(self._conversation)
        return self._kept

    def begin_run(self, run: RunContextWrapper[Any]) -> None:
        """This run reads the history; what the one before it still writes comes too late."""
        if self._run is not None and self._run is not run:
            self._earlier_runs.append(self._run)
        self._run = run
        self._earlier_runs = [earlier for earlier in self._earlier_runs if earlier is not run]

    def check_run(self, run: RunContextWrapper[Any]) -> None:
        """Raise `RunsOverlap` where another run has begun after this one."""
        if any(earlier is run for earlier in self._earlier_runs):
            raise RunsOverlap(self._conversation.conversation_id)

    async def change(self, removed: int | None, added: Sequence[str]) -> Sequence[_Kept]:
        """Make this change durable, and give the items that went."""
        change = self._unsettled
        if change is None or (change.removed, change.added) != (removed, added):
            change = await self._decide(removed, added)
        if not change.gone and not added:
            return ()
        # From here on until the answer, nobody knows. The same events again are the same change.
        self._unsettled, self._kept = change, None
        try:
            await self._conversation.append_all(change.events)
        except Refused:
            self._unsettled = None
            raise
        self._unsettled, self._kept = None, change.after
        return change.gone

    async def _decide(self, removed: int | None, added: Sequence[str]) -> _Change:
        before = await self.load()
        after = list(before)
        gone = _remove(after, removed)
        now = datetime.fromtimestamp(_ports.now(), UTC)
        come: list[_Kept] = []
        shown: list[Event] = []
        for text in added:
            item = json.loads(text)
            events = _shown(item, after, now, self._turn_id)
            one = _Kept(text, item, [event.id for event in events])
            shown.extend(events)
            come.append(one)
            _place(after, one)
        record = {
            "kind": ITEMS_KIND,
            "id": _ports.ids.new(),
            "timestamp": now.isoformat(),
            "turn_id": self._turn_id,
            "removed": removed,
            "added": [[one.text, one.shown_by] for one in come],
        }
        # Decoded: then it is equal to itself when it is read back, and known as a duplicate.
        events = [decode_event(json.dumps(record)), *shown]
        hidden = {event_id for one in gone for event_id in one.shown_by}
        if hidden:
            # A condensation may have forgotten some of them already.
            view = await self._conversation.view()
            in_view = tuple(event.id for event in view if event.id in hidden)
            if in_view:
                events.append(
                    RetractionEvent(
                        id=_ports.ids.new(),
                        timestamp=now,
                        turn_id=self._turn_id,
                        retracted_event_ids=in_view,
                    )
                )
        return _Change(removed, added, gone, after, events)


# --- items in the log -----------------------------------------------------------------------------


async def _read(conversation: Conversation) -> Sequence[_Kept]:
    """What the session of this conversation holds, as the log has it now."""
    kept: list[_Kept] = []
    try:
        async for seq, event in conversation.events(live=False):
            if event.kind == ITEMS_KIND and isinstance(event, UnknownEvent):
                try:
                    _fold(kept, event.fields)
                except (KeyError, TypeError, ValueError) as error:
                    found = f"the record is no {ITEMS_KIND} event ({type(error).__name__})"
                    raise CorruptLog(conversation.conversation_id, seq, found) from error
    except ConversationNotFound:
        return []  # it begins with its first item
    return kept


def _fold(kept: list[_Kept], fields: Mapping[str, Any]) -> None:
    _remove(kept, fields["removed"])
    for text, shown_by in fields["added"]:
        _place(kept, _Kept(text, json.loads(text), shown_by))


def _remove(kept: list[_Kept], removed: int | None) -> Sequence[_Kept]:
    """Take so many of the last items away, all of them for None, and give them."""
    first = 0 if removed is None else max(0, len(kept) - removed)
    gone = kept[first:]
    del kept[first:]
    return gone


def _place(kept: list[_Kept], one: _Kept) -> None:
    """Add an item: last, but a result that others came before goes back to its call."""
    at = len(kept)
    if _is_result(one.item):
        call_at = _find_call(kept, one.item)
        if call_at is not None:
            came = range(call_at, len(kept))
            at = next((n for n in came if kept[n].item.get("role") == "user"), at)
    kept.insert(at, one)


def _is_result(item: _Item) -> bool:
    return str(item.get("type")).endswith("_output") and "call_id" in item


def _find_call(kept: Sequence[_Kept], result: _Item) -> int | None:
    """Where the call stands that this is the result of, or its result if it has one already."""
    for at in range(len(kept) - 1, -1, -1):
        if kept[at].item.get("call_id") == result["call_id"]:
            return at
    return None


def _json(item: object) -> str:
    if not isinstance(item, Mapping):
        raise InvalidInput(f"an item is a JSON object, and {type(item).__name__} is not")
    try:
        text = json.dumps(item, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"an item is a JSON object, and this is not: {error}") from error
    # A lone surrogate is kept as well, by its escape.
    return json.dumps(item) if storable(text) != text else text


def _given(one: _Kept) -> TResponseInputItem:
    return cast("TResponseInputItem", json.loads(one.text))


# --- items as events ------------------------------------------------------------------------------


def _shown(item: _Item, before: Sequence[_Kept], now: datetime, turn_id: str) -> Sequence[Event]:
    """The events that show this item; none where it has no likeness among them.

    A call comes with its result, as a response of its own: so what is popped can be retracted, and
    a call that waits for an approval holds nobody up.
    """
    match item:
        case {"role": "user", "content": content}:
            text, urls = _text(content), _image_urls(content)
            if not text and not urls:
                return ()
            images = tuple(ImageContent(url=url) for url in urls)
            return (
                UserMessageEvent(
                    id=_ports.ids.new(),
                    timestamp=now,
                    turn_id=turn_id,
                    content=text,
                    images=images,
                ),
            )
        case {"role": "assistant", "content": content} if text := _text(content):
            return (
                AgentMessageEvent(
                    id=_ports.ids.new(), timestamp=now, turn_id=turn_id, content=text
                ),
            )
        case {"type": "function_call_output", "output": output}:
            call_at = _find_call(before, item)
            call = before[call_at].item if call_at is not None else {}
            if call.get("type") != "function_call":
                return ()
            return _call_with_result(call, output, now, turn_id)
        case _:
            return ()


def _call_with_result(
    call: _Item, output: object, now: datetime, turn_id: str
) -> tuple[ActionEvent, ObservationEvent]:
    tool_call_id = _ports.ids.new()
    wrote = storable(str(call.get("arguments", "")))
    try:
        arguments, malformed = FrozenObject(json.loads(wrote)), None
    except (AttributeError, TypeError, ValueError, RecursionError):
        arguments, malformed = FrozenObject(), wrote
    action = ActionEvent(
        id=_ports.ids.new(),
        timestamp=now,
        turn_id=turn_id,
        tool_call_id=tool_call_id,
        provider_call_id=storable(str(call.get("call_id"))),
        tool_name=storable(str(call.get("name", ""))),
        arguments=arguments,
        malformed_arguments=malformed,
        llm_response_id=_ports.ids.new(),
    )
    observation = ObservationEvent(
        id=_ports.ids.new(),
        timestamp=now,
        turn_id=turn_id,
        tool_call_id=tool_call_id,
        content=_text(output),
    )
    return action, observation


def _text(content: object) -> str:
    """The text of a content, which is a text, or a list of parts of which some are."""
    if isinstance(content, str):
        return storable(content)
    return "\n".join(
        storable(text)
        for part in _parts(content)
        if isinstance(text := part.get("text", part.get("refusal")), str)
    )


def _image_urls(content: object) -> Sequence[str]:
    return [
        storable(url) for part in _parts(content) if isinstance(url := part.get("image_url"), str)
    ]


def _parts(content: object) -> Iterator[_Item]:
    if isinstance(content, list):
        yield from (part for part in content if isinstance(part, dict))
