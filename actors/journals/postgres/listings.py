"""The listings in PostgreSQL: written in the statement of the append, read a page at a time.

A page reads one range of one index, whatever the number of conversations, and also the rows that
have changed recently, which are in a separate table, `listing_recent`, as in the SQLite file. A
turn changes the status and the time of activity, and would write an entry in each of ten indexes
each time. So if an owner knows that a row differs from the one in `listing` only in these, it
writes the row to `listing_recent`, in place. When there are many recent rows, a writer folds those
at rest into `listing`.

Invariants. A row in `listing_recent` replaces the row in `listing` unless that has a higher seq,
which only a process of a version without `listing_recent` writes. A statement that writes to either
table holds the lock of the conversation's row. A page is read in one statement, and sees each
conversation in one of the two tables.

Listings are a cache: the next owner, or `turnkeeper reindex`, computes them again from the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import psycopg

from ...journal import (
    AT_REST,
    LISTED_KINDS,
    LISTING_AGE_MAX,
    Listing,
    ListPage,
    ListQuery,
    ListRow,
)
from ..shared.list_pages import (
    ListKey,
    drive_range,
    fill_page,
    is_surely_stale,
    listing_columns,
    stored_listing,
)
from .connections import Numbers
from .log import Tail

__all__ = [
    "LISTED",
    "LISTINGS_BETWEEN",
    "RECENT",
    "RECENT_RETURNED",
    "RECENT_VALUE",
    "erase_listing",
    "fold_listings",
    "listed_parameters",
    "read_listing",
    "read_page",
    "store_listing",
    "text_array",
]

_STORED = ("seq", "owner", "status", "created_us", "active_us", "labels", "payload", "seal")
_ALL_EXCLUDED = ", ".join(f"{column} = excluded.{column}" for column in _STORED)

# Parts of the statement of an append; `moved` has the conversations that it has moved. A row to be
# written in place comes in two arrays of arrays: fewer arrays are less to pack and to unnest.
# `moving` has its place there, if the conversation has one.
RECENT_VALUE = ", unnest(%(r_places)s::integer[]) AS r_place"
RECENT_RETURNED = ", c.name, m.r_place"
_NUMBERS = ("seq", "created_us", "active_us", "seal")
_TEXTS = ("owner", "status", "labels", "payload")
_PLACED = ", ".join(
    f"(%(r_numbers)s::bigint[])[r_place][{_NUMBERS.index(column) + 1}]"
    if column in _NUMBERS
    else f"(%(r_texts)s::text[])[r_place][{_TEXTS.index(column) + 1}]"
    for column in _STORED
)
RECENT = f"""
    , recent AS (
        INSERT INTO listing_recent SELECT id, name, {_PLACED} FROM moved WHERE r_place IS NOT NULL
        ON CONFLICT (conversation) DO UPDATE SET {_ALL_EXCLUDED}
    )
"""  # noqa: S608 - our own text
LISTED = f"""
    , incoming AS (
        SELECT l.* FROM (
            SELECT unnest(%(l_ids)b::bigint[]) AS conversation, unnest(%(l_names)s::text[]) AS name,
                unnest(%(l_seqs)b::bigint[]) AS seq, unnest(%(l_owners)s::text[]) AS owner,
                unnest(%(l_statuses)s::text[]) AS status,
                unnest(%(l_created)b::bigint[]) AS created_us,
                unnest(%(l_active)b::bigint[]) AS active_us,
                unnest(%(l_labels)s::text[]) AS labels, unnest(%(l_payloads)s::text[]) AS payload,
                unnest(%(l_seals)b::bigint[]) AS seal
        ) AS l
        WHERE l.conversation IN (SELECT id FROM moved)
    ), listed AS (
        INSERT INTO listing SELECT * FROM incoming
        ON CONFLICT (conversation) DO UPDATE SET {_ALL_EXCLUDED}
    ), outdated AS (
        DELETE FROM listing_recent r USING incoming i WHERE r.conversation = i.conversation
    ), unlabelled AS (
        DELETE FROM label k USING incoming i
        WHERE k.conversation = i.conversation AND NOT i.labels::jsonb ? k.label
    ), labelled AS (
        INSERT INTO label
            SELECT i.conversation, j.key, j.value, i.owner, i.name, i.created_us, i.active_us
            FROM incoming i CROSS JOIN json_each_text(i.labels::json) j WHERE i.labels <> '{{}}'
        ON CONFLICT (conversation, label) DO UPDATE SET
            value = excluded.value, owner = excluded.owner, created_us = excluded.created_us,
            active_us = excluded.active_us
    )
