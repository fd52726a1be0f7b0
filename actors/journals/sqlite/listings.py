"""The listings in the SQLite file: written in the statement of the append, read a page at a time.

A page reads one range of one index, whatever the number of conversations, and also the rows that
have changed recently, which are in a separate table, `listing_recent`. A turn changes the status
and the time of activity, and would move entries in five indexes each time. So a turn writes its row
to `listing_recent`, and the writer folds rows at rest into `listing`, some at a time.

Invariants. A row in `listing_recent` replaces the row of its conversation in `listing`, which
always exists, and differs from it only in the columns that a turn changes. A page is read in one
statement, and sees each conversation in one of the two tables.

Listings are a cache: the next owner, or `turnkeeper reindex`, computes them again from the log.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Literal

from ...journal import AT_REST, LISTED_KINDS, Listing, ListPage, ListQuery, ListRow
from ..shared.list_pages import (
    ListKey,
    drive_range,
    fill_page,
    is_surely_stale,
    labels_text,
    listing_columns,
    stored_listing,
)
from .log import CHAIN

Owned = Literal["here", "elsewhere", "none"]

__all__ = [
    "CHANGE_LISTING",
    "LISTINGS_FOLDED",
    "LISTING_COLUMNS",
    "LISTING_WIDTH",
    "NO_LISTING",
    "RECENT_LISTINGS_MAX",
    "WRITE_LISTING",
    "erase_listing",
    "fold_listings",
    "has_moved",
    "read_listing",
    "read_page",
    "recent_listings",
    "store_listing",
]

# The last columns of `incoming_listed`. A listing's seq is at least 0, and a record without one has
# -1 in all of them. Not NULL: Python's sqlite3 looks for an adapter of each None, which takes as
# long as ten numbers.
_STORED = ("seq", "owner", "status", "created_us", "active_us", "labels", "payload", "seal")
LISTING_WIDTH = len(_STORED)
NO_LISTING: tuple[object, ...] = (-1,) * LISTING_WIDTH
LISTING_COLUMNS = ", ".join(f"0 AS listing_{name}" for name in _STORED)

RECENT_LISTINGS_MAX = 256
"""Above this many recent rows, some are folded. Each page of a list reads all recent rows."""
LISTINGS_FOLDED = 128
"""How many rows are folded at a time, which takes some milliseconds."""

# The columns that a turn changes. Other changes go into `listing` and its labels at once, which
# also restores a label that was lost by damage.
_MOVING = ("seq", "status", "active_us", "payload", "seal")
_ALL = ", ".join(f"NEW.listing_{name}" for name in _STORED)
# The last statements of the trigger that writes a row of `incoming_listed`. RAISE(IGNORE) ends the
# work on a row, and keeps what was done for it. What a turn does is all in one trigger: SQLite sets
# up the registers and cursors of a further one for each row, even if its WHEN says no.
WRITE_LISTING = f"""
        SELECT RAISE(IGNORE) WHERE NEW.listing_seq < 0;
        INSERT OR REPLACE INTO listing_recent
            SELECT l.conversation, l.name, NEW.listing_seq, l.owner, NEW.listing_status,
                l.created_us, NEW.listing_active_us, l.labels, NEW.listing_payload,
                NEW.listing_seal
            FROM listing l WHERE l.conversation = NEW.conversation
                AND l.owner = NEW.listing_owner AND l.created_us = NEW.listing_created_us
                AND l.labels = NEW.listing_labels
                AND (l.labels = '{{}}' OR NOT EXISTS (
                    SELECT 1 FROM json_each(l.labels) j LEFT JOIN label k
                    ON k.conversation = l.conversation AND k.label = j.key AND k.owner = l.owner
                    WHERE k.value IS NOT j.value
                ));
        SELECT RAISE(IGNORE) WHERE changes() > 0;
        INSERT INTO changed_listing VALUES (NEW.conversation, {_ALL});
"""  # noqa: S608 - our own text
CHANGE_LISTING = f"""
    CREATE TEMP VIEW changed_listing AS SELECT 0 AS conversation, {LISTING_COLUMNS};
    CREATE TEMP TRIGGER change_listing INSTEAD OF INSERT ON changed_listing
    BEGIN
        DELETE FROM listing_recent WHERE conversation = NEW.conversation;
        INSERT INTO listing
            SELECT c.id, c.name, {_ALL} FROM conversation c WHERE c.id = NEW.conversation
            ON CONFLICT (conversation) DO UPDATE SET
                {", ".join(f"{name} = excluded.{name}" for name in _STORED)};
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

_RECENT = "SELECT conversation FROM listing_recent"
# Rows at rest first: the others will change again soon.
_OLDEST = f"""
    SELECT json_group_array(conversation) FROM (
        SELECT conversation FROM listing_recent ORDER BY status NOT IN {AT_REST}, active_us LIMIT ?
    )
"""  # noqa: S608 - our own text
_FOLD = (
    f"""
    UPDATE listing SET {", ".join(f"{name} = r.{name}" for name in _MOVING)}
    FROM json_each(?) j CROSS JOIN listing_recent r ON r.conversation = j.value
    WHERE listing.conversation = j.value
    """,  # noqa: S608 - our own text
    """
    UPDATE label SET active_us = r.active_us
    FROM json_each(?) j CROSS JOIN listing_recent r ON r.conversation = j.value
    WHERE label.conversation = j.value
    """,
    "DELETE FROM listing_recent WHERE conversation IN (SELECT value FROM json_each(?))",
)


