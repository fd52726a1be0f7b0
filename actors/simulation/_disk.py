"""The simulated disk, and the journals over it: the fault model, in prose.

The disk has the contents of a `MemoryStore`, and outlives every node. A *journal* is one node's
access to it. A write is a request to the disk. It lands at one instant of its own, even if its
caller has gone away or its node has crashed meanwhile, and the epoch is checked at that instant. A
call can have these faults:

- `refused`: the disk refuses before anything is written (`JournalUnavailable`).
- `lost`: the answer is lost and nothing was written (`JournalOutcomeUnknown`).
- `unheard`: everything is written, but the answer is lost (`JournalOutcomeUnknown`).
- `broken`: like `unheard` or `lost`, and from then on the journal is closed for writing, as after
an I/O error in a commit; reads go on, and the node must be started again.
- `crash_before`, `crash_after`: the node dies before or after the write.
- `slow`: the call takes seconds. `stuck`: it takes until the disk is healed. `mute`: this call and
  every later one of this journal take until then.

Reads can be refused, slow, stuck and mute.

A journal holds its conversations by a lease that its node's heartbeat renews. Rivals judge the
lease by the disk's clock; its own node judges it by its own monotonic clock, counted from before
the renewal was sent and with a margin. A crashed node's lease simply runs out. With `lock`, there
is a lock instead of a lease: the kernel frees it when the node dies, and a frozen node still holds
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf, nextafter
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import Node, Simulation

from ..errors import Fenced, JournalOutcomeUnknown, JournalUnavailable, OwnedElsewhere
from ..journal import Claim, Deletion, Listing, Record, Snapshot
from ..journals.memory import MemoryJournal, MemoryStore

__all__ = ["Disk", "Fault", "JournalStrike", "SimulatedJournal", "drawn_wait", "linger", "owner_of"]

P = ParamSpec("P")
R = TypeVar("R")

Fault = Literal[
    "refused", "lost", "unheard", "broken", "crash_before", "crash_after", "slow", "stuck", "mute"
]
FAULTS: Sequence[Fault] = get_args(Fault)
READ_FAULTS: Sequence[Fault] = ("refused", "slow", "stuck", "mute")

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

LEASE_S = 10.0
SLOW_S_MAX = 20.0
LOOK_S = 1.0
"""How often a process checks if its lock on the disk was taken over."""
_LEASE_MARGIN = 0.2


@dataclass(frozen=True, slots=True)
class JournalStrike:
    """One fault at one call of the journal: for sweeps."""

    fault: Fault
    call: int
    """The number of the call among all calls, from 1."""


class WatchedStore(MemoryStore):
    """Logs that notify an observer of each write, in the very step in which it lands."""

    def __init__(self) -> None:
        super().__init__()
        self.on_write: Callable[[str], None] = lambda _: None
        """Called with the id of the conversation whose log has changed."""

    def moved(self, conversation_id: str) -> None:
        self.on_write(conversation_id)
        super().moved(conversation_id)

    def forget(self) -> None:
        """Drop all logs."""
        self._logs.clear()


@dataclass(slots=True)
class Disk:
    """The logs, which survive every node, and who may hold them. One for each world."""

    simulation: Simulation
    store: WatchedStore = field(default_factory=WatchedStore)
    has_locks: bool = False
    has_one_shots: bool = True
    """An append returns a `OneShot`, as the journals with threads do, and not a coroutine."""
    strike: JournalStrike | None = None
    fault_chances: dict[Fault, float] = field(default_factory=dict)
    is_healed: bool = False
    calls: int = 0
    granted: dict[tuple[str, int], SimulatedJournal] = field(default_factory=dict)
    """The journal that was given each epoch of each conversation."""
    deletions: Counter[str] = field(default_factory=Counter)
    """How often each conversation was asked to be deleted."""
    lost_by_force: set[tuple[SimulatedJournal, str]] = field(default_factory=set)
    """Each journal and conversation that it lost by force, before its lease had run out."""
    on_fault: Callable[[str], None] = lambda _: None
    """Called with the fault of a call."""
    on_append: Callable[[SimulatedJournal, str, Sequence[Record]], None] = lambda *_: None
    """Called with each append that a process requests, before any fault."""
    on_snapshot: Callable[[str, Snapshot], None] = lambda *_: None
    """Called with each snapshot as it is written."""
    _stuck: list[OneShot[None]] = field(default_factory=list)
    _idle: list[OneShot[Work | None]] = field(default_factory=list)
    """For each of its tasks that waits for work; None ends it."""

    def start_soon(self, work: Work) -> None:
        """Do this in a task of the disk's own, which outlives callers and nodes."""
        # A task takes the next write when it is done: to begin and end one costs as much as most
        # writes do.
        if self._idle:
            self._idle.pop().set(work)
        else:
            self.simulation.start_soon(self._work, work)

    async def _work(self, work: Work | None) -> None:
        while work is not None:
            await work()
            self.simulation.scheduler.renew()
            more: OneShot[Work | None] = OneShot()
            self._idle.append(more)
            work = await more.wait()

    def end(self) -> None:
        """End its tasks that wait for work; for the end of the world, which would cancel them."""
        for more in self._idle:  # to cancel them costs more
            more.set(None)
        self._idle.clear()

    def heal(self) -> None:
        """Cause no faults from now on, and let stuck calls go on."""
        self.is_healed = True
        stuck, self._stuck = self._stuck, []
        for healed in stuck:
            healed.set(None)

    def draw_fault(self, call: str, *, is_write: bool) -> Fault | None:
        """Return the fault of this call, if it has one."""
        self.calls += 1
        strike = self.strike
        if strike is not None:
            return strike.fault if self.calls == strike.call else None
        if self.is_healed or not self.fault_chances:
            return None
        for fault in FAULTS if is_write else READ_FAULTS:
            chance = self.fault_chances.get(fault, 0.0)
            if chance and self.simulation.chance(f"journal {call} {fault}", chance):
                return fault
        return None

    async def be_stuck(self) -> None:
        if not self.is_healed:
            healed: OneShot[None] = OneShot()
            self._stuck.append(healed)
            await healed.wait()


