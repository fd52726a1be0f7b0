"""Searches as callers ask for them: the query for a journal, its hits, and cursors."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from ..errors import InvalidInput
from ..journal import SearchPage, SearchQuery
from ..values.text import check_label, check_sought, check_text, check_whole
from ..values.words import find_words
from .listing import checked_status

__all__ = ["SearchHit", "SearchResults", "make_search_query", "results_of"]

SEARCH_LIMIT_MAX = 10_000
"""The hits that one call may ask for."""
SCAN_MAX = 100_000
CURSOR_RULE = "cursor must be that of the previous page, with the same words and filters"
WORDS_RULE = "words must have a word: a word consists of letters and digits"
ASKED_LENGTH_MAX = 1_000
ASKED_WORDS_MAX = 32


class SearchHit(NamedTuple):
    """A chat message that a search has found."""

    conversation_id: str
    seq: int
    event_id: str
    by: Literal["user", "agent"]
    author: str | None
    """The user who sent it, if the application has said so."""
    said_at: float
    """Seconds since the Unix epoch, UTC."""
    snippet: str
    """Up to 200 characters of it, around one of the words."""
    left_view: Literal["", "condensed", "retracted"]
    """The reason why the model no longer sees it, if it does not: a condensation has forgotten it,
    or it was taken back, by a retraction, an `undo`, a rollback, or a message in its place."""


@dataclass(frozen=True, slots=True)
class SearchResults:
    """A page of the hits of a search, the newest first."""

    hits: Sequence[SearchHit]
    cursor: str | None
    """Give it for the next page; None if there are no more."""
    is_complete: bool
    """False if the search stopped before the page was full; go on with the cursor."""
    complete_to: float | None
    """All that was written before this time was searched (seconds since the Unix epoch, UTC); None:
    all that is written."""


def make_search_query(
    words: str,
    *,
    limit: int,
    cursor: str | None,
    prefix: str,
    owner: str | None,
    status: str | None,
    label: tuple[str, str] | None,
    scan_max: int,
) -> SearchQuery:
    """Return a query for a journal. Raise `InvalidInput` if an argument is invalid."""
    check_text("words", words)
    if len(words) > ASKED_LENGTH_MAX:
        raise InvalidInput(
            f"words has {len(words)} characters; it takes at most {ASKED_LENGTH_MAX}",
            argument="words",
            rule=f"words must have at most {ASKED_LENGTH_MAX} characters",
        )
    for what, count, most in (("limit", limit, SEARCH_LIMIT_MAX), ("scan_max", scan_max, SCAN_MAX)):
        check_whole(what, count)
        if not 1 <= count <= most:
            rule = f"{what} must be 1 to {most}"
            raise InvalidInput(f"{what} is {count}; it takes 1 to {most}", argument=what, rule=rule)
    check_sought("prefix", prefix)
    if owner is not None:
        check_sought("owner", owner)
    if label is not None:
        check_label(label)
    asked = words.rstrip()
    found = find_words(asked)
    begins = found.pop() if found and asked.endswith("*") else ""
    whole = tuple(dict.fromkeys(found))
    if not (whole or begins):
        said = "words has no word in it: a word consists of letters and digits"
        raise InvalidInput(said, argument="words", rule=WORDS_RULE)
    if len(whole) > ASKED_WORDS_MAX:
        raise InvalidInput(
            f"words has {len(whole)} words; it takes at most {ASKED_WORDS_MAX}",
            argument="words",
            rule=f"words must be at most {ASKED_WORDS_MAX}",
        )
    query = SearchQuery(
        whole, limit, begins, None, prefix, owner, label, scan_max, checked_status(status)
    )
    return query if cursor is None else query._replace(after=_decode_cursor(cursor, query))


def results_of(page: SearchPage, query: SearchQuery) -> SearchResults:
    """Return a page of the journal for readers."""
    hits = [
        SearchHit(
            row.conversation_id,
            row.seq,
            row.event_id,
            row.by,
            row.author,
            row.at_us / 1_000_000,
            row.snippet,
            row.left_view,
        )
        for row in page.rows
    ]
    cursor = None if page.next is None else _encode_cursor(page.next, query)
    complete_to = None if page.complete_to_us is None else page.complete_to_us / 1_000_000
    return SearchResults(hits, cursor, page.is_complete, complete_to)


def _filters(query: SearchQuery) -> str:
    facts = (query.words, query.begins, query.prefix, query.owner, query.label, query.status)
    return blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _encode_cursor(number: int, query: SearchQuery) -> str:
    text = json.dumps([_filters(query), number], separators=(",", ":"))
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode_cursor(cursor: str, query: SearchQuery) -> int:
    try:
        filters, number = json.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        is_number = type(number) is int and 0 <= number < 1 << 63
    except (ValueError, TypeError, RecursionError) as error:
        said = "a cursor that no page has given; begin without one"
        raise InvalidInput(said, argument="cursor", rule=CURSOR_RULE) from error
    if filters != _filters(query) or not is_number:
        raise InvalidInput(
            "a cursor of a search for other words or with other filters; give the same ones, or "
            "begin without a cursor",
            argument="cursor",
            rule=CURSOR_RULE,
        )
    return int(number)
