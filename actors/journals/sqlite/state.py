"""A conversation's state for synchronous code: in memory, or over a SQLite journal.

A state owns one log and its folds. `append_event` checks an event, stores it and folds it. With a
folder it returns when the event is durable; `conversations.db` in that folder is an ordinary
journal file.

It promises: an append that has returned is durable, so the program may end at once. Until the first
append or `save`, the file is only read; the first append claims the next epoch, as any owner does.
Of two states of one conversation, the one that claimed the later epoch shuts the other out.

It does not run agents. Only one thread at a time may use a state, which has no locks; a view that
it returned never changes and may be passed anywhere. For each journal file there is one event loop
in a daemon thread, which all states over that file in this process share.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal, Protocol, Self, TypeVar, overload

import anyio

from turnkeeper.runtime import OwnershipLost, Ports, Refused
from turnkeeper.runtime.lowlevel import NoAnswer, ThreadCalls, ThreadOneShot, thread_caller

from ...core.admission import (
    AdmissionRefused,
    Appended,
    AppendResult,
    Duplicate,
    Rejected,
    Violation,
)
from ...core.metrics import Metrics
from ...core.records import decode_record, encode_record, write_event
from ...core.state import ColdLoad, Folded
from ...core.status import AgentExecutionStatus
from ...core.turn_table import TurnTable
from ...core.view import View
from ...errors import (
    ConversationNotFound,
    EventIdConflict,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    MessageIdConflict,
)
from ...events import (
    ActionEvent,
    CondensationEvent,
    Event,
    LLMConvertibleEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    Task,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    is_seen_by_model,
)
from ...journal import READ_PAGE, Snapshot, StoredRecord
from ...values.text import check_bool
from .journal import SQLiteJournal
from .schema import real_path

__all__ = ["ConversationState"]

T = TypeVar("T")

_FILE_NAME = "conversations.db"

# The journal's own bounds end every wait for it long before these.
_START_WAIT_S = 60.0
_CALL_WAIT_S = 600.0
_CLOSE_WAIT_S = 300.0


class ConversationState:
    """The state of a conversation, for synchronous code.

        state = ConversationState()                                        # in memory
        state = ConversationState(persistence_dir="./chats", conversation_id="my-task-123")
        state.append_event(UserMessageEvent(content="Hello, agent!"))
        state.view, state.pending_actions, state.at(3)

    As a context manager it is closed at the end of the outermost `with`. Another `with` opens it
    again.
    """

    def __init__(
        self,
        *,
        persistence_dir: str | PathLike[str] | None = None,
        conversation_id: str = "in-memory",
        admission: Literal["enforce", "observe"] = "enforce",
        ports: Ports | None = None,
    ) -> None:
        """Make an empty state, or open that of a conversation in `persistence_dir`.

        `admission="observe"` admits every event and lists violations in `violations`: use it to
        look at logs that other programs wrote. `ports`: the clocks, ids and threads that it
        uses.
        """
        self.conversation_id = conversation_id
        self.violations: tuple[Violation, ...] = ()
        """The violations of events that were admitted because admission only observes."""
        self._mode = admission
        self._ports = ports or Ports()
        self._folded = Folded()
        # Events that enforcement took out of a foreign log, until the log says so itself.
        self._broken: tuple[str, ...] = ()
        self._is_past = False
        self._depth = 0
        self._log: _Log = (
            _MemoryLog(conversation_id)
            if persistence_dir is None
            else _FileLog(persistence_dir, conversation_id, self._ports)
        )
        try:
            if self._log.exists():
                self._folded, self._broken = self._load()
        except BaseException:  # even an interrupt leaves no thread
            self.close()
            raise

    @classmethod
    def load(
        cls,
        persistence_dir: str | PathLike[str],
        conversation_id: str,
        *,
        ports: Ports | None = None,
    ) -> Self:
        """Open a conversation of the folder `persistence_dir`; only read until the first write.

        Raises `ConversationNotFound`.
        """
        state = cls(persistence_dir=persistence_dir, conversation_id=conversation_id, ports=ports)
        if not state.seq:
            state.close()
            raise ConversationNotFound(conversation_id)
        return state

    def save(self) -> None:
        """Write a snapshot beside the log, which has every event already.

        A snapshot is a cache. None is written while the log needs a repair, which the next append
        makes, or after a violation that admission only observed: the next load then reads the whole
        log.
        """
        is_sound = not self._broken and not self.violations
        self._log.save(self._folded.to_snapshot() if is_sound else None)

    def close(self) -> None:
        """Release the journal file, if there is one. Nothing is lost; a second call is harmless."""
        self._log.close()

    def __enter__(self) -> Self:
        self._depth += 1
        self._log.reopen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.close()

    # --- reading ---------------------------------------------------------------------------------

    @property
    def seq(self) -> int:
        """The position of the last event; 0 before the first."""
        return self._folded.seq

    @property
    def view(self) -> View:
        """The events that the model sees; an immutable snapshot, O(1)."""
        return self._folded.view

    @property
    def agent_execution_status(self) -> AgentExecutionStatus:
        """The execution status of the agent."""
        return self._folded.agent_execution_status

    @property
    def pending_actions(self) -> tuple[ActionEvent, ...]:
        """The tool calls that have no result yet."""
        return self._folded.pending_actions

    @property
    def iteration(self) -> int:
        """The number of steps finished in the running turn, or in the last one."""
        return self._folded.iteration

    @property
    def metrics(self) -> Metrics:
        """The tokens, cost and time of all model calls."""
        return self._folded.metrics

    @property
    def task_list(self) -> tuple[Task, ...]:
        """The agent's task list."""
        return self._folded.task_list

    @property
    def turns(self) -> TurnTable:
        """The running turn, and the chat messages that wait."""
        return self._folded.turns

    @property
    def events(self) -> Sequence[Event]:
        """The log; its events are read from the journal on demand."""
        return _Events(self._log, self.seq)

    @property
    def conversation_history(self) -> tuple[LLMConvertibleEvent, ...]:
        """All events of the log that were ever in the view, even if they were forgotten since."""
        return tuple(filter(is_seen_by_model, self.events))

    def at(self, seq: int) -> ConversationState:
        """Return the state as it was when the log ended at `seq`; it cannot be appended to."""
        if not 0 <= seq <= self.seq:
            raise ValueError(f"seq {seq} is not in 0..{self.seq}")
        past = ConversationState(conversation_id=self.conversation_id, admission=self._mode)
        past._log, past._is_past = self._log, True
        if seq:
            past._folded, past._broken = self._load(seq)
        return past

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConversationState):
            return NotImplemented
        return self._folded == other._folded

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self.conversation_id!r} at seq {self.seq}, "
            f"{self.agent_execution_status}>"
        )

    # --- appending -------------------------------------------------------------------------------

    @overload
    def append_event(
        self, event: Event, *, raises: Literal[True] = True
    ) -> Appended | Duplicate: ...
    @overload
    def append_event(self, event: Event, *, raises: bool) -> AppendResult: ...
    def append_event(self, event: Event, *, raises: bool = True) -> AppendResult:
        """Append one event to the log, if admission allows it.

        If not, raises `AdmissionRefused`, or returns a `Rejected` if `raises` is False. Raises
        `EventIdConflict` if the log has the event's id with other content, and `InvalidInput` if
        `raises` is not a bool.
        """
        check_bool("raises", raises)
        if self._is_past:
            raise JournalRefused(
                f"append refused on conversation {self.conversation_id}: this is its state at seq "
                f"{self.seq} in the past; nothing was written; append to its present state"
            )
        if not self._log.is_owner:
            self._own()
        known = self._log.find(event.id) if event.id <= self._folded.event_id_max else None
        if known is not None:
            if self.events[known - 1] != event:
                raise EventIdConflict(self.conversation_id, {event.id: known})
            return Duplicate(known)
        violation = self._folded.admission.check((event,))
        if violation is not None:
            if self._mode == "observe":
                self.violations = (*self.violations, violation)
            elif raises:
                raise AdmissionRefused(self.conversation_id, violation)
            else:
                return Rejected(violation)
        self._append(event)
        return Appended(self.seq)

    def _own(self) -> None:
        """Open the log as its owner, and fold the events that others wrote meanwhile."""
        head = self._log.own()
        if head > self.seq:
            self._folded.watch()
            for event in self._log.read(self.seq, head):
                self._folded.fold(event)
            if not self._folded.end_watch():
                self._folded, self._broken = self._load(head)
        if self._broken:
            forgotten = CondensationEvent(
                id=self._ports.ids.new(),
                timestamp=datetime.fromtimestamp(self._ports.now(), UTC),
                forgotten_event_ids=self._broken,
            )
            self._append(forgotten)
            self._broken = ()

    def _append(self, event: Event) -> None:
        self._log.append(
            event,
            expected_seq=self.seq + 1,
            is_unfinished=_is_unfinished_after(self.turns, event),
        )
        self._folded.fold(event)

    def _load(self, seq: int | None = None) -> tuple[Folded, tuple[str, ...]]:
        """Read the log up to `seq`; return its folds, and the ids that had to leave the view."""
        snapshot = self._log.read_snapshot()
        folded: Folded | None = None
        if snapshot is not None and (seq is None or snapshot.seq <= seq):
            folded = Folded.from_snapshot(snapshot)
        if folded is None:
            folded = Folded()
        folded.watch()
        for event in self._log.read(folded.seq, seq):
            folded.fold(event)
        if folded.end_watch():
            return folded, ()
        load = ColdLoad()
        for event in self._log.read(0, seq):
            load.fold(event)
        return load.finish()


