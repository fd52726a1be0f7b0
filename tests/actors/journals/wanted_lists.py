"""Queries of lists, and what each has to give; for journals that keep some rows apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from turnkeeper.actors.journal import Listing, ListOrder, ListQuery

__all__ = ["QUERIES", "wanted"]

ORDERS: Sequence[ListOrder] = ("id", "created", "activity")
FILTERS: Sequence[Mapping[str, object]] = (
    {},
    {"owner": "a"},
    {"owner": "a", "status": "running"},
    {"owner": "a", "status": "finished"},
    {"owner": "b", "label": ("project", "x")},
    {"owner": "a", "status": "running", "label": ("project", "x")},
)
QUERIES = [
    ListQuery(2, order=order, scan_max=4, **filters)  # type: ignore[arg-type]  # as they are named
    for order, filters in product(ORDERS, FILTERS)
]


def wanted(listed: Mapping[str, Listing], query: ListQuery) -> list[str]:
    """Return the names that the pages of a query have to give, in order."""

    def place(name: str) -> tuple[Any, ...]:
        listing = listed[name]
        created, active = listing.created_us, -listing.active_us
        return {"id": (name,), "created": (created,), "activity": (active,)}[query.order]

    return sorted(
        (
            name
            for name, listing in listed.items()
            if query.owner in {None, listing.owner}
            and query.status in {None, listing.status}
            and (query.label is None or listing.labels.get(query.label[0]) == query.label[1])
        ),
        key=place,
    )
