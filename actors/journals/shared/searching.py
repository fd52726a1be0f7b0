"""The parts of search that are the same for every journal: which words are indexed, and pages.

The index has the chat messages of users and agents. Each message has a number, by which the index
is sorted: its time, and then its seq. Messages of one time and seq in different conversations would
share a number, so a journal gives the later one a slightly higher number.

In the databases, each message is stored with its words and with two more words that no text has:
one stands for the conversation's user, one for its id up to the first slash or colon. So a search
among one user's conversations reads no message of another user. If the user in a listing changes,
the indexing job replaces that word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from ...journal import FoundMessage, SearchPage, SearchQuery, StoredRecord
from ...values.words import snippet, words_of

__all__ = [
    "CHANGES_USER",
    "LEFT",
    "SAID_KINDS",
    "SEARCHED_KINDS",
    "SHOWN_BYTES_MAX",
    "Candidate",
    "IndexedMessage",
    "LogWords",
    "Said",
    "fill_search_page",
    "find_said",
    "folder_of",
    "found_message",
    "has_owner",
    "has_rest",
    "left_ids",
    "message_number",
    "owner_word",
    "scope_words",
    "stored_words",
]

SAID_KINDS = ("user_message", "agent_message")
LEFT: dict[str, int] = {"condensation": 1, "retraction": 2}
"""The kinds that take messages out of the view, with the numbers stored as `left_view`; the highest
number of a message counts."""
CHANGES_USER = "conversation_changed"
SEARCHED_KINDS = (*SAID_KINDS, *LEFT, CHANGES_USER)
"""The kinds of records that an index reads."""

_LEFT_VIEW: Sequence[Literal["", "condensed", "retracted"]] = ("", "condensed", "retracted")
_decode = json.JSONDecoder().decode
_SEQS = 11  # the bits of a number that hold the seq
_TIME_MAX = (1 << (62 - _SEQS)) - 1
NUMBER_SPAN = 1 << 31
"""If a message's number is taken, it gets the number after all that follow within this span: a
second."""
_CANDIDATES_AT_ONCE = 256
SHOWN_BYTES_MAX = 16 << 20
"""A page ends with the message that brings its records to this size. So it takes little memory, and
a reader's thread a second or two, however large the messages are."""


class Said(NamedTuple):
    """The chat message in a record: its text, its side, its author and its time."""

    by: Literal["user", "agent"]
    author: str | None
    at_us: int
    text: str


def find_said(kind: str, payload: bytes) -> Said | None:
    """Return the chat message in a record, or None if it has none."""
    if kind not in SAID_KINDS:
        return None
    fields = _fields(payload)
    text, author = fields.get("content"), fields.get("author")
    if not isinstance(text, str) or fields.get("is_reminder"):
        return None
    by: Literal["user", "agent"] = "user" if kind == SAID_KINDS[0] else "agent"
    return Said(by, author if isinstance(author, str) else None, _time(fields), text)


def left_ids(kind: str, payload: bytes) -> Sequence[str]:
    """Return the ids of the events that a record takes out of the view."""
    name = {"condensation": "forgotten_event_ids", "retraction": "retracted_event_ids"}[kind]
    ids = _fields(payload).get(name)
    return [one for one in ids if isinstance(one, str)] if isinstance(ids, list) else []


def has_owner(payload: bytes) -> bool:
    """Return True if a record of `CHANGES_USER` names a user."""
    return _fields(payload).get("owner") is not None


def _fields(payload: bytes) -> dict[str, Any]:
    try:
        fields = _decode(payload.decode())
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _time(fields: dict[str, Any]) -> int:
    try:
        at = datetime.fromisoformat(fields["timestamp"])
        return max(0, round(at.timestamp() * 1_000_000)) if at.tzinfo else 0
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0


def message_number(at_us: int, seq: int) -> int:
    """Return the number that a message gets, unless the number is taken."""
    return min(at_us, _TIME_MAX) << _SEQS | seq & ((1 << _SEQS) - 1)


def owner_word(owner: str) -> str:
    """Return the word that stands for a user; its first character occurs in no word of a text."""
    return "\ue000" + blake2b(owner.encode("utf-8", "replace"), digest_size=10).hexdigest()


_FOLDER = re.compile("[^/:]*[/:]")


def folder_of(conversation_id: str) -> str:
    """Return an id up to its first slash or colon; empty if it has neither."""
    found = _FOLDER.match(conversation_id)
    return found.group() if found else ""


def folder_word(conversation_id: str) -> str:
    """Return the word that stands for the folder of an id; it occurs in no text."""
    folder = folder_of(conversation_id).encode("utf-8", "replace")
    return "\ue001" + blake2b(folder, digest_size=10).hexdigest()


def scope_words(query: SearchQuery) -> list[str]:
    """Return the words for the user and the folder that a query is limited to."""
    words = [] if query.owner is None else [owner_word(query.owner)]
    if folder_of(query.prefix):
        words.append(folder_word(query.prefix))
    return words