def _is_unfinished_after(turns: TurnTable, event: Event) -> bool:
    """True if a turn runs, or a chat message waits, once this event is in the log."""
    match event:
        case TurnStartedEvent() | MessageQueuedEvent():
            return True
        case TurnEndedEvent():
            return bool(turns.queued)
        case MessageWithdrawnEvent() | UserMessageEvent():
            return turns.running is not None or bool(turns.queued.keys() - {event.message_id})
        case _:
            return turns.has_open_turns


class _Log(Protocol):
    """The log of one state."""

    @property
    def is_owner(self) -> bool:
        """True if appends are possible; if not, call `own` first."""

    def exists(self) -> bool:
        """True if there is a log to read."""

    def own(self) -> int:
        """Open it for appends; return the seq at which it ends."""

    def append(self, event: Event, *, expected_seq: int, is_unfinished: bool) -> None: ...
    def find(self, event_id: str) -> int | None: ...
    def read(self, after: int, upto: int | None = None) -> Iterator[Event]: ...
    def read_snapshot(self) -> Snapshot | None: ...
    def save(self, snapshot: Snapshot | None) -> None:
        """Write a snapshot, if there is one. Raise `JournalRefused` if there is no journal."""

    def close(self) -> None: ...
    def reopen(self) -> None:
        """Undo `close`, if it was closed."""


