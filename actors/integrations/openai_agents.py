"""Sessions for the OpenAI Agents SDK, kept in conversations. Needs `turnkeeper[openai-agents]`.

    async with TurnkeeperSession("alice", conversations) as session:
        result = await Runner.run(agent, "Where is my order?", session=session)

The block is a turn. Another run that enters a block on the same conversation meanwhile waits until
this block is left. Runs are served in order, and each reads a history with all earlier turns. A
session promises:

1. `add_items` is all or nothing, and durable when it returns. If it fails or is cancelled, and the
   next write in its turn is the same call again, the items are added once.
2. Items come back exactly as given, of any type, after restarts too: they are kept as JSON.
3. The items of a turn are adjacent, and no run starts from half a turn. A result that comes in a
   later turn than its call, for example after an approval, is placed directly behind the call.
4. Chat messages, and each function call with its result, are also logged as ordinary events, in the
   same commit, for the view, for subscribers and for `turnkeeper show`.
5. `pop_item` and `clear_session` delete nothing: they write events that take the items out of the
   session, and their ordinary events out of the view. `Conversations.delete` deletes.

Outside a turn `get_items` works, and every other method raises `OutsideTurn`; a run gets this error
before it asks its model. Two runs at once in one turn raise `RunsOverlap`; a turn inside a turn of
the same conversation raises `AskCycle`.

Only the process that owns the conversation takes turns, and its turns end with it: items that a
killed run had added stay, and the next run continues from them. A turn does not hold back chat
messages that come through `send`, so use either sessions or `send` for a conversation. Condensers
shorten the view, not the session; to shorten that, use the SDK's own limits and filters.

The SDK runs on asyncio alone, and so does everything that passes through its `Runner`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import dropwhile
from typing import Any, NamedTuple, Self, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio

from turnkeeper.runtime import AskCycle, Ports, Refused

from ..conversations.conversation import Conversation
from ..conversations.conversations import Conversations
from ..errors import ConversationNotFound, CorruptLog, InvalidInput
from ..events import (
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
from ..values.frozen import FrozenObject
from ..values.text import storable

try:
    from agents.items import TResponseInputItem
    from agents.memory import SessionSettings
    from agents.memory.session import _CompactionSnapshot  # its own sessions return it too
    from agents.memory.session_settings import coerce_session_settings, resolve_session_limit
    from agents.run_context import RunContextWrapper
except ImportError as error:
    raise ImportError(
        "sessions for the OpenAI Agents SDK need openai-agents, which is not installed; "
        "install turnkeeper[openai-agents]"
    ) from error

__all__ = ["ForeignLoop", "OutsideTurn", "RunsOverlap", "TurnkeeperSession"]

ITEMS_KIND = "openai_agents_items"
"""The kind of the event that keeps one change of a session.

The core does not know this kind and passes it on unchanged. `removed` counts the last items that go
(null: all of them). `added` holds, for each new item, its JSON text and the ids of the events that
show it.
"""

SESSIONS_REMEMBERED_MAX = 256
"""How many sessions keep their items in memory between turns; others are read from the log
again."""

_Item: TypeAlias = Mapping[str, Any]
_ports = Ports()


class OutsideTurn(Refused):
    """The session was used for a run or a write without `async with`; nothing was written."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session {session_id} has no turn here; nothing was written; run inside "
            "`async with TurnkeeperSession(...) as session`, and give the runner that session; "
            "Runner.run_sync cannot do that: await Runner.run in the loop of the Conversations"
        )
        self.session_id = session_id


class RunsOverlap(Refused):
    """Another run has begun in this turn since this run began; nothing was written."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"a run on session {session_id} would write after another began in the same turn; "
            "nothing was written; give each run a turn of its own: one "
            "`async with TurnkeeperSession(...)` for each"
        )
        self.session_id = session_id


class ForeignLoop(Refused):
    """The session was used in another event loop than its `Conversations`; nothing was written."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session {session_id} was used in another event loop than that of its Conversations; "
            "nothing was written; `Runner.run_sync` and threads have loops of their own: await "
            "`Runner.run` in the loop of the Conversations, from a thread through "
            "`turnkeeper.actors.blocking.Blocking`"
        )
        self.session_id = session_id