def stored_words(owner: str, conversation_id: str, text: str) -> Sequence[str]:
    """Return all words that a message is stored with, first the user's word, which may change."""
    return (owner_word(owner), folder_word(conversation_id), *words_of(text))


# --- pages ----------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A message that has the words and the user of a query."""

    number: int
    conversation_id: str
    is_shown: bool
    """False if its conversation lacks the status or the label of the query, or has another user by
    now."""
    place: Any
    """Names the record to its journal."""


def has_rest(query: SearchQuery) -> bool:
    """Return True if the search index may find messages that the query excludes."""
    return (
        query.prefix != folder_of(query.prefix)
        or query.status is not None
        or query.label is not None
    )


def fill_search_page(
    query: SearchQuery,
    find: Callable[[int | None, int], Sequence[Candidate]],
    show: Callable[[Sequence[Candidate]], Iterable[tuple[FoundMessage, int]]],
    complete_to_us: int | None,
) -> SearchPage:
    """Return a page. `find(after, limit)` returns candidates below a number, the highest first.

    `show` yields the messages of candidates, each with the size of its record. It may end after
    `SHOWN_BYTES_MAX`.
    """

    def page(after: int | None, *, is_complete: bool = True) -> SearchPage:
        rows: list[FoundMessage] = []
        size = 0
        for row, bytes_ in show(wanted):
            rows.append(row)
            size += bytes_
            if size >= SHOWN_BYTES_MAX:
                break
        if len(rows) < len(wanted):
            after, is_complete = wanted[len(rows) - 1].number, False
        return SearchPage(rows, after, is_complete, complete_to_us)

    is_scan = has_rest(query)
    at_once = min(_CANDIDATES_AT_ONCE, query.scan_max) if is_scan else query.limit + 1
    wanted: list[Candidate] = []
    after, looked_at = query.after, 0
    while True:
        found = find(after, at_once)
        for one in found:
            if one.is_shown and one.conversation_id.startswith(query.prefix):
                if len(wanted) == query.limit:
                    return page(wanted[-1].number)
                wanted.append(one)
            after = one.number
        looked_at += len(found)
        if len(found) < at_once:
            return page(None)
        if not is_scan:
            at_once = max(at_once, _CANDIDATES_AT_ONCE)  # some are stale: there may be more
        elif looked_at >= query.scan_max:
            return page(after, is_complete=False)


def found_message(
    query: SearchQuery,
    conversation_id: str,
    seq: int,
    event_id: str,
    said: Said | None,
    *,
    number: int,
    left: int,
) -> FoundMessage:
    """Return a message as a search result; `said` is None if its record is damaged."""
    if said is None:
        at_us = number >> _SEQS
        return FoundMessage(
            conversation_id, seq, event_id, "user", None, at_us, "", _LEFT_VIEW[left]
        )
    shown = snippet(said.text, query.words, query.begins)
    facts = (said.by, said.author, said.at_us, shown)
    return FoundMessage(conversation_id, seq, event_id, *facts, _LEFT_VIEW[left])


# --- verification ---------------------------------------------------------------------------------


class IndexedMessage(NamedTuple):
    """A message of a log, as it is in an index."""

    left_view: int
    owner: str
    words: Collection[str]


class LogWords:
    """Compares an index's messages of a log with the log's own records, given one by one."""

    def __init__(
        self,
        conversation_id: str,
        indexed: Mapping[int, IndexedMessage],
        *,
        after: int = 0,
        upto: int | None = None,
    ) -> None:
        """Compare the records after `after`, where a fork begins, up to `upto`."""
        self._name = conversation_id
        self._indexed = indexed
        self._after = after
        self._upto = upto
        self._left: dict[str, int] = {}
        self.messages: dict[int, str] = {}
        """The event ids of the log's messages, by seq."""

    def add(self, record: StoredRecord) -> str | None:
        """Compare a record; return the problem, or None."""
        seq = record.seq
        if seq <= self._after or (self._upto is not None and seq > self._upto):
            return None
        if record.kind in LEFT:
            for event_id in left_ids(record.kind, record.payload):
                self._left[event_id] = max(self._left.get(event_id, 0), LEFT[record.kind])
        said = find_said(record.kind, record.payload)
        if said is None:
            return None
        self.messages[seq] = record.event_id
        one = self._indexed.get(seq)
        if one is None:
            return "the index of words lacks it"
        # Another version of Unicode may split some texts into other words.
        expected = set(stored_words(one.owner, self._name, said.text))
        if said.text.isascii() and set(one.words) != expected:
            return "the index of words differs from it"
        return None

    def end(self) -> tuple[int, str] | None:
        """Return the seq of a message that differs from the log, and the problem; or None."""
        for seq, one in self._indexed.items():
            if seq not in self.messages:
                return seq, "the index of words has a message that the log has not"
            if one.left_view != self._left.get(self.messages[seq], 0):
                return seq, "the index of words differs in how it has left the view"
        return None
