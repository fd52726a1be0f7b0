"""The smallest honest program: durable appends by hand, for this benchmark alone.

It promises what an append of ours promises:

1. A conversation has one owner, and only the owner assigns places to its events.
2. An event is validated by pydantic. One whose id is known is answered with its first place.
3. Its epoch and its place are checked in the transaction that writes it, at FULL.
4. Its checksum covers the checksum of the event before it.
5. Its caller is answered after the commit, or with the error of the commit.

It does not have, and so does not pay for: supervision, such as restarts after an error; rules about
which event may follow which; bounds on its queues, its memory or its waiting; knowledge of ids from
before its start; a view, readers, snapshots, lists; a lease; large events; a close while it works.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol, Self
from zlib import crc32

import anyio
import trio

from turnkeeper.actors.events import Event, encode_event

from ._raw_sqlite import SCHEMA, connect

GROUP_MAX = 1_024
CONVERSATIONS = """
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, head INTEGER NOT NULL, tip INTEGER NOT NULL
);
"""


# --- waiting on either backend --------------------------------------------------------------------


class Answer(Protocol):
    """The place of an event, once it is durable. asyncio's `Future` is one."""

    def set_result(self, place: int, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...
    def __await__(self) -> Generator[object, None, int]: ...


class TrioAnswer:
    """The same on trio."""

    __slots__ = ("_event", "_outcome")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._outcome: int | Exception = 0

    def set_result(self, place: int) -> None:
        self._outcome = place
        self._event.set()

    def set_exception(self, error: Exception) -> None:
        self._outcome = error
        self._event.set()

    def __await__(self) -> Generator[object, None, int]:
        yield from self._event.wait().__await__()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def backend() -> tuple[Callable[[], Answer], Callable[[Callable[[], None]], object]]:
    """Return a function that makes an answer, and one that calls into the running loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return TrioAnswer, trio.lowlevel.current_trio_token().run_sync_soon
    return loop.create_future, loop.call_soon_threadsafe


# --- a conversation -------------------------------------------------------------------------------


class Row(NamedTuple):
    """An event as it goes into the file; its id and checksum are the writer's."""

    log: int
    seq: int
    epoch: int
    event_id: str
    kind: str
    message_id: str | None
    payload: bytes


class Owner:
    """The owner of a conversation, and its mailbox. At most one of its batches is at the writer."""

    def __init__(self, program: Program, log: int) -> None:
        self._program = program
        self._log = log
        self._epoch = 1
        self._head = 0
        self._known: dict[str, int] = {}
        self._mail: deque[tuple[Event, Answer]] = deque()
        self._answers: list[tuple[Answer, int]] = []
        self._is_writing = False

    def append(self, event: Event) -> Awaitable[int]:
        """Append an event; await the result for its place."""
        answer = self._program.new_answer()
        self._mail.append((event, answer))
        if not self._is_writing:
            self._take()
        return answer

    def _take(self) -> None:
        rows = []
        while self._mail:
            event, answer = self._mail.popleft()
            place = self._known.get(event.id)
            if place is None:
                self._head = place = self._known[event.id] = self._head + 1
                message_id = getattr(event, "message_id", None)
                payload = encode_event(event)
                rows.append(
                    Row(self._log, place, self._epoch, event.id, event.kind, message_id, payload)
                )
            self._answers.append((answer, place))
        if rows:
            self._is_writing = True
            self._program.write(self, rows)
        else:
            self.finish(None)  # all of them are known, and durable

    def finish(self, error: Exception | None) -> None:
        """Answer the callers of the batch: it is durable, or it failed."""
        answers, self._answers = self._answers, []
        for answer, place in answers:
            if error is None:
                answer.set_result(place)
            else:
                answer.set_exception(error)
        self._is_writing = False
        if self._mail:
            self._take()


# --- the file -------------------------------------------------------------------------------------


class Writer:
    """Writes groups of rows, each in one commit. Used by one thread."""

    def __init__(self, connection: sqlite3.Connection, conversations: int) -> None:
        connection.executescript(SCHEMA + CONVERSATIONS)
        facts = [(log,) for log in range(conversations)]
        connection.executemany("INSERT INTO conversation VALUES (?, 1, 0, 0)", facts)
        self._execute = connection.execute
        self._last = 0
        self._tips = [0] * conversations

    def commit(self, rows: Sequence[Row]) -> None:
        """Write these rows, if each conversation has the epoch and the place that they expect."""
        values: list[object] = []
        tails: dict[int, tuple[int, int, int, int, int]] = {}
        for log, seq, epoch, event_id, kind, message_id, payload in rows:
            facts = f"{seq} {epoch} {event_id} {kind} {message_id}\0"
            tip = self._tips[log] = crc32(payload, crc32(facts.encode(), self._tips[log]))
            self._last += 1
            values += (self._last, log, seq, epoch, event_id, kind, message_id, tip, payload)
            before = tails[log][3] if log in tails else seq - 1
            tails[log] = (log, epoch, seq, before, tip)
        self._execute("BEGIN IMMEDIATE")
        self._execute(insert(len(rows)), values)
        moved = self._execute(move(len(tails)), [fact for tail in tails.values() for fact in tail])
        if moved.rowcount < len(tails):
            self._execute("ROLLBACK")
            raise RuntimeError("a conversation is not where its owner left it; nothing was written")
        self._execute("COMMIT")


@cache
def insert(rows: int) -> str:
    values = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?)"] * rows)
    return f"INSERT INTO event VALUES {values}"  # noqa: S608 - our own text


@cache
def move(tails: int) -> str:
    """Return the statement that moves tails which are (log, epoch, head, head before, tip)."""
    values = ", ".join(["(?, ?, ?, ?, ?)"] * tails)
    # It begins with UPDATE, because `rowcount` counts nothing else.
    return f"""
        UPDATE conversation SET head = tail.column3, tip = tail.column5
        FROM (VALUES {values}) AS tail
        WHERE id = tail.column1 AND epoch = tail.column2 AND head = tail.column4
    """  # noqa: S608 - our own text


Batch = tuple[Owner, Sequence[Row]]


class Program:
    """Some conversations over one new file: `async with Program(path, 1_000) as program`."""

    def __init__(self, path: Path, conversations: int) -> None:
        self._path = path
        self.owners = [Owner(self, log) for log in range(conversations)]
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        self.new_answer, self._call_in_loop = backend()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._queue.put(None)
        await anyio.to_thread.run_sync(self._thread.join)

    def write(self, owner: Owner, rows: Sequence[Row]) -> None:
        """Queue a batch for writing; its owner is notified when it is done."""
        self._queue.put((owner, rows))

    def _run(self) -> None:
        """Write all that waits in one commit, again and again. Runs in the thread."""
        with closing(connect(self._path, len(self.owners))) as connection:
            writer = Writer(connection, len(self.owners))
            while group := self._next_group():
                try:
                    if self._error is None:
                        writer.commit([row for _, rows in group for row in rows])
                except Exception as error:  # noqa: BLE001 - all callers get it, from now on
                    self._error = error
                self._call_in_loop(partial(self._finish, [owner for owner, _ in group]))

    def _next_group(self) -> Sequence[Batch]:
        group: list[Batch] = []
        batch = self._queue.get()
        try:
            while batch is not None:
                group.append(batch)
                if len(group) == GROUP_MAX:
                    return group
                batch = self._queue.get_nowait()
        except Empty:
            return group
        if group:
            self._queue.put(None)  # the end comes after this group
        return group

    def _finish(self, owners: Sequence[Owner]) -> None:
        for owner in owners:
            owner.finish(self._error)