def recent_listings(connection: sqlite3.Connection) -> set[int]:
    """Return the conversations that have a row in `listing_recent`."""
    return {row[0] for row in connection.execute(_RECENT)}


def fold_listings(connection: sqlite3.Connection, many: int) -> None:
    """Fold this many of the oldest rows of `listing_recent` into `listing` and the labels."""
    found = connection.execute(_OLDEST, (many,)).fetchone()
    for statement in _FOLD:
        connection.execute(statement, found)


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
    """Remove a conversation from all lists."""
    connection.execute("DELETE FROM listing_recent WHERE conversation = ?", (number,))
    connection.execute("DELETE FROM label WHERE conversation = ?", (number,))
    connection.execute("DELETE FROM listing WHERE conversation = ?", (number,))


# --- reading --------------------------------------------------------------------------------------

_ROW = """
    SELECT l.conversation, l.name, l.seq, l.owner, l.status, l.created_us, l.active_us, l.labels,
    l.payload, l.seal, c.head, c.updated_us, c.last
"""
_FACTS = """
    conversation, name, seq, owner, status, created_us, active_us, labels, seal, head, updated_us,
    last, length(CAST(payload AS BLOB))
"""
_ALL_ROWS = f"""
    SELECT json_group_array(json_array({_FACTS})), CAST(group_concat(payload, '') AS BLOB) FROM
"""  # noqa: S608 - our own text
_NOT_RECENT = """
    NOT EXISTS (SELECT 1 FROM listing_recent r WHERE r.conversation = l.conversation)
"""
_HEADS = "JOIN conversation c ON c.id = l.conversation"
_LABELS = "CROSS JOIN label k ON k.conversation = l.conversation"
_LISTED = ", ".join(f"'{kind}'" for kind in sorted(LISTED_KINDS))
_STORED_ROW = f"SELECT name, {', '.join(_STORED)}"
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
    """Return a page; `owned` is the process that owns the file."""
    owned_by = owned()
    of_time = {"id": None, "created": 3, "activity": 4}[query.order]
    new = tuple.__new__

    def fetch(after: ListKey | None, limit: int) -> Sequence[tuple[ListRow, ListKey]]:
        statement, values = page_statement(query, after, limit)
        # All rows at once: each further fetch would wait for a busy event loop. The payloads, which
        # are JSON, are returned separately: quoting JSON inside JSON is slow to write and read.
        both = connection.execute(statement, values).fetchone()
        folded = rows_of(*both[:2])
        recent = rows_of(*both[2:])
        if not recent:
            return folded
        rows = [*folded, *recent]
        rows.sort(key=itemgetter(1), reverse=query.order == "activity")
        return rows[:limit]

    def rows_of(found: str, payloads: bytes | None) -> list[tuple[ListRow, ListKey]]:
        rows: list[tuple[ListRow, ListKey]] = []
        at = 0
        for number, name, *facts, seal, head, updated_us, last, size in json.loads(found):
            facts.append((payloads or b"")[at : at + size].decode(errors="replace"))
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
    """Return the statement that reads `limit` rows of the query's drive, after a key.

    It reads up to `limit` folded rows and up to `limit` recent rows, each in order.
    """
    part = drive_range(query, after, "?")
    tables = f"listing l {_HEADS}"
    if part.is_by_label:
        tables = f"label k JOIN {tables} AND l.conversation = k.conversation"
    conditions = " AND ".join(filter(None, (part.conditions, _NOT_RECENT)))
    folded = f"{_ROW} FROM {tables} WHERE {conditions} ORDER BY {part.order} LIMIT ?"
    apart = drive_range(query, after, "?", is_in_labels=False)
    tables = f"listing_recent l {_LABELS if part.is_by_label else ''} {_HEADS}"
    recent = f"{_ROW} FROM {tables} {apart.where} ORDER BY {apart.order} LIMIT ?"
    statement = f"SELECT * FROM ({_ALL_ROWS} ({folded})), ({_ALL_ROWS} ({recent}))"  # noqa: S608 - our own text
    return statement, (*part.values, limit, *apart.values, limit)


def has_moved(connection: sqlite3.Connection, listing: Listing, head: int, last: int) -> bool:
    """Return True if a log that ends at `head`, in row `last`, has outdated its listing."""
    is_stale = is_surely_stale(listing, head)
    if is_stale is None:
        found = connection.execute(_HAS_MOVED, {"entry": last, "first": listing.seq + 1})
        is_stale = bool(found.fetchone()[0])
    return is_stale


def read_listing(connection: sqlite3.Connection, number: int) -> tuple[Listing, bool] | None:
    """Return the listing of a conversation, and if it and its labels are undamaged; or None."""
    folded, recent = (
        connection.execute(
            f"{_STORED_ROW} FROM {table} WHERE conversation = ?", (number,)
        ).fetchone()
        for table in ("listing", "listing_recent")
    )
    if folded is None:
        return None
    name, *facts, seal = recent or folded
    listing = stored_listing(name, facts, seal)
    folded_name, _, owner, _, created_us, active_us, labels, _, _ = folded
    is_whole = bool(listing.seq or not facts[0]) and dict(
        connection.execute(
            "SELECT label, value FROM label WHERE conversation = ? AND owner = ? AND name = ? "
            "AND created_us = ? AND (active_us = ? OR ?)",
            (number, owner, folded_name, created_us, active_us, recent is not None),
        )
    ) == dict(listing.labels)
    if recent is not None:
        same = (listing.owner, name, listing.created_us, labels_text(listing))
        is_whole = is_whole and same == (owner, folded_name, created_us, labels)
    return listing, is_whole
