"""Pages of a list, the same for every journal.

A journal can walk a few sets of listings in order, called *drives*: all listings, those of one
owner, and those of one owner with a status or a label. `fill_page` takes the drive that fits best,
walks it in order, and skips the rows that the rest of the query excludes; it reads `scan_max` rows
at most. The user is always part of the drive, so the conversations of other users are never read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from zlib import crc32

from ...journal import AT_REST, LISTING_AGE_MAX, Listing, ListPage, ListQuery, ListRow

__all__ = [
    "Drive",
    "DriveRange",
    "ListKey",
    "bare_listing",
    "drive_of",
    "drive_range",
    "fill_page",
    "is_surely_stale",
    "labels_text",
    "listing_columns",
    "listing_seal",
    "stored_listing",
]

ListKey = Sequence[str | int]
"""The place of a row in the order of a query: the values that the order compares."""

Drive = Literal["all", "owner", "status", "label"]

_SCANNED_AT_ONCE = 256


def drive_of(query: ListQuery) -> Drive:
    """Return the narrowest set of rows that a journal has in the order of this query."""
    if query.owner is None:
        return "all"
    if query.label is not None:
        return "label"
    if query.status is not None and query.status not in AT_REST:
        return "status"
    return "owner"


def _is_wanted(row: ListRow, query: ListQuery) -> bool:
    listing = row.listing
    return (
        row.conversation_id.startswith(query.prefix)
        and (query.status is None or listing.status == query.status)
        and (query.label is None or listing.labels.get(query.label[0]) == query.label[1])
    )


class _Found(NamedTuple):
    row: ListRow
    key: ListKey


def fill_page(
    query: ListQuery, fetch: Callable[[ListKey | None, int], Sequence[tuple[ListRow, ListKey]]]
) -> ListPage:
    """Return a page. `fetch(after, limit)` returns rows of the drive after a key, in order."""
    drive = drive_of(query)
    has_rest = (
        (query.prefix and query.order != "id")
        or (query.status is not None and drive != "status")
        or (query.label is not None and drive != "label")
    )
    if not has_rest:
        found = fetch(query.after, query.limit + 1)
        page = [row for row, _ in found[: query.limit]]
        return ListPage(page, found[query.limit - 1][1] if len(found) > query.limit else None)
    at_once = min(_SCANNED_AT_ONCE, query.scan_max)
    rows: list[_Found] = []
    after, looked_at = query.after, 0
    while True:
        found = fetch(after, at_once)
        for row, key in found:
            if _is_wanted(row, query):
                if len(rows) == query.limit:
                    return ListPage([one.row for one in rows], rows[-1].key)
                rows.append(_Found(row, key))
            after = key
        looked_at += len(found)
        if len(found) < at_once:
            return ListPage([one.row for one in rows], None)
        if looked_at >= query.scan_max:
            return ListPage([one.row for one in rows], after, is_complete=False)


def _behind_prefix(prefix: str) -> str | None:
    """Return the first text after all texts that begin with this one; None if there is none.

    The order is by code points, as for ids in every journal.
    """
    for at in range(len(prefix) - 1, -1, -1):
        behind = chr(min(ord(prefix[at]) + 1, sys.maxunicode))
        if behind != prefix[at]:
            # Surrogates are not characters.
            return prefix[:at] + ("\ue000" if "\ud800" <= behind <= "\udfff" else behind)
    return None


def is_surely_stale(listing: Listing, head: int) -> bool | None:
    """Return whether a listing is stale, or None if that depends on the kinds of later records."""
    if not listing.seq or not 0 <= head - listing.seq < LISTING_AGE_MAX:
        return True
    return False if listing.seq == head else None


# --- listings in databases ------------------------------------------------------------------------


class DriveRange(NamedTuple):
    """The rows of a query's drive after a key, in order, as parts of an SQL statement."""

    is_by_label: bool
    """True if it walks the labels (`k`, which have a listing's columns too) instead of the listings
    (`l`)."""
    conditions: str
    """Empty, or behind a WHERE."""
    order: str
    values: Sequence[object]

    @property
    def where(self) -> str:
        """The clause of these conditions."""
        return f"WHERE {self.conditions}" if self.conditions else ""