"""  # noqa: S608 - our own text


def listed_parameters(
    listings: Sequence[tuple[Tail, Listing | None]],
) -> tuple[dict[str, object], bool, bool]:
    """Return the parameters of these listings, whether some are recent, and whether some are not.

    There is an entry for each conversation that the statement appends to. Each tail notes the
    contents of its row in `listing` after the statement.
    """
    places: list[object] = []
    numbers: list[str] = []
    texts: list[str] = []
    listed: list[Sequence[Any]] = []
    for tail, listing in listings:
        place: object = "NULL"
        if listing is not None:
            columns = listing_columns(tail.name, listing)
            seq, owner, status, created_us, active_us, labels, payload, seal = columns
            fixed = (owner, created_us, labels)
            if fixed == tail.listed:
                numbers.append(array((seq, created_us, active_us, seal)))
                texts.append(text_array((owner, status, labels, payload)))
                place = len(numbers)
            else:
                listed.append((tail.number, tail.name, *columns))
                tail.listed = fixed
        places.append(place)
    found: dict[str, object] = {}
    if numbers:
        found = {
            "r_places": array(places),
            "r_numbers": array(numbers),
            "r_texts": array(texts),
        }
    if listed:
        ids, names, seqs, owners, statuses, created, active, all_labels, payloads, seals = zip(
            *listed, strict=True
        )
        found |= {
            "l_ids": Numbers(ids),
            "l_names": text_array(names),
            "l_seqs": Numbers(seqs),
            "l_owners": text_array(owners),
            "l_statuses": text_array(statuses),
            "l_created": Numbers(created),
            "l_active": Numbers(active),
            "l_labels": text_array(all_labels),
            "l_payloads": text_array(payloads),
            "l_seals": Numbers(seals),
        }
    return found, bool(numbers), bool(listed)


def array(values: Iterable[object]) -> str:
    """Return an array in PostgreSQL's notation, of values that need no quotes."""
    return "{" + ",".join(map(str, values)) + "}"


def text_array(values: Sequence[str | None]) -> str:
    """Do the same for texts; psycopg would take three times as long for a few."""
    if values and None not in values:
        text = '","'.join(cast("Sequence[str]", values))
        # All quotes are those between the texts, so none of them needs a backslash.
        if "\\" not in text and text.count('"') == 2 * (len(values) - 1):
            return f'{{"{text}"}}'
    quoted = [
        "NULL" if value is None else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for value in values
    ]
    return "{" + ",".join(quoted) + "}"


_LISTED = ", ".join(f"'{kind}'" for kind in sorted(LISTED_KINDS))
_ROW = f"""
    l.conversation, l.name, l.seq, l.owner, l.status, l.created_us, l.active_us, l.labels,
    l.payload, l.seal, c.head, c.updated_us, c.owner, node.address,
    c.head - l.seq BETWEEN 1 AND {LISTING_AGE_MAX} AND EXISTS (
        SELECT FROM event e
        WHERE e.log = c.log AND e.seq > l.seq AND e.seq <= c.head AND e.kind IN ({_LISTED})
    )
"""
_COLUMNS = ", ".join(f"l.{column}" for column in ("conversation", "name", *_STORED))
# Not as a join, so that few rows are looked up whatever the planner assumes about these tables.
_RECENT = """
    WITH recent AS MATERIALIZED (
        SELECT * FROM listing_recent r WHERE OF_OWNER
            (SELECT l.seq FROM listing l WHERE l.conversation = r.conversation) <= r.seq
    )
"""
_INDEXED_LABEL = "hashtextextended(k.label || E'\\n' || k.value, 0) = hashtextextended(%s, 0)"
_LABELS = "CROSS JOIN LATERAL (SELECT * FROM label WHERE conversation = l.conversation OFFSET 0) k"


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
    """Return the statement that reads `limit` rows of the query's drive, after a key.

    It reads up to `limit` rows of `listing` and up to `limit` recent rows, each in order.
    """
    of_owner, owners = ("", []) if query.owner is None else ("r.owner = %s AND", [query.owner])
    part = drive_range(query, after, "%s", indexed_label=_INDEXED_LABEL)
    tables = "listing l"
    if part.is_by_label:
        tables = "label k JOIN listing l ON l.conversation = k.conversation"
    not_recent = "l.conversation NOT IN (SELECT conversation FROM recent)"
    conditions = " AND ".join(filter(None, (part.conditions, not_recent)))
    folded = f"SELECT {_COLUMNS} FROM {tables} WHERE {conditions} ORDER BY {part.order} LIMIT %s"  # noqa: S608 - our own text
    apart = drive_range(query, after, "%s", is_in_labels=False)
    tables = f"recent l {_LABELS if part.is_by_label else ''}"
    recent = f"SELECT {_COLUMNS} FROM {tables} {apart.where} ORDER BY {apart.order} LIMIT %s"  # noqa: S608 - our own text
    statement = f"""
        {_RECENT.replace("OF_OWNER", of_owner)}
        SELECT {_ROW} FROM (({folded}) UNION ALL ({recent})) l
        JOIN conversation c ON c.id = l.conversation
        LEFT JOIN node ON node.id = c.owner AND node.lease_until > clock_timestamp()
        ORDER BY {apart.order} LIMIT %s
    """  # noqa: S608 - our own text
    values = (*owners, *part.values, limit, *apart.values, limit, limit)
    return statement, values


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
    stored = f"SELECT name, {', '.join(_STORED)}"
    row = connection.execute(
        f"""
        {stored} FROM listing WHERE conversation = %(number)s
        UNION ALL {stored} FROM listing_recent WHERE conversation = %(number)s
        ORDER BY seq DESC LIMIT 1
        """.encode(),
        {"number": number},
    ).fetchone()
    return None if row is None else stored_listing(row[0], row[1:-1], row[-1])


