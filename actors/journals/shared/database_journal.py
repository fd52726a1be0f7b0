"""The part of the port that is the same for every database: each call is a job for a thread.

A journal over a database inherits this class, and implements how a job gets to its writing and its
reading thread. It also implements the parts that differ: claims, forks, deletions, complete lists,
and waiting.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from anyio.lowlevel import checkpoint

from ...journal import (
    READ_BYTES,
    ConversationInfo,
    Listing,
    ListPage,
    ListQuery,
    Record,
    Rejection,
    Snapshot,
    StoredRecord,
)
from .append_rules import Append
from .job_thread import Job
from .limits import check_asked, check_page, check_snapshot, checked_rejections

__all__ = ["DatabaseJournal", "LogReader", "LogWriter", "process_name", "sorted_by_id"]

T = TypeVar("T")


class LogReader(Protocol):
    """The reads of a database, each as of one moment; they run in the reading thread."""

    def read(
        self, name: str, after: int, limit: int, bytes_max: int, /
    ) -> Sequence[StoredRecord]: ...
    def heads(self, names: Sequence[str], /) -> Mapping[str, int]: ...
    def info(self, name: str, /) -> ConversationInfo: ...
    def page(self, query: ListQuery, /) -> ListPage: ...
    def find_events(self, name: str, event_ids: Sequence[str], /) -> Mapping[str, int]: ...
    def find_messages(self, name: str, message_ids: Sequence[str], /) -> Mapping[str, int]: ...
    def rejections(self, name: str, /) -> Sequence[Rejection]: ...
    def read_snapshot(self, name: str, /) -> Snapshot | None: ...


class LogWriter(Protocol):
    """The writes beside the log; they run in the writing thread, in its transaction."""

    def reject(self, name: str, rejections: Sequence[Rejection], epoch: int, /) -> None: ...
    def write_listing(self, name: str, listing: Listing, epoch: int, /) -> None: ...
    def write_snapshot(self, name: str, snapshot: Snapshot, epoch: int, /) -> None: ...


def process_name() -> str:
    """Return the name that the errors of other processes give to this one if it has no address.

    Journals call this when they are entered, because a process may be forked after it made one.
    """
    return f"process {os.getpid()} on {socket.gethostname()}"


_SORTED_AT_ONCE = 10_000  # some milliseconds
_SAMPLES = 10


async def sorted_by_id(infos: Sequence[ConversationInfo]) -> Sequence[ConversationInfo]:
    """Return these in the order of their ids, without blocking the loop: a million take a second.

    They are partitioned by a sample of the ids, and each part is sorted separately.
    """
    if len(infos) <= _SORTED_AT_ONCE:
        return sorted(infos, key=_id_of)
    samples = sorted(_id_of(info) for info in infos[:: _SORTED_AT_ONCE // _SAMPLES])
    bounds = samples[_SAMPLES::_SAMPLES]
    parts: list[list[ConversationInfo]] = [[] for _ in range(len(bounds) + 1)]
    for at, info in enumerate(infos):
        parts[bisect(bounds, info.conversation_id)].append(info)
        if not at % _SORTED_AT_ONCE:
            await checkpoint()
    found: list[ConversationInfo] = []
    for part in parts:
        found += sorted(part, key=_id_of)
        await checkpoint()
    return found


def _id_of(info: ConversationInfo) -> str:
    return info.conversation_id


class DatabaseJournal:
    """Base class; implement `_submit`, `_change`, `_read` and `_refuse_if_search_is_off`."""

    def _refuse_if_search_is_off(self) -> None:
        """Raise `SearchIsOff` unless this journal was opened with search."""
        raise NotImplementedError

    def _submit(self, job: Job[T]) -> Awaitable[T]:
        """Give a job to the writing thread; raises if this journal may not write."""
        raise NotImplementedError

    async def _change(self, apply: Callable[[LogWriter], T], size: int = 0) -> T:
        """Run a write of `size` bytes in the writing thread; return its result."""
        raise NotImplementedError

    async def _read(self, apply: Callable[[LogReader], T]) -> T:
        """Run a read in the reading thread; return its result."""
        raise NotImplementedError

    def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Awaitable[Sequence[int]]:
        if not records:
            raise ValueError("an append of zero records")
        check_asked(conversation_id)
        return self._submit(
            Append(conversation_id, records, epoch, expected_seq, is_unfinished, listing)
        )

    async def read(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        limit: int = 512,
        bytes_max: int = READ_BYTES,
    ) -> Sequence[StoredRecord]:
        check_asked(conversation_id)
        check_page(after, limit, bytes_max)
        return await self._read(
            lambda reader: reader.read(conversation_id, after, limit, bytes_max)
        )

    async def info(self, conversation_id: str) -> ConversationInfo:
        check_asked(conversation_id)
        return await self._read(lambda reader: reader.info(conversation_id))

    async def page(self, query: ListQuery) -> ListPage:
        return await self._read(lambda reader: reader.page(query))

    async def write_listing(self, conversation_id: str, listing: Listing, *, epoch: int) -> None:
        await self._change(
            lambda writer: writer.write_listing(conversation_id, listing, epoch),
            len(listing.payload),
        )

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        check_asked(conversation_id, event_ids)
        return await self._read(lambda reader: reader.find_events(conversation_id, event_ids))

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        check_asked(conversation_id, message_ids)
        return await self._read(lambda reader: reader.find_messages(conversation_id, message_ids))

    async def reject(
        self, conversation_id: str, rejections: Sequence[Rejection], *, epoch: int
    ) -> None:
        check_asked(conversation_id)
        checked = checked_rejections(rejections)
        await self._change(
            lambda writer: writer.reject(conversation_id, checked, epoch),
            sum(len(rejection.payload) for rejection in rejections),
        )

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        check_asked(conversation_id)
        return await self._read(lambda reader: reader.rejections(conversation_id))

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        check_asked(conversation_id)
        check_snapshot(snapshot)
        await self._change(
            lambda writer: writer.write_snapshot(conversation_id, snapshot, epoch),
            len(snapshot.payload),
        )

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        check_asked(conversation_id)
        return await self._read(lambda reader: reader.read_snapshot(conversation_id))

    async def _heads(self, names: Sequence[str]) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.heads(names))