class _Kept(NamedTuple):
    """An item in the session."""

    text: str
    """The item, as JSON; each caller gets a new object made of it."""
    item: _Item
    shown_by: Sequence[str]
    """The ids of the ordinary events that show it."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of a session: how many of its last items are removed, and which are added."""

    removed: int | None
    added: Sequence[str]
    gone: Sequence[_Kept]
    after: Sequence[_Kept]
    events: Sequence[Event]


class _History(NamedTuple):
    """A session's items as of a seq of its log."""

    kept: Sequence[_Kept] = ()
    seq: int = 0
    event_id: str | None = None
    """The id of the event at that seq; if it differs, the conversation was begun anew."""


class _Line:
    """The queue for turns of one conversation, and the turn that is taken."""

    def __init__(self) -> None:
        self.history = _History()
        """The newest history that was read; a turn reads only the events after it."""
        # Unlike a lock, another task than the one that acquired it can release it.
        self.turn = anyio.Semaphore(1, max_value=1)
        self.taken: _Turn | None = None


class _Lines:
    """The lines of one `Conversations`.

    A line lives as long as any session of its conversation, because a turn may wait in it. The
    lines that were used last are kept longer, with the histories that they have read.
    """

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[str, _Line] = WeakValueDictionary()
        self._recent: dict[str, _Line] = {}

    def line(self, session_id: str) -> _Line:
        line = self._by_id.setdefault(session_id, _Line())
        self._recent.pop(session_id, None)
        self._recent[session_id] = line
        if len(self._recent) > SESSIONS_REMEMBERED_MAX:
            del self._recent[next(iter(self._recent))]
        return line


_lines: WeakKeyDictionary[Conversations, _Lines] = WeakKeyDictionary()
_inside: ContextVar[tuple[_Turn, ...]] = ContextVar("turnkeeper_sdk_turns", default=())


