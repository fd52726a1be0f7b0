"""The lock that says which process writes a file: a sidecar, locked in the kernel.

Owns the rule "one writing process per file". The kernel frees the lock when its process dies,
however it dies, so a restart never waits. A process that is merely stopped still holds it; only
`take_over` goes past it, by putting another sidecar in its place. The lock is politeness: what
makes two writers impossible is the generation, which every transaction checks.

The sidecar is never removed, since removing it races with whoever is about to lock it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from .errors import JournalRefused, OwnedElsewhere

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # behind the text, which stays readable
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


# A forked child shares its parent's locks; without this it would keep them after the parent's end.
_held: set[int] = set()


def _let_go_in_child() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


class OwnerLock:
    """Held from `try_acquire` or `take_over` until `release`, or until the process ends."""

    def __init__(self, path: Path, owner: str) -> None:
        self._owned = path
        self._sidecar = Path(f"{path}-owner")
        self._owner = owner
        self._descriptor: int | None = None

    def try_acquire(self) -> None:
        """Raises `OwnedElsewhere` when another process, or another journal here, has it."""
        while self._descriptor is None:
            descriptor = self._open(self._sidecar)
            try:
                _lock(descriptor)
            except (BlockingIOError, PermissionError) as error:
                os.close(descriptor)
                raise OwnedElsewhere(f"journal {self._owned}", self._read_owner()) from error
            except OSError as error:
                os.close(descriptor)
                raise JournalRefused(
                    f"{self._owned} cannot be locked: {error}; nothing was changed; put the "
                    "journal on a local disk"
                ) from error
            if self._is_in_place(descriptor):
                self._keep(descriptor)
            else:
                os.close(descriptor)  # taken over by somebody between our open and our lock

    def take_over(self) -> None:
        """Own the file whoever holds it now; they lose it with their next write."""
        draft = Path(f"{self._sidecar}-{os.getpid()}")
        descriptor = self._open(draft)
        try:
            _lock(descriptor)
            draft.replace(self._sidecar)
        except OSError as error:
            os.close(descriptor)
            raise JournalRefused(
                f"{self._owned} cannot be taken over: {error}; nothing was changed"
            ) from error
        self._keep(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(descriptor)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps({"owner": self._owner}).encode())

    def _open(self, sidecar: Path) -> int:
        try:
            return os.open(sidecar, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise JournalRefused(
                f"{self._owned} cannot be opened for writing: {error}; nothing was changed; "
                "check the folder and its permissions, or open it read-only"
            ) from error

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._sidecar.stat())
        except FileNotFoundError:
            return False

    def _read_owner(self) -> str:
        try:
            return str(json.loads(self._sidecar.read_bytes())["owner"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"  # it has only just begun to own it
