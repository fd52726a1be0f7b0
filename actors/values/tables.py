"""An empty dict that folds share as long as they have no entry; it refuses to be filled.

An active conversation has a dozen tables, and most of them stay empty. An empty dict of its own
would take 64 bytes for each. So a fold begins with this one, and makes its own for the first entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

__all__ = ["NO_TABLE", "end_alike"]


class _NoTable(dict[Any, Any]):  # Any: it stands for tables of every type
    def __setitem__(self, key: object, value: object, /) -> NoReturn:
        raise AssertionError(f"{key} would be put into the shared empty table: {value}")

    def setdefault(self, key: object, default: object = None, /) -> NoReturn:
        raise AssertionError(f"{key} would be put into the shared empty table: {default}")

    def update(self, *args: object, **entries: object) -> NoReturn:
        raise AssertionError(f"{args} and {entries} would be put into the shared empty table")


NO_TABLE: Final[dict[Any, Any]] = _NoTable()


def end_alike(one: Sequence[object], other: Sequence[object]) -> bool:
    """True if the shorter sequence is the end of the longer one."""
    count = min(len(one), len(other))
    return one[len(one) - count :] == other[len(other) - count :]
