"""The listings in the SQLite file: written in the statement of the append, read a page at a time.

A page reads one range of one index, whatever the number of conversations. Nothing here is the
truth: a listing is computed again from its log by the next owner, or by `turnkeeper reindex`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Literal

from ...journal import LISTED_KINDS, Listing, ListPage, ListQuery, ListRow
from ..shared.list_pages import (
    ListKey,
    drive_range,
    fill_page,
    is_surely_stale,
    labels_text,
    listing_seal,
    stored_listing,
)
from .log import CHAIN

Owned = Literal["here", "elsewhere", "none"]

__all__ = [
    "LISTING_COLUMNS",
    "LISTING_WIDTH",
    "NO_LISTING",
    "WRITE_LISTING",
    "erase_listing",
    "has_moved",
    "listing_columns",
    "read_listing",
    "read_page",
    "store_listing",
]

# The last columns of `incoming`; all of them are NULL if the record brings no listing.
_STORED = ("seq", "owner", "status", "created_us", "active_us", "labels", "payload", "seal")
LISTING_WIDTH = len(_STORED)
NO_LISTING = (None,) * LISTING_WIDTH
LISTING_COLUMNS = ", ".join(f"0 AS listing_{name}" for name in _STORED)

# An update of columns that an index has writes that index, also if the values are the same. So the
# usual update leaves out those that hardly ever change, and most conversations have no labels.
_MOVING = ("seq", "status", "active_us", "labels", "payload", "seal")
WRITE_LISTING = f"""
    CREATE TEMP TRIGGER write_listing INSTEAD OF INSERT ON incoming
        WHEN NEW.listing_seq IS NOT NULL
    BEGIN
        UPDATE listing SET {", ".join(f"{name} = NEW.listing_{name}" for name in _MOVING)}
        WHERE conversation = NEW.conversation AND owner = NEW.listing_owner
            AND created_us = NEW.listing_created_us;
        INSERT INTO listing
            SELECT c.id, c.name, {", ".join(f"NEW.listing_{name}" for name in _STORED)}
            FROM conversation c WHERE c.id = NEW.conversation AND changes() = 0
            ON CONFLICT (conversation) DO UPDATE SET
                {", ".join(f"{name} = excluded.{name}" for name in _STORED)};
    END;
    CREATE TEMP TRIGGER write_labels INSTEAD OF INSERT ON incoming
        WHEN NEW.listing_seq IS NOT NULL AND (
            NEW.listing_labels <> '{{}}'
            OR EXISTS (SELECT 1 FROM label WHERE conversation = NEW.conversation)
        )
    BEGIN
        DELETE FROM label WHERE conversation = NEW.conversation AND (
            owner <> NEW.listing_owner OR created_us <> NEW.listing_created_us OR NOT EXISTS (
                SELECT 1 FROM json_each(NEW.listing_labels) j
                WHERE j.key = label.label AND j.value = label.value
            )
        );
        UPDATE label SET active_us = NEW.listing_active_us WHERE conversation = NEW.conversation;
        INSERT OR IGNORE INTO label
            SELECT c.id, j.key, j.value, NEW.listing_owner, c.name,
                NEW.listing_created_us, NEW.listing_active_us
            FROM conversation c, json_each(NEW.listing_labels) j WHERE c.id = NEW.conversation;
    END;
"""  # noqa: S608 - our own text


def listing_columns(name: str, listing: Listing) -> Sequence[object]:
    """Return a listing as the triggers take it: its values for the last columns of `incoming`."""
    labels = labels_text(listing)
    return (
        listing.seq,
        listing.owner,
        listing.status,
        listing.created_us,
        listing.active_us,
        labels,
        listing.payload,
        listing_seal(name, listing, labels),
    )


def store_listing(connection: sqlite3.Connection, number: int, name: str, listing: Listing) -> None:
    """Write a listing beside the log, without an append."""
    erase_listing(connection, number)
    connection.execute(
        "INSERT INTO listing VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (number, name, *listing_columns(name, listing)),
    )
    facts = (listing.owner, name, listing.created_us, listing.active_us)
    for label, value in listing.labels.items():
        connection.execute(
            "INSERT INTO label VALUES (?, ?, ?, ?, ?, ?, ?)", (number, label, value, *facts)
        )


def erase_listing(connection: sqlite3.Connection, number: int) -> None:
    """Remove all that lists show of a conversation."""
    connection.execute("DELETE FROM label WHERE conversation = ?", (number,))
    connection.execute("DELETE FROM listing WHERE conversation = ?", (number,))


# --- reading --------------------------------------------------------------------------------------

_ROW = """
    l.conversation, l.name, l.seq, l.owner, l.status, l.created_us, l.active_us, l.labels,
    l.payload, l.seal, c.head, c.updated_us, c.last