def store_listing(
    connection: psycopg.Connection[Any], number: int, name: str, listing: Listing
) -> None:
    """Write a listing beside the log."""
    erase_listing(connection, number)
    connection.execute(
        "INSERT INTO listing VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (number, name, *listing_columns(name, listing)),
    )
    facts = (listing.owner, name, listing.created_us, listing.active_us)
    for label, value in listing.labels.items():
        connection.execute(
            "INSERT INTO label VALUES (%s, %s, %s, %s, %s, %s, %s)", (number, label, value, *facts)
        )


def erase_listing(connection: psycopg.Connection[Any], number: int) -> None:
    """Remove a conversation from all lists; a rule of the schema removes its recent row too."""
    connection.execute("DELETE FROM label WHERE conversation = %s", (number,))
    connection.execute("DELETE FROM listing WHERE conversation = %s", (number,))


RECENT_LISTINGS_MAX = 256
"""Above this many recent rows, some are folded. Each page of a list reads all recent rows."""
LISTINGS_FOLDED_MAX = 256
"""How many rows are folded at a time, in one transaction, which takes some milliseconds."""
LISTINGS_BETWEEN = 128
"""A process counts the recent rows again when it has written those of this many conversations."""

# Rows at rest first: the others will change again soon. It skips a row that an append is writing,
# so that no append and no fold wait for each other.
_OLDEST = f"""
    SELECT r.conversation FROM listing_recent r JOIN conversation c ON c.id = r.conversation
    ORDER BY r.status NOT IN {AT_REST}, r.active_us
    LIMIT %s FOR NO KEY UPDATE OF c SKIP LOCKED
"""  # noqa: S608 - our own text
# Each statement sees what was committed before the rows were locked.
_FOLD = (
    f"""
    UPDATE listing l SET {", ".join(f"{column} = r.{column}" for column in _STORED)}
    FROM listing_recent r
    WHERE r.conversation = ANY(%s) AND l.conversation = r.conversation AND l.seq <= r.seq
    """,  # noqa: S608 - our own text
    """
    UPDATE label k SET active_us = l.active_us FROM listing l
    WHERE k.conversation = ANY(%s) AND l.conversation = k.conversation
        AND k.active_us <> l.active_us
    """,
    "DELETE FROM listing_recent WHERE conversation = ANY(%s)",
)


def fold_listings(connection: psycopg.Connection[Any]) -> None:
    """Fold the oldest recent rows into `listing` if there are many; call it in a transaction."""
    row = connection.execute("SELECT count(*) FROM listing_recent").fetchone()
    beyond = (row[0] if row else 0) - RECENT_LISTINGS_MAX
    if beyond <= 0:
        return
    found = connection.execute(_OLDEST.encode(), (min(beyond, LISTINGS_FOLDED_MAX),)).fetchall()
    for statement in _FOLD:
        connection.execute(statement.encode(), ([row[0] for row in found],))
