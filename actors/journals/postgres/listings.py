"""The listings in PostgreSQL: written in the statement of the append, read a page at a time.

As in the SQLite file, a page reads one range of one index, whatever the number of conversations,
and a listing is computed again from its log by the next owner, or by `turnkeeper reindex`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import psycopg

from ...journal import LISTED_KINDS, LISTING_AGE_MAX, Listing, ListPage, ListQuery, ListRow
from ..shared.list_pages import (
    ListKey,
    drive_range,
    fill_page,
    is_surely_stale,
    labels_text,
    listing_seal,
    stored_listing,
)

__all__ = [
    "LISTED",
    "LISTED_UNLABELLED",
    "erase_listing",
    "read_listing",
    "read_page",
    "store_listing",
]

_MOVING = ("seq", "owner", "status", "created_us", "active_us", "labels", "payload", "seal")

# A part of the statement of an append; `moved` has the conversations that it has moved.
LISTED_UNLABELLED = f"""
    , incoming AS (
        SELECT l.* FROM unnest(
            %(l_ids)s::bigint[], %(l_names)b::text[], %(l_seqs)s::bigint[], %(l_owners)b::text[],
            %(l_statuses)b::text[], %(l_created)s::bigint[], %(l_active)s::bigint[],
            %(l_labels)b::text[], %(l_payloads)b::text[], %(l_seals)s::bigint[]
        ) AS l(conversation, name, seq, owner, status, created_us, active_us, labels, payload, seal)
        WHERE l.conversation IN (SELECT id FROM moved)
    ), listed AS (
        INSERT INTO listing SELECT * FROM incoming
        ON CONFLICT (conversation) DO UPDATE SET
            {", ".join(f"{column} = excluded.{column}" for column in _MOVING)}
    )
"""  # noqa: S608 - our own text
# The same, with the labels.
LISTED = f"""
    {LISTED_UNLABELLED}
    , unlabelled AS (
        DELETE FROM label k USING incoming i
        WHERE k.conversation = i.conversation AND NOT i.labels::jsonb ? k.label
    ), labelled AS (
        INSERT INTO label
            SELECT i.conversation, j.key, j.value, i.owner, i.name, i.created_us, i.active_us
            FROM incoming i CROSS JOIN json_each_text(i.labels::json) j
        ON CONFLICT (conversation, label) DO UPDATE SET
            value = excluded.value, owner = excluded.owner, created_us = excluded.created_us,
            active_us = excluded.active_us
    )
"""  # noqa: S608 - our own text

_LISTED = ", ".join(f"'{kind}'" for kind in sorted(LISTED_KINDS))
_ROW = f"""
    l.conversation, l.name, l.seq, l.owner, l.status, l.created_us, l.active_us, l.labels,
    l.payload, l.seal, c.head, c.updated_us, c.owner, node.address,
    c.head - l.seq BETWEEN 1 AND {LISTING_AGE_MAX} AND EXISTS (
        SELECT FROM event e
        WHERE e.log = c.log AND e.seq > l.seq AND e.seq <= c.head AND e.kind IN ({_LISTED})
    )
"""


def read_page(connection: psycopg.Connection[Any], query: ListQuery, node: int) -> ListPage:
    """Return a page; `node` is this process.

    Each statement may see the database as of a moment of its own: what a row says of its log is in
    one of them, and the next one goes on behind a key, as the next page does.
    """

    def fetch(after: ListKey | None, limit: int) -> Sequence[tuple[ListRow, ListKey]]:
        statement, values = page_statement(query, after, limit)
        rows = connection.execute(statement.encode(), values, binary=True).fetchall()
        return [_row_of(row, query, node) for row in rows]

    return fill_page(query, fetch)


def page_statement(
    query: ListQuery, after: ListKey | None, limit: int
) -> tuple[str, Sequence[object]]:
    """Return the statement that reads so many rows of the query's drive, behind a key."""
    part = drive_range(query, after, "%s")
    tables = "listing l"
    if part.is_by_label:
        tables = "label k JOIN listing l ON l.conversation = k.conversation"
    statement = f"""
        SELECT {_ROW} FROM {tables}
        JOIN conversation c ON c.id = l.conversation
        LEFT JOIN node ON node.id = c.owner AND node.lease_until > clock_timestamp()
        {part.where} ORDER BY {part.order} LIMIT %s
    """  # noqa: S608 - our own text
    return statement, (*part.values, limit)


def _row_of(
    row: Sequence[Any],  # of PostgreSQL
    query: ListQuery,
    node: int,
) -> tuple[ListRow, ListKey]:
    number, name, *facts, seal, head, updated_us, owner, address, has_moved = row
    listing = stored_listing(name, facts, seal)
    is_stale = is_surely_stale(listing, head)
    if is_stale is None:
        is_stale = has_moved
    key: ListKey
    if query.order == "id":
        key = (name,)
    else:
        key = (facts[3] if query.order == "created" else facts[4], number)
    owned: Literal["here", "elsewhere", "none"] = (
        "none" if address is None else "here" if owner == node else "elsewhere"
    )
    elsewhere = address if owned == "elsewhere" else ""
    return ListRow(name, head, updated_us, listing, is_stale, owned, elsewhere), key


# --- without an append ----------------------------------------------------------------------------


def read_listing(connection: psycopg.Connection[Any], number: int) -> Listing | None:
    """Return the listing of a conversation, or None."""
    row = connection.execute(
        "SELECT name, seq, owner, status, created_us, active_us, labels, payload, seal "
        "FROM listing WHERE conversation = %s",
        (number,),
    ).fetchone()
    return None if row is None else stored_listing(row[0], row[1:-1], row[-1])


def store_listing(
    connection: psycopg.Connection[Any], number: int, name: str, listing: Listing
) -> None:
    """Write a listing beside the log."""
    erase_listing(connection, number)
    labels = labels_text(listing)
    connection.execute(
        "INSERT INTO listing VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            number,
            name,
            listing.seq,
            listing.owner,
            listing.status,
            listing.created_us,
            listing.active_us,
            labels,
            listing.payload,
            listing_seal(name, listing, labels),
        ),
    )
    facts = (listing.owner, name, listing.created_us, listing.active_us)
    for label, value in listing.labels.items():
        connection.execute(
            "INSERT INTO label VALUES (%s, %s, %s, %s, %s, %s, %s)", (number, label, value, *facts)
        )


def erase_listing(connection: psycopg.Connection[Any], number: int) -> None:
    """Remove all that lists show of a conversation."""
    connection.execute("DELETE FROM label WHERE conversation = %s", (number,))
    connection.execute("DELETE FROM listing WHERE conversation = %s", (number,))