"""
_FACTS = """
    conversation, name, seq, owner, status, created_us, active_us, labels, seal, head, updated_us,
    last, length(CAST(payload AS BLOB))
"""
_LISTED = ", ".join(f"'{kind}'" for kind in sorted(LISTED_KINDS))
_HAS_MOVED = f"""
    {CHAIN} SELECT EXISTS (
        SELECT 1 FROM chain c JOIN event e ON e.id = c.id WHERE e.kind IN ({_LISTED})
    )
"""  # noqa: S608 - our own text


def read_page(
    connection: sqlite3.Connection,
    query: ListQuery,
    *,
    owned: Callable[[], tuple[Owned, str]],
) -> ListPage:
    """Return a page; `owned` says who owns the file."""
    owned_by = owned()
    of_time = {"id": None, "created": 3, "activity": 4}[query.order]
    new = tuple.__new__

    def fetch(after: ListKey | None, limit: int) -> Sequence[tuple[ListRow, ListKey]]:
        statement, values = page_statement(query, after, limit)
        # All rows at once: each further fetch would wait for a busy event loop. Their payloads are
        # JSON, so they stand apart: to quote JSON in JSON, and to read that, takes long.
        found, payloads = connection.execute(statement, values).fetchone()
        rows: list[tuple[ListRow, ListKey]] = []
        at = 0
        for number, name, *facts, seal, head, updated_us, last, size in json.loads(found):
            facts.append(payloads[at : at + size].decode(errors="replace"))
            at += size
            listing = stored_listing(name, facts, seal)
            is_stale = listing.seq != head and has_moved(connection, listing, head, last)
            key = (name,) if of_time is None else (facts[of_time], number)
            # The same as `ListRow(…)`, in two thirds of the time.
            row = new(ListRow, (name, head, updated_us, listing, is_stale, *owned_by))
            rows.append((row, key))
        return rows

    return fill_page(query, fetch)


def page_statement(
    query: ListQuery, after: ListKey | None, limit: int
) -> tuple[str, Sequence[object]]:
    """Return the statement that reads so many rows of the query's drive, behind a key."""
    part = drive_range(query, after, "?")
    tables = "listing l JOIN conversation c ON c.id = l.conversation"
    if part.is_by_label:
        tables = f"label k JOIN {tables} AND l.conversation = k.conversation"
    statement = f"""
        SELECT json_group_array(json_array({_FACTS})), CAST(group_concat(payload, '') AS BLOB)
        FROM (SELECT {_ROW} FROM {tables} {part.where} ORDER BY {part.order} LIMIT ?)
    """  # noqa: S608 - our own text
    return statement, (*part.values, limit)


def has_moved(connection: sqlite3.Connection, listing: Listing, head: int, last: int) -> bool:
    """Return True if a log that ends at `head`, in row `last`, has gone on since its listing."""
    is_stale = is_surely_stale(listing, head)
    if is_stale is None:
        found = connection.execute(_HAS_MOVED, {"entry": last, "first": listing.seq + 1})
        is_stale = bool(found.fetchone()[0])
    return is_stale


def read_listing(connection: sqlite3.Connection, number: int) -> tuple[Listing, bool] | None:
    """Return the listing of a conversation, and whether it and its labels are whole; or None."""
    row = connection.execute(
        "SELECT name, seq, owner, status, created_us, active_us, labels, payload, seal "
        "FROM listing WHERE conversation = ?",
        (number,),
    ).fetchone()
    if row is None:
        return None
    name, *facts, seal = row
    listing = stored_listing(name, facts, seal)
    is_whole = bool(listing.seq or not facts[0]) and dict(
        connection.execute(
            "SELECT label, value FROM label WHERE conversation = ? AND owner = ? AND name = ? "
            "AND created_us = ? AND active_us = ?",
            (number, listing.owner, name, listing.created_us, listing.active_us),
        )
    ) == dict(listing.labels)
    return listing, is_whole