def _call(
    method: Callable[Concatenate[MemoryJournal, P], Coroutine[Any, Any, R]], *, is_write: bool
) -> Callable[Concatenate[SimulatedJournal, P], Coroutine[Any, Any, R]]:
    """Decorate a method so that it is a request to the disk, which may fail."""
    name = method.__name__

    def call(
        self: SimulatedJournal, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        return self.ask(name, partial(method, self, *args, **kwargs), is_write=is_write)

    return call


class SimulatedJournal(MemoryJournal):
    """One node's journal."""

    def __init__(self, disk: Disk, node: Node, *, takeover: bool) -> None:
        super().__init__(disk.store, address=repr(node), ports=node.ports)
        self.node = node
        self.is_broken = False
        """Closed for writing after an I/O error."""
        self.was_frozen = False
        """Its node was suspended."""
        self.is_mute = False
        """It answers nothing until the disk is healed."""
        self.lease_until = disk.simulation.now() + LEASE_S
        """By the disk's clock."""
        self._unbroken_since = node.monotonic()
        self._valid_until = node.monotonic() + LEASE_S * (1 - _LEASE_MARGIN)
        self._disk = disk
        self._takes_over = takeover
        self._is_robbed = False
        """A rival has taken something over by force; noticed at the next check of the disk."""
        self._on_lease_loss: Callable[[], None] = lambda: None

    # --- the lease -------------------------------------------------------------------------------

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        if not self._is_entered:
            return False
        is_valid = self._disk.has_locks or self.node.monotonic() < self._valid_until
        if not is_valid or (since is not None and self._unbroken_since > since):
            self._disk.simulation.mark("lease ran out")
            return False
        return True

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        self._on_lease_loss = on_loss

    @property
    def lost_by_force(self) -> set[tuple[SimulatedJournal, str]]:
        return self._disk.lost_by_force

    def is_held(self) -> bool:
        """Return True if a rival has to respect the lease."""
        if self._disk.has_locks:
            return not self.node.is_crashed and self._is_entered
        return self._is_entered and self._disk.simulation.now() < self.lease_until

    def _is_rival(self, owner: MemoryJournal | None) -> bool:
        # By the disk's clock: the clock and the lock of a crashed node mean nothing.
        return isinstance(owner, SimulatedJournal) and owner is not self and owner.is_held()

    async def keep_lease(self) -> None:
        """Renew the lease, or check the lock, again and again; runs in the node."""
        has_locks = self._disk.has_locks
        while True:
            asked_at = self.node.monotonic()
            await linger(self._disk.simulation, "heartbeat")
            self.renew(asked_at=asked_at)
            await self.node.sleep(LOOK_S if has_locks else LEASE_S / 3)

    def renew(self, *, asked_at: float) -> None:
        """Renew the lease now, as the answer to a request of the time `asked_at`."""
        self.lease_until = self._disk.simulation.now() + LEASE_S
        has_run_out = not self._disk.has_locks and self.node.monotonic() >= self._valid_until
        is_lost = has_run_out or self._is_robbed
        if is_lost:
            # A claim that began at this very time began before the renewal.
            self._unbroken_since = nextafter(self.node.monotonic(), inf)
            self._is_robbed = False
        self._valid_until = asked_at + LEASE_S * (1 - _LEASE_MARGIN)
        if is_lost:
            self._on_lease_loss()

    # --- calls -----------------------------------------------------------------------------------

    async def ask(
        self,
        call: str,
        do: Callable[[], Coroutine[Any, Any, R]],
        *,
        is_write: bool,
        is_detached: bool = False,
    ) -> R:
        """Make one request to the disk. `is_detached`: this task outlives its caller and node."""
        disk, simulation = self._disk, self._disk.simulation
        self.node.check_alive()
        fault = disk.draw_fault(call, is_write=is_write)
        if fault is not None:
            simulation.mark(f"journal {fault}")
            simulation.note(f"{self.node} journal {call}: {fault}")
            disk.on_fault(f"{call} {fault}")
            if fault == "mute":
                self.is_mute = True
        if is_write and self.is_broken:
            raise JournalUnavailable(f"{call}: the journal is closed for writing; nothing was done")
        if fault is not None:
            if fault == "refused":
                await linger(simulation, "refusal")
                raise JournalUnavailable(f"{call}: the disk does not answer; nothing was done")
            if fault == "crash_before":
                await self.node.die()
            if fault == "lost" or (fault == "broken" and simulation.chance("broken before", 0.5)):
                self.is_broken = fault == "broken"
                await linger(simulation, "loss")
                raise JournalOutcomeUnknown(f"{call}: the answer is lost; send again")
        if not is_write:
            await self._wait(fault)
            return await do()
        answer: OneShot[R] = OneShot()
        if is_detached:
            await self._write(fault, do, answer)
        else:
            disk.start_soon(partial(self._write, fault, do, answer))
        try:
            result = await answer.wait()
        finally:
            answer.error = None  # its traceback refers to `_write`, which refers to the answer
        if fault == "crash_after":
            await self.node.die()
        if fault in ("unheard", "broken"):
            self.is_broken = fault == "broken"
            raise JournalOutcomeUnknown(f"{call}: the answer is lost; send again")
        return result

    async def _write(
        self, fault: Fault | None, do: Callable[[], Coroutine[Any, Any, R]], answer: OneShot[R]
    ) -> None:
        await self._wait(fault)
        try:
            result = await do()
        except Exception as error:  # noqa: BLE001 - carried to the caller
            if isinstance(error, Fenced):
                self._disk.simulation.mark("fenced write")
            answer.fail(error)
            return
        # Not by `linger`: most writes do not wait, and need no coroutine for that.
        simulation = self._disk.simulation
        if not self._disk.is_healed and (wait_s := drawn_wait(simulation, "answer", 0.2)):
            await simulation.scheduler.sleep(wait_s)
        answer.set(result)

    async def _wait(self, fault: Fault | None) -> None:
        simulation = self._disk.simulation
        if fault == "slow":
            await simulation.delay("slow disk", 1.0, SLOW_S_MAX)
        elif fault == "stuck" or self.is_mute:
            await self._disk.be_stuck()
        elif not self._disk.is_healed and (wait_s := drawn_wait(simulation, "disk", 0.2)):
            await simulation.scheduler.sleep(wait_s)

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        takeover = takeover or self._takes_over
        claim = partial(self._claim, conversation_id, takeover=takeover, any_name=any_name)
        return await self.ask("claim", claim, is_write=True)

    async def _claim(self, conversation_id: str, *, takeover: bool, any_name: bool) -> Claim:
        disk = self._disk
        self._refuse_if_left()
        log = self._store.log(conversation_id)
        owner = log.owner
        if isinstance(owner, SimulatedJournal) and owner is not self:
            if owner.is_held():
                if not takeover:
                    disk.simulation.mark("owned elsewhere")
                    raise OwnedElsewhere(f"conversation {conversation_id}", owner._address)  # noqa: SLF001 - of this class
                disk.simulation.mark("forced takeover")
                disk.lost_by_force.add((owner, conversation_id))
                owner._is_robbed = True  # noqa: SLF001 - of this class
            else:
                disk.simulation.mark("takeover")
                disk.lost_by_force.discard((owner, conversation_id))
        disk.lost_by_force.discard((self, conversation_id))
        claim = await super().claim(conversation_id, takeover=True, any_name=any_name)
        key = conversation_id, claim.epoch
        disk.simulation.require(
            key not in disk.granted, "O1", f"epoch {claim.epoch} of {conversation_id} twice"
        )
        disk.granted[key] = self
        return claim

    # The port promises only an Awaitable, whatever its base class returns.
    def append(  # type: ignore[override]
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Awaitable[Sequence[int]]:
        self._disk.on_append(self, conversation_id, records)
        do = partial(
            super().append,
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )
        if not self._disk.has_one_shots:
            return self.ask("append", do, is_write=True)
        # As with the journals that have threads, the answer comes from outside all tasks of the
        # node.
        answer: OneShot[Sequence[int]] = OneShot()
        self._disk.start_soon(partial(self._append, do, answer))
        return answer

    async def _append(
        self,
        do: Callable[[], Coroutine[Any, Any, Sequence[int]]],
        answer: OneShot[Sequence[int]],
    ) -> None:
        try:
            answer.set(await self.ask("append", do, is_write=True, is_detached=True))
        except Exception as error:  # noqa: BLE001 - carried to the caller
            answer.fail(error)

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        self._disk.simulation.mark("look-up beyond memory")
        find = partial(super().find_events, conversation_id, event_ids)
        return await self.ask("find_events", find, is_write=False)

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        self._disk.simulation.mark("look-up beyond memory")
        find = partial(super().find_messages, conversation_id, message_ids)
        return await self.ask("find_messages", find, is_write=False)

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        read = partial(super().read_snapshot, conversation_id)
        snapshot = await self.ask("read_snapshot", read, is_write=False)
        if snapshot is None:
            return None
        simulation = self._disk.simulation
        if not self._disk.is_healed and simulation.chance("snapshot of another version", 0.3):
            simulation.mark("snapshot ignored")
            return snapshot._replace(version="of another version")
        simulation.mark("snapshot used")
        return snapshot

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        write = partial(self._write_snapshot, conversation_id, snapshot, epoch=epoch)
        await self.ask("write_snapshot", write, is_write=True)

    async def _write_snapshot(
        self, conversation_id: str, snapshot: Snapshot, *, epoch: int
    ) -> None:
        records, seq = self._store.log(conversation_id).records, snapshot.seq
        if seq <= len(records) and records[seq - 1].epoch == epoch:  # it is of this log
            self._disk.on_snapshot(conversation_id, snapshot)
        await super().write_snapshot(conversation_id, snapshot, epoch=epoch)

    read = _call(MemoryJournal.read, is_write=False)
    info = _call(MemoryJournal.info, is_write=False)
    list = _call(MemoryJournal.list, is_write=False)
    page = _call(MemoryJournal.page, is_write=False)
    write_listing = _call(MemoryJournal.write_listing, is_write=True)
    find_abandoned = _call(MemoryJournal.find_abandoned, is_write=False)
    rejections = _call(MemoryJournal.rejections, is_write=False)
    reject = _call(MemoryJournal.reject, is_write=True)
    fork = _call(MemoryJournal.fork, is_write=True)
    release = _call(MemoryJournal.release, is_write=True)

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        self._disk.deletions[conversation_id] += 1
        delete = partial(super().delete, conversation_id, epoch=epoch)
        return await self.ask("delete", delete, is_write=True)


async def linger(
    simulation: Simulation, label: str, probability: float = 0.3, seconds_max: float = 0.1
) -> None:
    """Wait for a while, now and then; otherwise do not even yield, unlike `Simulation.delay`.

    Use it in places that are followed by a wait anyway: a step that only yields there finds
    nothing.
    """
    if wait_s := drawn_wait(simulation, label, probability, seconds_max):
        await simulation.scheduler.sleep(wait_s)


def drawn_wait(
    simulation: Simulation, label: str, probability: float = 0.3, seconds_max: float = 0.1
) -> float:
    """Draw how long to `linger`, in seconds; mostly 0."""
    tape = simulation.tape
    waits, waits_for = _labels_of(label)
    if not tape.chance(waits, probability):
        return 0.0
    return seconds_max * (1 + tape.draw(waits_for, 100)) / 100


@cache
def _labels_of(label: str) -> tuple[str, str]:
    """Return the labels of a wait: if there is one, and for how long."""
    return f"{label} waits", f"{label} waits for"


def owner_of(store: MemoryStore, conversation_id: str) -> SimulatedJournal | None:
    """Return the journal that holds the newest epoch of a conversation."""
    owner = store.log(conversation_id).owner
    return owner if isinstance(owner, SimulatedJournal) else None