def drive_range(
    query: ListQuery,
    after: ListKey | None,
    mark: str,
    *,
    is_in_labels: bool = True,
    indexed_label: str = "",
) -> DriveRange:
    """Return the range; `mark` is the placeholder for a value in the database's SQL.

    The rows of a label are walked in the order of the labels or of the listings. `indexed_label`: a
    condition on one value, the label's name and value in two lines, if the indexes have a function
    of these two.
    """
    drive = drive_of(query)
    of = "k" if drive == "label" and is_in_labels else "l"
    conditions: list[str] = []
    values: list[object] = []
    if drive != "all":
        conditions.append(f"{of}.owner = {mark}")
        values.append(query.owner)
    if drive == "status":
        conditions.append(f"l.status = {mark} AND l.status NOT IN ('idle', 'finished')")
        values.append(query.status)
    if drive == "label" and query.label is not None:
        if indexed_label:
            conditions.append(indexed_label)
            values.append("\n".join(query.label))
        conditions.append(f"k.label = {mark} AND k.value = {mark}")
        values += query.label
    if query.order == "id":
        order = f"{of}.name"
        if after is not None:
            conditions.append(f"{of}.name > {mark}")
            values.append(after[0])
        if query.prefix:
            conditions.append(f"{of}.name >= {mark}")
            values.append(query.prefix)
            if (behind := _behind_prefix(query.prefix)) is not None:
                conditions.append(f"{of}.name < {mark}")
                values.append(behind)
    else:
        column = f"{of}.{'created' if query.order == 'created' else 'active'}_us"
        down, beyond = ("", ">") if query.order == "created" else (" DESC", "<")
        order = f"{column}{down}, {of}.conversation{down}"
        if after is not None:
            conditions.append(f"({column}, {of}.conversation) {beyond} ({mark}, {mark})")
            values += after
    return DriveRange(drive == "label", " AND ".join(conditions), order, values)


def bare_listing(now_us: int) -> Listing:
    """Return the listing of a conversation that was written, if nothing else is known about it."""
    return Listing(0, created_us=now_us, active_us=now_us)


def labels_text(listing: Listing) -> str:
    """Return the labels as JSON; equal labels give equal JSON."""
    if not listing.labels:
        return "{}"
    return json.dumps(dict(sorted(listing.labels.items())), ensure_ascii=False)


def listing_columns(name: str, listing: Listing) -> tuple[Any, ...]:
    """Return the columns in which a listing is stored, from the seq to the seal."""
    labels = labels_text(listing)
    seq, owner, status, created_us, active_us, _, payload = listing
    seal = listing_seal(name, listing, labels)
    return (seq, owner, status, created_us, active_us, labels, payload, seal)


def listing_seal(name: str, listing: Listing, labels: str) -> int:
    """Return the checksum of a stored listing."""
    seq, owner, status, created_us, active_us, _, payload = listing
    facts = f"{name}\0{seq} {owner}\0{status}\0{created_us} {active_us}\0{labels}\0{payload}"
    return crc32(facts.encode())


def stored_listing(name: str, facts: Sequence[Any], seal: object) -> Listing:
    """Return a stored listing; if it fails its checksum, an empty one.

    `facts` are its columns, from the seq to the payload.
    """
    seq, owner, status, created_us, active_us, labels, payload = facts
    if not seq:
        return Listing(0, created_us=created_us, active_us=active_us)
    try:
        by_name: Mapping[str, str] = json.loads(labels) if labels != "{}" else {}
        # The same as `Listing(*columns)`, in two thirds of the time.
        columns = (seq, owner, status, created_us, active_us, by_name, payload)
        listing = tuple.__new__(Listing, columns)
        if listing_seal(name, listing, labels) == seal:
            return listing
    except (ValueError, TypeError):
        pass
    return Listing(0)
