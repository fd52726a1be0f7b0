"""The table of those that have none: an empty dict that all share, and that refuses to be filled.

An active conversation has a dozen tables, most of them empty for as long as it lives. A dict of its
own takes 64 bytes for each. So its folds begin with this one, and make their own when they put the
first entry into it.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

__all__ = ["NO_TABLE"]


class _NoTable(dict[Any, Any]):  # Any: it stands for tables of every type
    def __setitem__(self, key: object, value: object, /) -> NoReturn:
        raise AssertionError(f"{key} would be put into the table of all: {value}")

    def setdefault(self, key: object, default: object = None, /) -> NoReturn:
        raise AssertionError(f"{key} would be put into the table of all: {default}")

    def update(self, *args: object, **entries: object) -> NoReturn:
        raise AssertionError(f"{args} and {entries} would be put into the table of all")


NO_TABLE: Final[dict[Any, Any]] = _NoTable()
