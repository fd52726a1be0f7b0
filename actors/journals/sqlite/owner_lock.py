"""The lock that names the process which writes a file: a sidecar, locked in the kernel.

This module owns the rule "one writing process per file". The kernel frees the lock when its process
dies, however it dies, so a restart never waits. A process that is only suspended still holds the
lock; `take_over` alone gets past it, by replacing the sidecar. The lock is politeness. Safety comes
from the generation, which every transaction checks: it makes two writers impossible. The sidecar is
replaced only after the generation has risen, so that a takeover that fails takes nothing away.

The sidecar is never removed, because removing it would race with a process about to lock it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from pathlib import Path

from ...errors import JournalRefused, JournalUnavailable, OwnedElsewhere
from .schema import NO_LINKS, PRIVATE, has_no_file_left, is_full, refusal

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # after the text, which stays readable
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


# A sidecar is the JSON object of one member, so that people can read it.
_BEGIN = b'{"owner": '
# To read a pipe, which another program may have put there, would wait for its writer.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)

_drafts = itertools.count()

# A forked child shares its parent's locks; without this it would hold them after the parent died.
_held: set[int] = set()


def _let_go_in_child() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


class OwnerLock:
    """Held from `try_acquire` or `take_over` until `release`, or until the process ends.

    `prepare_takeover` alone takes nothing from the holder.
    """

    def __init__(self, path: Path, owner: str) -> None:
        self._owned = path
        self._sidecar = Path(f"{path}-owner")
        self.owner = owner
        """The name that other processes read while this one has the lock."""
        self.taken_from: str | None = None
        """The name of the holder that was shut out, if one was."""
        self.is_prepared = False
        """True from `prepare_takeover` until `take_over`, unless the lock was free."""
        self._descriptor: int | None = None
        # The sidecar that is to replace that of the holder.
        self._draft: Path | None = None
        self._holder = ""

    def try_acquire(self) -> None:
        """Take the lock. Raises `OwnedElsewhere` if another process, or another journal, has it.

        Raises `JournalRefused` if another program has a file where the sidecar belongs.
        """
        while self._descriptor is None:
            descriptor = self._open(self._sidecar)
            try:
                _lock(descriptor)
            except (BlockingIOError, PermissionError) as error:
                os.close(descriptor)
                raise self._owned_elsewhere() from error
            except OSError as error:
                os.close(descriptor)
                raise JournalRefused(
                    f"{self._owned} cannot be locked: {error}; nothing was changed; put the "
                    "journal on a local disk"
                ) from error
            if not self._is_in_place(descriptor):
                os.close(descriptor)  # another process took over between our open and our lock
                continue
            try:
                self._check_is_sidecar()
            except BaseException:
                os.close(descriptor)
                raise
            self._keep(descriptor)

    def is_held(self) -> bool:
        """Return True if a process that is alive has the file open for writing.

        To check, it takes a shared lock for a moment; a file that cannot be locked counts as not
        held.
        """
        if sys.platform == "win32":
            return False
        try:
            descriptor = os.open(self._sidecar, os.O_RDONLY | NO_LINKS)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def prepare_takeover(self) -> None:
        """Take the lock if it is free; otherwise note its holder, from which it may be taken over.

        Raises `JournalRefused` as `try_acquire` does.
        """
        try:
            self.try_acquire()
        except OwnedElsewhere as elsewhere:
            self._check_is_sidecar()
            self._holder = elsewhere.owner
            self.is_prepared = True

    def draft(self) -> None:
        """Make the sidecar that `take_over` puts in place, if the lock was not free.

        Raises `JournalRefused` or `JournalUnavailable` if that is not possible. A process that is
        killed before `take_over` leaves it behind, so call this shortly before.
        """
        if not self.is_prepared:
            return
        draft, descriptor = self._open_draft()
        try:
            _lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise JournalRefused(
                f"{self._owned} cannot be taken over: {error}; nothing was changed"
            ) from error
        self._draft = draft
        self._keep(descriptor)

    def note_shut_out(self) -> None:
        """Note that the generation has risen, so that the next write of the holder is refused."""
        if self.is_prepared:
            self.taken_from = self._holder

    def take_over(self) -> None:
        """Take the lock from its holder, if it was not free."""
        if self._draft is not None:
            self._draft.replace(self._sidecar)
            self._draft = None
            self.is_prepared = False

    def check(self) -> None:
        """Raise `OwnedElsewhere` if another process has taken over. Thread-safe.

        If the sidecar was removed, the generation in the file still protects it.
        """
        descriptor = self._descriptor
        if descriptor is None:
            return
        try:
            is_ours = os.path.samestat(os.fstat(descriptor), self._sidecar.stat())
        except OSError:
            return  # it was removed, or is being released
        if not is_ours:
            raise self._owned_elsewhere()

    def release(self) -> None:
        """Release the lock, if it is held. Thread-safe: a call that was given up may be late."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                _held.remove(descriptor)
            except KeyError:
                return  # another thread closes it, or, in a forked process, has closed it
            os.close(descriptor)
            draft, self._draft = self._draft, None
            if draft is not None:
                with contextlib.suppress(OSError):
                    draft.unlink()

    def _keep(self, descriptor: int) -> None:
        _held.add(descriptor)  # first: `release` takes it out
        self._descriptor = descriptor
        # The name is only for error messages; the lock holds without it, for example on a full
        # disk.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, _BEGIN + json.dumps(self.owner).encode() + b"}")

    def _open_draft(self) -> tuple[Path, int]:
        # A file of this name may be that of a process with the same number, which was killed, or
        # which is alive in another container.
        while True:
            draft = Path(f"{self._sidecar}-{os.getpid()}-{next(_drafts)}")
            with contextlib.suppress(FileExistsError):
                return draft, self._open(draft, os.O_EXCL)

    def _open(self, sidecar: Path, flags: int = 0) -> int:
        try:
            return os.open(sidecar, os.O_RDWR | os.O_CREAT | NO_LINKS | flags, PRIVATE)
        except FileExistsError:
            raise  # only with O_EXCL
        except FileNotFoundError as error:
            raise JournalRefused(
                f"{self._owned} cannot be opened for writing: there is no folder "
                f"{sidecar.parent}; nothing was changed; make the folder, or check the path"
            ) from error
        except OSError as error:
            if has_no_file_left(error):
                raise refusal(self._owned, error) from error
            if is_full(error):
                raise JournalUnavailable(
                    f"{self._owned} cannot be opened for writing: {error}; nothing was changed; "
                    "make room on the disk"
                ) from error
            raise JournalRefused(
                f"{self._owned} cannot be opened for writing: {error}; nothing was changed; "
                "check the folder and its permissions, or open it read-only"
            ) from error

    def _check_is_sidecar(self) -> None:
        """Raise `JournalRefused` if another program has a file where the sidecar belongs."""
        try:
            descriptor = os.open(self._sidecar, os.O_RDONLY | _NO_WAIT)
            try:
                begin = os.read(descriptor, len(_BEGIN))
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return
        except OSError as error:
            if has_no_file_left(error):
                raise refusal(self._owned, error) from error
            raise JournalRefused(
                f"{self._owned} cannot be opened for writing: {error}; nothing was changed; check "
                "the permissions of this file"
            ) from error
        # A power failure may leave zeros in a new file, and a full disk only its beginning.
        if not _BEGIN.startswith(begin.rstrip(b"\0")):
            raise JournalRefused(
                f"{self._owned} cannot be opened for writing: {self._sidecar} is another program's "
                "file; nothing was changed; give one of the two another name"
            )

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._sidecar.stat())
        except FileNotFoundError:
            return False

    def _owned_elsewhere(self) -> OwnedElsewhere:
        return OwnedElsewhere(f"journal {self._owned}", self._read_owner(), is_file=True)

    def _read_owner(self) -> str:
        try:
            return str(json.loads(self._sidecar.read_bytes())["owner"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"  # its owner has not written its name yet