class _MemoryLog:
    """A log in memory; it ends with its state."""

    is_owner = True

    def __init__(self, conversation_id: str) -> None:
        self._conversation_id = conversation_id
        self._events: list[Event] = []
        self._seqs: dict[str, int] = {}
        self._message_seqs: dict[str, int] = {}

    def exists(self) -> bool:
        return False

    def reopen(self) -> None:
        """Do nothing: there is no file."""

    def own(self) -> int:
        return len(self._events)

    def append(self, event: Event, *, expected_seq: int, is_unfinished: bool) -> None:  # noqa: ARG002 - the protocol's
        message_id = encode_record(event).message_id
        if message_id in self._message_seqs:
            seq = self._message_seqs[message_id]
            raise MessageIdConflict(self._conversation_id, message_id, seq)
        self._events.append(event)
        self._seqs[event.id] = expected_seq
        if message_id is not None:
            self._message_seqs[message_id] = expected_seq

    def find(self, event_id: str) -> int | None:
        return self._seqs.get(event_id)

    def read(self, after: int, upto: int | None = None) -> Iterator[Event]:
        return iter(self._events[after:upto])

    def read_snapshot(self) -> Snapshot | None:
        return None

    def save(self, snapshot: Snapshot | None) -> None:  # noqa: ARG002 - the protocol's
        raise JournalRefused(
            f"the state of conversation {self._conversation_id} is in memory only; nothing was "
            "saved; give it a persistence_dir"
        )

    def close(self) -> None:
        """Do nothing: there is no file."""


