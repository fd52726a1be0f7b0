"""Listings: the facts of a conversation that lists show, as a fold of its log; rows and cursors.

The owner computes a `Listing` at each append that may change it, and the journal stores that beside
the log. A listing is a function of the log up to its seq, and of nothing else: it can be computed
again, and `verify` does.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from pydantic_core import to_json

from ..errors import InvalidInput
from ..events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ForkedFromEvent,
    LLMConvertibleEvent,
    RetractionEvent,
    UserMessageEvent,
)
from ..journal import (
    LISTED_KINDS,
    LISTING_AGE_MAX,
    Listing,
    ListOrder,
    ListPage,
    ListQuery,
    ListRow,
    Record,
)
from ..values.text import check_id, check_label, check_sought, check_text, check_whole
from .details import Details
from .status import AgentExecutionStatus
from .turn_table import TurnTable

__all__ = [
    "ConversationPage",
    "ListedConversation",
    "ListedFold",
    "changes_listing",
    "checked_status",
    "decode_cursor",
    "make_listing",
    "make_query",
    "page_of",
    "time_us",
]

CURSOR_RULE = "cursor must be that of the previous page, with the same filters and order"
LIST_LIMIT_MAX = 100_000
"""The rows that one call may ask for, or look at."""
SHOWN_LENGTH = 200
"""The characters that are shown of the last message."""
SHOWN_CALLS_MAX = 8
"""The most waiting calls whose tools are named."""
_EPOCH = datetime.fromtimestamp(0, UTC)


ACTIVE_KINDS = frozenset(
    (
        "turn_started",
        "turn_ended",
        "user_message",
        "agent_message",
        "message_queued",
        "message_withdrawn",
        "confirmation_requested",
        "confirmation_given",
        "paused",
        "resumed",
        "forked_from",
    )
)
"""The kinds that `ListedFold.fold_listed` takes: those that make a conversation active."""


@dataclass(slots=True)
class ListedFold:
    """The times, the last message and the parent of a conversation; `Folded` extends it."""

    created_us: int = 0
    active_us: int = 0
    last_id: str = ""
    """The event that holds the last message."""
    last_by: Literal["", "user", "agent"] = ""
    last_message: str = ""
    parent: str = ""
    """The conversation that it is a fork of."""
    parent_seq: int = 0

    def begin_listed(self, event: Event) -> None:
        """Take the time of the first event of the log."""
        self.created_us = self.active_us = time_us(event)

    def fold_listed(self, event: Event) -> None:
        """Advance by this event of the log, which is of one of `ACTIVE_KINDS`."""
        self.active_us = time_us(event)
        if _is_chat(event):
            self._set_last(event)
        elif event.kind == "forked_from":
            assert isinstance(event, ForkedFromEvent), event.kind
            self.created_us = self.active_us
            self.parent, self.parent_seq = event.conversation_id, event.seq

    def retract_listed(self, event: RetractionEvent, view: Sequence[LLMConvertibleEvent]) -> None:
        """Advance by this event of the log, given the view after it."""
        if self.last_id in event.retracted_event_ids:
            self._set_last(next(filter(_is_chat, reversed(view)), None))

    def copy_listed(self) -> ListedFold:
        """Return these facts alone, as a snapshot keeps them."""
        return ListedFold(
            self.created_us,
            self.active_us,
            self.last_id,
            self.last_by,
            self.last_message,
            self.parent,
            self.parent_seq,
        )

    def restore_listed(self, stored: ListedFold) -> None:
        """Take the facts over from a snapshot."""
        self.created_us, self.active_us = stored.created_us, stored.active_us
        self.last_id, self.last_by = stored.last_id, stored.last_by
        self.last_message = stored.last_message
        self.parent, self.parent_seq = stored.parent, stored.parent_seq

    def _set_last(self, last: UserMessageEvent | AgentMessageEvent | None) -> None:
        """Show this chat message as the last one."""
        if last is None:
            self.last_id, self.last_by, self.last_message = "", "", ""
        else:
            self.last_id = last.id
            self.last_by = "user" if last.kind == "user_message" else "agent"
            self.last_message = last.content[:SHOWN_LENGTH]


def _is_chat(event: Event) -> TypeGuard[UserMessageEvent | AgentMessageEvent]:
    """True if the event is a message that a user or the agent wrote."""
    kind = event.kind
    if kind == "user_message":
        assert isinstance(event, UserMessageEvent), kind
        return not event.is_reminder
    return kind == "agent_message"


def time_us(event: Event) -> int:
    """Return the time of an event in microseconds since 1970."""
    # In whole numbers: exact in any year, which the float of `timestamp()` is not.
    since = event.timestamp - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


# --- the row that the journal stores --------------------------------------------------------------


def changes_listing(records: Iterable[Record], *, since: int, in_turn: bool) -> bool:
    """Return True if an append of these records goes with a new listing.

    `since`: the number of records after the last listing. Messages of a turn's agent are shown when
    the turn ends.
    """
    if since * 2 >= LISTING_AGE_MAX:
        return True
    for record in records:
        if record.kind in LISTED_KINDS or (record.kind == "agent_message" and not in_turn):
            return True
    return False


def make_listing(
    seq: int,
    *,
    details: Details,
    listed: ListedFold,
    status: str,
    turns: TurnTable,
    open_calls: Mapping[str, ActionEvent],
) -> Listing:
    """Return the listing of a conversation whose log has these folds at `seq`."""
    shown: dict[str, object] = {"by": listed.last_by, "said": listed.last_message}
    if details.title:
        shown["title"] = details.title
    if turns.queued:
        shown["queued"] = len(turns.queued)
    if (waits_for := turns.waits_for) is not None:
        shown["waits"] = waits_for
        named = [open_calls[one].tool_name for one in turns.awaiting if one in open_calls]
        shown["calls"] = named[:SHOWN_CALLS_MAX]
    if listed.parent:
        shown["parent"] = [listed.parent, listed.parent_seq]
    return Listing(
        seq,
        details.owner,
        status.lower(),
        listed.created_us,
        listed.active_us,
        details.labels,
        to_json(shown).decode(),
    )


# --- for readers ----------------------------------------------------------------------------------


class ListedConversation(NamedTuple):
    """One conversation of a list; nothing of it was opened."""

    conversation_id: str
    title: str
    owner: str
    """The user whose conversation it is; empty if it has none."""
    labels: Mapping[str, str]
    created_at: float | None
    """Seconds since the Unix epoch, UTC; None if that is not known: see `is_stale`."""
    active_at: float
    """The time of its last chat message, turn or hold."""
    head: int
    """The seq that its log ends at."""
    status: str
    """The status of its agent, in lower case; empty if it is not known."""
    queued: int
    """The chat messages that wait for their turn."""
    waits_for: Literal["resume", "confirmation"] | None
    """The user's decision that its turn waits for."""
    waiting_calls: Sequence[str]
    """The tools of the calls that wait for a confirmation."""
    last_message: str
    """The beginning of its last chat message, as of the last turn that began or ended."""
    last_by: Literal["", "user", "agent"]
    forked_from: tuple[str, int] | None
    """The conversation that it is a fork of, and the seq."""
    updated_at: float
    """The time of its last record, of any kind."""
    is_stale: bool
    """True if the log has gone on since this was written; the next owner, or `turnkeeper reindex`,
    writes it again."""
    owned: Literal["here", "elsewhere", "none"]
    """The process that owns its log: this one, another one that is alive, or none."""
    address: str
    """The address of that other process, as its lease has it; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ConversationPage:
    """A page of a list."""

    rows: Sequence[ListedConversation]
    cursor: str | None
    """Give it for the next page; None if there are no more."""
    is_complete: bool
    """False if the search for rows stopped before the page was full; go on with the cursor."""


def page_of(page: ListPage, query: ListQuery) -> ConversationPage:
    """Return a page of the journal for readers."""
    cursor = None if page.next is None else _encode_cursor(page.next, query)
    # All in one call: for a single payload, the call itself would take most of the time.
    shown = json.loads(f"[{','.join([row.listing.payload or '{}' for row in page.rows])}]")
    return ConversationPage(list(map(_listed, page.rows, shown)), cursor, page.is_complete)


def _listed(row: ListRow, shown: dict[str, Any]) -> ListedConversation:
    name, head, updated_us, listing, is_stale, owned, address = row
    seq, owner, status, created_us, active_us, labels, _ = listing
    get = shown.get
    parent = get("parent")
    columns = (
        name,
        get("title", ""),
        owner,
        labels,
        created_us / 1_000_000 if seq else None,
        active_us / 1_000_000,
        head,
        status,
        get("queued", 0),
        get("waits"),
        get("calls", ()),
        get("said", ""),
        get("by", ""),
        None if parent is None else (parent[0], parent[1]),
        updated_us / 1_000_000,
        is_stale,
        owned,
        address,
    )
    # The same as `ListedConversation(*columns)`, and quicker; a page spends most of its time here.
    return tuple.__new__(ListedConversation, columns)


def make_query(
    *,
    limit: int,
    prefix: str,
    owner: str | None,
    status: str | None,
    label: tuple[str, str] | None,
    order: ListOrder,
    scan_max: int,
    cursor: str | None,
) -> ListQuery:
    """Return a query for a journal. Raise `InvalidInput` if an argument is invalid."""
    for what, count in (("limit", limit), ("scan_max", scan_max)):
        check_whole(what, count)
        if not 1 <= count <= LIST_LIMIT_MAX:
            rule = f"{what} must be 1 to {LIST_LIMIT_MAX}"
            raise InvalidInput(
                f"{what} is {count}; it takes 1 to {LIST_LIMIT_MAX}", argument=what, rule=rule
            )
    check_sought("prefix", prefix)
    if owner is not None:
        check_sought("owner", owner)
    status = checked_status(status)
    if order not in get_args(ListOrder):
        raise InvalidInput(f"order is {order!r}; it takes one of {', '.join(get_args(ListOrder))}")
    if label is not None:
        check_label(label)
    query = ListQuery(limit, None, prefix, owner, status, label, order, scan_max)
    return query if cursor is None else query._replace(after=decode_cursor(cursor, query))


def checked_status(status: str | None) -> str | None:
    """Return the status that a query asks for, in lower case. Raises `InvalidInput`."""
    if status is None:
        return None
    check_text("status", status)
    if status.upper() not in AgentExecutionStatus.__members__:
        known = ", ".join(one.lower() for one in AgentExecutionStatus)
        said = f"status is {status!r}; it takes one of {known}"
        raise InvalidInput(said, argument="status", rule=f"status must be one of {known}")
    return status.lower()


def _filters(query: ListQuery) -> str:
    facts = (query.prefix, query.owner, query.status, query.label, query.order)
    return blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _encode_cursor(key: Sequence[str | int], query: ListQuery) -> str:
    text = json.dumps([_filters(query), *key], ensure_ascii=False, separators=(",", ":"))
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str, query: ListQuery) -> Sequence[str | int]:
    """Return the place that a cursor names. Raise `InvalidInput` if it is of another list."""
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        filters, *key = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        said = "a cursor that no page has given; begin without one"
        raise InvalidInput(said, argument="cursor", rule=CURSOR_RULE) from error
    if filters != _filters(query) or not _is_key(key, query.order):
        raise InvalidInput(
            "a cursor of a list with other filters or another order; give the same ones, or begin "
            "without a cursor",
            argument="cursor",
            rule=CURSOR_RULE,
        )
    return tuple(key)


def _is_key(key: Sequence[object], order: ListOrder) -> bool:
    """True if a journal can look for rows after this key, which a client may have made up."""
    match key:
        case [place] if order == "id":
            return _is_name(place)
        case [time_us, place] if order != "id":
            # Rows of the same time are in order by a number in databases, by name in memory.
            return _is_number(time_us) and (_is_number(place) or _is_name(place))
    return False


def _is_number(part: object) -> bool:
    return type(part) is int and abs(part) < 1 << 63


def _is_name(part: object) -> bool:
    try:
        check_id("a name in a cursor", part)
    except InvalidInput:
        return False
    return True