class TurnkeeperSession:
    """A `Session` of the SDK: the items of one conversation, and a turn in it while entered.

    It can be entered again after it was left. All sessions of one `session_id` and one
    `Conversations` wait for each other.
    """

    def __init__(
        self,
        session_id: str,
        conversations: Conversations,
        *,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        """Make a session; it does no I/O yet. `session_settings`: as for the SDK's own sessions."""
        self.session_id = session_id
        self.session_settings: SessionSettings | None = (
            None if session_settings is None else coerce_session_settings(session_settings)
        )
        self._conversation: Conversation = conversations[session_id]
        self._line = _lines.setdefault(conversations, _Lines()).line(session_id)
        self._turn: _Turn | None = None

    async def __aenter__(self) -> Self:
        """Wait for the turn. Raises `AskCycle`, and before a run begins `OwnedElsewhere`.

        Raises `ForeignLoop` outside the event loop of the `Conversations`.
        """
        if not self._conversation.is_in_own_loop:
            raise ForeignLoop(self.session_id)
        if self._line.taken in _inside.get():
            raise AskCycle(
                (self.session_id, self.session_id),
                attempt="session",
                advice="give an agent that a tool runs a session of another conversation",
            )
        await self._line.turn.acquire()
        try:
            turn = _Turn(self._conversation, self._line)
            await turn.load()
        except BaseException:
            self._line.turn.release()
            raise
        self._line.taken = self._turn = turn
        _inside.set((*_inside.get(), turn))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        _inside.set(tuple(turn for turn in _inside.get() if turn is not self._turn))
        if self._turn is not None:
            self._turn.is_left = True
        self._line.taken = self._turn = None
        self._line.turn.release()

    async def get_items(
        self, limit: int | None = None, *, wrapper: RunContextWrapper[Any] | None = None
    ) -> list[TResponseInputItem]:
        """Return the items, oldest first; with `limit`, only the newest `limit` items.

        The runner passes `wrapper` to identify its run, here and in the other methods.
        """
        if not self._conversation.is_in_own_loop:
            raise ForeignLoop(self.session_id)
        if self._turn is not None:
            if wrapper is not None:
                self._turn.begin_run(wrapper)
            kept = await self._turn.load()
        elif wrapper is None:
            kept = (await _read(self._conversation, self._line.history)).kept
        else:
            raise OutsideTurn(self.session_id)
        limit = resolve_session_limit(limit, self.session_settings)
        first = 0 if limit is None or limit < 0 else max(0, len(kept) - limit)
        return [_given(one) for one in kept[first:]]

    async def add_items(
        self,
        items: list[TResponseInputItem],
        *,
        wrapper: RunContextWrapper[Any] | None = None,
    ) -> None:
        """Add these items, all or none; durable when this returns.

        If it fails or is cancelled, and the next write in this turn is the same call again, the
        items are added once. Raises `OutsideTurn`, `RunsOverlap`, `InvalidInput` and the journal's
        own errors.
        """
        turn = self._taken()
        if wrapper is not None:
            turn.check_run(wrapper)
        if items:
            await turn.change(0, [_json(item) for item in items])

    async def pop_item(
        self,
        *,
        wrapper: RunContextWrapper[Any] | None = None,  # noqa: ARG002 - the runner passes it to all methods or to none
    ) -> TResponseInputItem | None:
        """Take the last item out of the session and return it; None if there is none.

        The removal is durable when this returns. The call can be repeated like `add_items`.
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

    async def replace_items(self, items: list[TResponseInputItem]) -> None:
        """Replace all items of the session with these, in one commit.

        It is all or nothing, and can be repeated like `add_items`.
        """
        await self._taken().change(None, [_json(item) for item in items])

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> _CompactionSnapshot:
        """Let the SDK's compaction replace the newest items in one commit, as its own sessions do.

        The SDK looks for this method by its name; without it, a compaction clears the session and
        adds the remaining items, and a crash between the two would lose the history.
        """
        kept = await self._taken().load()
        shown = kept[-limit:] if limit > 0 else ()

        async def replace_suffix(start: int, output: list[TResponseInputItem]) -> bool:
            texts = [_json(item) for item in output]
            return await self._taken().replace_end(shown[start:], texts, prune_prefix)

        items = [_given(one) for one in shown]
        return _CompactionSnapshot(items, len(kept) <= limit, replace_suffix)

    def _taken(self) -> _Turn:
        if self._turn is None:
            raise OutsideTurn(self.session_id)
        return self._turn


class _Turn:
    """One turn of one session. Invariant: no other turn adds items to its log meanwhile."""

    def __init__(self, conversation: Conversation, line: _Line) -> None:
        self._conversation = conversation
        self._line = line
        self._turn_id = _ports.ids.new()
        self._kept: Sequence[_Kept] | None = None
        """The session's items; None while they are not known."""
        self._unsettled: _Change | None = None
        """The last change while it is unknown whether it is in the log."""
        self.is_left = False
        """True once its block was left: another turn may have begun."""
        self._changing = anyio.Lock()
        """Held while items change or are read from the log: each change builds on the one before,
        and calls in one turn may come from several tasks."""
        self._run: RunContextWrapper[Any] | None = None
        """The run that began last."""
        self._earlier_runs: list[RunContextWrapper[Any]] = []

    async def load(self) -> Sequence[_Kept]:
        """Return the session's items."""
        if self._kept is not None:
            return self._kept
        async with self._changing:
            return await self._load()

    async def _load(self) -> Sequence[_Kept]:
        if self._kept is None:
            # The owner's answer proves that this process owns the conversation, and that the write
            # of a cancelled call is in the log by now, or never will be.
            await self._conversation.append_all(())
            self._line.history = await _read(self._conversation, self._line.history)
            self._kept = self._line.history.kept
        return self._kept

    def begin_run(self, run: RunContextWrapper[Any]) -> None:
        """Note that this run has read the history; from now on, earlier runs may not write."""
        if self._run is not None and self._run is not run:
            self._earlier_runs.append(self._run)
        self._run = run
        self._earlier_runs = [earlier for earlier in self._earlier_runs if earlier is not run]

    def check_run(self, run: RunContextWrapper[Any]) -> None:
        """Raise `RunsOverlap` if another run has begun after this one."""
        if any(earlier is run for earlier in self._earlier_runs):
            raise RunsOverlap(self._conversation.conversation_id)

    async def change(self, removed: int | None, added: Sequence[str]) -> Sequence[_Kept]:
        """Make this change durable; return the items that were removed."""
        async with self._changing:
            return await self._change(removed, added)

    async def replace_end(
        self,
        expected: Sequence[_Kept],
        added: Sequence[str],
        prune_prefix: Callable[[TResponseInputItem], bool] | None,
    ) -> bool:
        """Put new items in the place of the last ones; return False if those are not `expected`.

        Items at the beginning of which `prune_prefix` is true are removed too.
        """
        async with self._changing:
            kept = await self._load()
            if not expected or list(kept[-len(expected) :]) != list(expected):
                return False
            first = [_given(one) for one in kept[: -len(expected)]]
            left = first
            if prune_prefix is not None:
                left = list(dropwhile(prune_prefix, first))
            if len(left) == len(first):
                await self._change(len(expected), added)
            else:
                await self._change(None, [*map(_json, left), *added])
            return True

    async def _change(self, removed: int | None, added: Sequence[str]) -> Sequence[_Kept]:
        change = self._unsettled
        if change is None or (change.removed, change.added) != (removed, added):
            change = await self._decide(removed, added)
        if not change.gone and not added:
            return ()
        if self.is_left:  # this task has outlived its block
            raise OutsideTurn(self._conversation.conversation_id)
        # From here until the answer, the outcome is unknown. Sending the same events again makes
        # the same change, once.
        self._unsettled, self._kept = change, None
        try:
            appended = await self._conversation.append_all(change.events)
        except Refused:
            self._unsettled = None
            raise
        self._unsettled, self._kept = None, change.after
        self._line.history = _History(change.after, appended.seq, change.events[-1].id)
        return change.gone

    async def _decide(self, removed: int | None, added: Sequence[str]) -> _Change:
        before = await self._load()
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
        # Decoded, so that it equals the event that is read back, and is recognised as a duplicate.
        events = [decode_event(json.dumps(record)), *shown]
        hidden = {event_id for one in gone for event_id in one.shown_by}
        if hidden:
            # A condensation may already have taken some of them out of the view.
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


async def _read(conversation: Conversation, known: _History) -> _History:
    """Read the items of the conversation's session, reading only log events that are not known."""
    kept: list[_Kept] = list(known.kept)
    last_seq, last_id = known.seq, known.event_id
    is_known = known.seq == 0
    try:
        async for seq, event in conversation.events(after=max(0, known.seq - 1), live=False):
            if not is_known:
                if event.id != known.event_id:
                    return await _read(conversation, _History())
                is_known = True
                continue
            last_seq, last_id = seq, event.id
            if event.kind == ITEMS_KIND and isinstance(event, UnknownEvent):
                try:
                    _fold(kept, event.fields)
                except (KeyError, TypeError, ValueError) as error:
                    found = f"the record is no {ITEMS_KIND} event ({type(error).__name__})"
                    raise CorruptLog(conversation.conversation_id, seq, found) from error
    except ConversationNotFound:
        return _History()  # the first item creates it
    return _History(kept, last_seq, last_id) if is_known else await _read(conversation, _History())


def _fold(kept: list[_Kept], fields: Mapping[str, Any]) -> None:
    _remove(kept, fields["removed"])
    for text, shown_by in fields["added"]:
        _place(kept, _Kept(text, json.loads(text), shown_by))


def _remove(kept: list[_Kept], removed: int | None) -> Sequence[_Kept]:
    """Remove the last `removed` items, all of them for None, and return them."""
    first = 0 if removed is None else max(0, len(kept) - removed)
    gone = kept[first:]
    del kept[first:]
    return gone


def _place(kept: list[_Kept], one: _Kept) -> None:
    """Add an item at the end, but a late result behind its call."""
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
    """Return the place of this result's call, or of an earlier result for it, or None."""
    for at in range(len(kept) - 1, -1, -1):
        if kept[at].item.get("call_id") == result["call_id"]:
            return at
    return None


def _json(item: object) -> str:
    if not isinstance(item, Mapping):
        raise InvalidInput(f"an item is a JSON object, and {type(item).__name__} is not")
    try:
        # NaN is not JSON: a provider's client would refuse each later run that sends the item.
        text = json.dumps(item, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"an item is a JSON object, and this is not: {error}") from error
    # A lone surrogate is kept too, as an escape sequence.
    return json.dumps(item) if storable(text) != text else text


def _given(one: _Kept) -> TResponseInputItem:
    return cast("TResponseInputItem", json.loads(one.text))


# --- items as events ------------------------------------------------------------------------------


def _shown(item: _Item, before: Sequence[_Kept], now: datetime, turn_id: str) -> Sequence[Event]:
    """Return the events that show this item; none for an item that maps to no event.

    A call is logged together with its result, as a separate response. So a popped item can be
    retracted, and a call that waits for an approval blocks nothing.
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
    """Return the text of a content, which is a text or a list of parts."""
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