class _Events(Sequence[Event]):
    """The first `length` events of a log, read on demand."""

    def __init__(self, log: _Log, length: int) -> None:
        self._log = log
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Event]:
        return self._log.read(0, self._length)

    @overload
    def __getitem__(self, at: int) -> Event: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Event]: ...
    def __getitem__(self, at: int | slice) -> Event | Sequence[Event]:
        if isinstance(at, slice):
            wanted = range(*at.indices(self._length))
            if not wanted:
                return ()
            low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
            events = tuple(self._log.read(low, high + 1))
            return tuple(events[n - low] for n in wanted)
        if not -self._length <= at < self._length:
            raise IndexError(at)
        at %= self._length
        return next(self._log.read(at, at + 1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none


# The files in use in this process. Invariant: a file is listed from its first user to its last,
# and only the holder of the lock changes the list. The garbage collector may run while it is held,
# so no finalizer takes it. A file is listed, with its user, before its thread is started: so
# whatever interrupts the start, the thread can be ended.
_in_use: dict[Path, _SharedJournal] = {}
_in_use_lock = threading.Lock()


def _begin_anew() -> None:
    """Forget the files of the parent process, in a forked one: their threads are not in it."""
    global _in_use_lock  # noqa: PLW0603 - a thread of the parent's may hold the other one
    _in_use.clear()
    _in_use_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class _SharedJournal:
    """One journal file, with the event loop that it lives in."""

    def __init__(self, path: Path, ports: Ports) -> None:
        self.users: set[object] = set()
        self._path = path
        self._process = os.getpid()
        self._ports = ports
        self._journal: SQLiteJournal | None = None
        self._is_writing = False
        self._ready: ThreadOneShot[None] = ThreadOneShot()
        self.ended: ThreadOneShot[None] = ThreadOneShot()
        self._is_ending = False
        self._call_in_loop: Callable[[Callable[[], None]], object] = lambda _: None

    def start(self) -> None:
        """Start the thread, unless it runs; return once it takes calls."""
        if self._ready.is_done:
            return
        self._ports.start_thread(f"states of {self._path}", self._run)
        has_started = False
        with contextlib.suppress(NoAnswer):
            self._ready.wait(_START_WAIT_S)
            has_started = not self.ended.is_done
        if not has_started:
            raise JournalUnavailable(
                f"no thread could be started for {self._path} within {_START_WAIT_S:g} s; nothing "
                "was done; try again"
            )

    def call(self, ask: Callable[[SQLiteJournal], Awaitable[T]], *, writes: bool = False) -> T:
        """Return the journal's answer, after opening the journal (for writing) if necessary.

        Raises `JournalRefused` in a forked process.
        """
        if os.getpid() != self._process:
            raise JournalRefused(
                f"{self._path} was opened in process {self._process}, and this is process "
                f"{os.getpid()}: its thread does not live on in a forked process; nothing was read "
                "or written; open the state after the fork"
            )
        try:
            return self._calls.call(lambda: self._ask(ask, writes=writes), _CALL_WAIT_S)
        except NoAnswer:
            raise JournalOutcomeUnknown(
                f"{self._path} has not answered within {_CALL_WAIT_S:g} s; it may have happened; "
                "check the disk, start the process again and send the same event"
            ) from None

    def end(self) -> None:
        """Begin to close the file; `ended` is set when that is done. Any thread may call this."""
        self._is_ending = True
        self._call_in_loop(lambda: self._stop.set())  # noqa: PLW0108 - there may be none yet

    def let_go_soon(self, user: object) -> None:
        """Forget this user, later, in the file's thread; this call takes no lock."""
        self._call_in_loop(partial(self._let_go, user))

    def _let_go(self, user: object) -> None:
        _let_go(self._path, user)

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        finally:
            self._ready.set(None)
            self.ended.set(None)

    async def _serve(self) -> None:
        self._opening = anyio.Lock()
        self._stop = anyio.Event()
        async with AsyncExitStack() as self._entered, ThreadCalls() as self._calls:
            self._call_in_loop = thread_caller()
            if self._is_ending:  # before there was a loop to tell
                return
            self._ready.set(None)
            await self._stop.wait()

    async def _ask(self, ask: Callable[[SQLiteJournal], Awaitable[T]], *, writes: bool) -> T:
        async with self._opening:
            journal = await self._opened(writes=writes)
        return await ask(journal)

    async def _opened(self, *, writes: bool) -> SQLiteJournal:
        if self._journal is not None and (self._is_writing or not writes):
            return self._journal
        if writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        journal = SQLiteJournal(self._path, read_only=not writes, ports=self._ports)
        # The read-only journal stays open until the end: other states may be reading by it.
        await self._entered.enter_async_context(journal)
        self._journal, self._is_writing = journal, writes
        return journal


def _use(path: Path, ports: Ports, user: object) -> _SharedJournal:
    with _in_use_lock:
        shared = _in_use.get(path) or _SharedJournal(path, ports)
        shared.users.add(user)
        _in_use[path] = shared
        shared.start()
        return shared


def _let_go(path: Path, user: object) -> bool:
    """Forget a user; return True if it was the last one, and the file is being closed.

    Does nothing if it is no user of the file.
    """
    with _in_use_lock:
        shared = _in_use.get(path)
        if shared is None or user not in shared.users:
            return False
        shared.users.remove(user)
        if shared.users:
            return False
        del _in_use[path]
        shared.end()
        return True


class _FileLog:
    """One conversation of a journal file."""

    def __init__(
        self, persistence_dir: str | PathLike[str], conversation_id: str, ports: Ports
    ) -> None:
        self._conversation_id = conversation_id
        self._path = real_path(Path(persistence_dir) / _FILE_NAME)
        self._epoch: int | None = None
        self._newest_epoch = 0
        """The newest epoch that this state knows, its own or another owner's."""
        self._lost: OwnershipLost | None = None
        self._ports = ports
        self._is_closed = False
        self._shared: _SharedJournal | None = None
        self._user = object()
        """Stands for this log among the users of the file; a finalizer may refer to it."""
        self._if_collected: weakref.finalize[[object], _FileLog] | None = None

    @property
    def is_owner(self) -> bool:
        return self._epoch is not None

    def own(self) -> int:
        """Claim the next epoch; return the seq at which the log ends: older owners are shut out."""
        if self._lost is not None:
            raise self._lost
        claim = self._call(lambda journal: journal.claim(self._conversation_id), writes=True)
        self._epoch = self._newest_epoch = claim.epoch
        return claim.head

    def exists(self) -> bool:
        if not self._path.exists():
            return False
        try:
            self._call(lambda journal: journal.info(self._conversation_id))
        except ConversationNotFound:
            return False
        return True

    def append(self, event: Event, *, expected_seq: int, is_unfinished: bool) -> None:
        """Write an event at the end; it is durable when this returns.

        If the outcome is unknown, this gives the ownership up, so that the next append reads the
        log first. Raises `InvalidInput` for an event that could not be read again.
        """
        written = write_event(event)
        epoch, self._epoch = self._epoch, None
        assert epoch is not None, "append without an epoch"
        try:
            seqs = self._call(
                lambda journal: journal.append(
                    self._conversation_id,
                    [encode_record(event, written)],
                    epoch=epoch,
                    expected_seq=expected_seq,
                    is_unfinished=is_unfinished,
                )
            )
        except OwnershipLost as lost:
            # There is a newer owner; if this state took the conversation back, they would compete.
            self._lost = lost
            raise
        except Refused:
            self._epoch = epoch
            raise
        assert list(seqs) == [expected_seq], (seqs, expected_seq)
        self._epoch = epoch

    def find(self, event_id: str) -> int | None:
        """Return the seq of the event with this id, or None if the log does not have it."""
        try:
            found = self._call(
                lambda journal: journal.find_events(self._conversation_id, [event_id])
            )
        except ConversationNotFound:
            return None  # nothing was appended yet
        return found.get(event_id)

    def read(self, after: int, upto: int | None = None) -> Iterator[Event]:
        """Yield the events after a seq, up to a seq or to the end of the log."""
        if not self._path.exists():
            raise ConversationNotFound(self._conversation_id)
        while upto is None or after < upto:
            limit = READ_PAGE if upto is None else min(READ_PAGE, upto - after)
            page = self._call(partial(self._read_page, after=after, limit=limit))
            if not page:
                return
            for record in page:
                self._newest_epoch = max(self._newest_epoch, record.epoch)
                yield decode_record(self._conversation_id, record).event
            after = page[-1].seq

    async def _read_page(
        self, journal: SQLiteJournal, *, after: int, limit: int
    ) -> Sequence[StoredRecord]:
        return await journal.read(self._conversation_id, after=after, limit=limit)

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot, or None."""
        if not self._path.exists():
            raise ConversationNotFound(self._conversation_id)
        info = self._call(lambda journal: journal.info(self._conversation_id))
        self._newest_epoch = max(self._newest_epoch, info.epoch)
        return self._call(lambda journal: journal.read_snapshot(self._conversation_id))

    def save(self, snapshot: Snapshot | None) -> None:
        """Write a snapshot, if there is one; losing it does no harm."""
        if snapshot is None:
            return
        self._call(
            lambda journal: journal.write_snapshot(
                self._conversation_id, snapshot, epoch=self._newest_epoch
            ),
            writes=True,
        )

    def close(self) -> None:
        """Release the file; if no other state uses it, wait until it is closed."""
        self._is_closed = True
        # Another state may own the conversation when this one is opened again.
        self._epoch = None
        shared = self._shared
        if shared is None:
            return
        is_last = _let_go(self._path, self._user)
        self._shared = None
        if self._if_collected is not None:
            self._if_collected.detach()
        try:
            if is_last:
                shared.ended.wait(_CLOSE_WAIT_S)
        except NoAnswer:
            raise JournalUnavailable(
                f"{self._path} is not closed yet after {_CLOSE_WAIT_S:g} s; nothing is lost; check "
                "the disk"
            ) from None

    def reopen(self) -> None:
        """Undo `close`; the file is opened when it is first used."""
        self._is_closed = False

    def _call(self, ask: Callable[[SQLiteJournal], Awaitable[T]], *, writes: bool = False) -> T:
        """Return the journal's answer. Raise `JournalRefused` if the state is closed."""
        if self._is_closed:
            raise JournalRefused(
                f"the state of conversation {self._conversation_id} is closed; nothing was read or "
                "written; open it again, with `with state:` or by ConversationState.load"
            )
        shared = self._shared or self._open()
        return shared.call(ask, writes=writes)

    def _open(self) -> _SharedJournal:
        try:
            shared = _use(self._path, self._ports, self._user)
            self._if_collected = weakref.finalize(self, shared.let_go_soon, self._user)
            self._if_collected.atexit = False
            self._shared = shared
        except BaseException:  # interrupted, or no thread could be started
            _let_go(self._path, self._user)
            raise
        return shared
