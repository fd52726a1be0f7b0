"""Upcasters: they bring events that an older version wrote up to this version.

Records are never rewritten. If the shape of a kind has changed, its older records are brought up to
date each time they are read: each step takes the decoded object of one (kind, version) and returns
the object of the next version, or of another kind. The field `version` holds a record's version; a
record without it is of version 1. An event class that is past its first shape declares the field:

    version: Literal[2] = 2

A field added with a default needs no step. The steps are part of a snapshot's version: a new step
makes every older snapshot void.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

__all__ = ["UPCASTERS", "Upcaster", "Upcasters"]

Upcaster: TypeAlias = Callable[[dict[str, object]], dict[str, object]]
"""Takes an object of one shape and returns it in the next; may change its argument."""


class Upcasters:
    """All known steps, by the kind and the version that each starts from."""

    def __init__(self, steps: Mapping[tuple[str, int], Upcaster]) -> None:
        self._steps = dict(steps)
        self.kinds = frozenset(kind for kind, _ in steps)
        self.fingerprint = ",".join(f"{kind}.{version}" for kind, version in sorted(steps))
        """Differs between two sets of steps, and is the same in every process."""

    def apply(self, record: dict[str, object]) -> dict[str, object]:
        """Return the record in its newest shape; each step is taken at most once."""
        taken: set[tuple[str, int]] = set()
        while True:
            kind, version = record.get("kind"), record.get("version", 1)
            if not (isinstance(kind, str) and isinstance(version, int)):
                return record
            step = self._steps.get((kind, version))
            if step is None:
                return record
            if (kind, version) in taken:
                raise ValueError(f"the upcaster of {kind} {version} leads back to itself")
            taken.add((kind, version))
            record = step(record)


UPCASTERS = Upcasters({})
"""The steps of this version: none so far, every event has the shape it began with."""
