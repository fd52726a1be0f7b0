"""Refuses to open a file that was open when this process was forked.

Owns the list of open connections. SQLite keeps a process's locks in a table of its own, which a
forked child has, too; but the locks themselves stay with the parent. A child that opened the file
again would so believe that it has the locks already, and take none. Once the parent has closed the
file, any program that reads it takes itself for the last one that has it open, and deletes the
write-ahead log to which the child writes.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from weakref import WeakKeyDictionary

from ...errors import JournalRefused


class KnownConnection(sqlite3.Connection):
    """A connection that is in the list until it is closed; `note` adds it."""

    def close(self) -> None:
        # Closing may copy the log into the file, which takes a while: until then it has its locks.
        super().close()
        _open.pop(self, None)


_open: WeakKeyDictionary[KnownConnection, Path] = WeakKeyDictionary()
# Those of the parent process. They are kept, because a child must not close them.
_inherited: dict[KnownConnection, Path] = {}


def _inherit() -> None:
    _inherited.update(_open)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def note(connection: KnownConnection, path: Path) -> None:
    """Note that this connection to a file takes locks."""
    _open[connection] = path


def refuse_inherited(path: Path) -> None:
    """Raise `JournalRefused` if the file was open when this process was forked."""
    if path in _inherited.values():
        raise JournalRefused(
            f"{path} cannot be opened: it was open when this process was forked, and the locks on "
            "it do not survive a fork; nothing was changed; fork before it is opened, or start "
            "processes with the method `spawn`"
        )
