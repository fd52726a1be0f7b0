"""The conversation world: nodes that serve conversations over one disk, and clients that send.

Each node is the production `Conversations`, unchanged, over a simulated journal. A run has two
phases. In the first phase there are faults; then everything is healed, and all accepted work must
be done in bounded virtual time. Each run draws its kinds of faults and their frequency, so that
each run stresses something else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count, cycle, islice
from typing import Literal, TypeVar, get_args

import anyio

from turnkeeper.runtime import (
    OutcomeUnknown,
    OwnershipLost,
    Refused,
    TooManyRestarts,
    Unavailable,
)
from turnkeeper.runtime.testing import Node, NodeCrashed, NotAnswered, Simulation

from ..agents.agent import Agent
from ..conversations.conversation import Conversation
from ..conversations.conversations import Conversations
from ..conversations.turn import Turn
from ..core.admission import AdmissionRefused
from ..core.commands import OnOverlap
from ..core.condensation import Condenser, RollingCondenser, SummarizingCondenser
from ..core.limits import Limits
from ..core.working_state import PromptPolicy, WhileDraining
from ..errors import (
    ConversationDeleted,
    ConversationNotFound,
    ConversationsClosed,
    Draining,
    MessageNotFound,
    NotReplaceable,
    QueueFull,
    TurnInProgress,
)
from ..events import Event, LoggedEvent, ObservationEvent, TaskListUpdatedEvent
from ..owner.event_reader import EventReader
from ._actors import ActorWorld
from ._agents import (
    SWALLOWS_S,
    CarelessCondenser,
    SimulatedAgent,
    SimulatedToolAgent,
    SummaryModel,
)
from ._disk import (
    FAULTS,
    LEASE_S,
    SLOW_S_MAX,
    Disk,
    Fault,
    JournalStrike,
    SimulatedJournal,
    drawn_wait,
    linger,
    owner_of,
)
from ._histories import HistoryWorld
from ._oracles import Oracles, Sending, ShownAnswer
from ._owner import OwnerWorld
from ._readers import ReaderWorld

__all__ = ["MARKS", "ConversationWorld", "Options", "opening"]

T = TypeVar("T")

OVERLAPS: Sequence[OnOverlap] = get_args(OnOverlap)

Extra = Literal[
    "view", "end", "cancel", "fork", "retract", "read", "follow", "pause", "delete",
    "resume", "confirm", "reject", "answer", "withdraw", "look", "interrupt", "undo",
    "append", "append wrongly",
]  # fmt: skip
EXTRAS: Sequence[Extra] = (
    "view", "end", "cancel", "fork", "retract", "read", "follow", "pause",
    "append", "append wrongly",
)  # fmt: skip
"""The acts of clients in most runs; deletions come only in some."""

SAFETY_S = 60.0
LIVENESS_S = 600.0
QUIET_S = 150.0
"""How long, without faults, nothing may be written while work is left: longer than an agent hangs,
plus its retries."""
_LOOKED_FOR_PROGRESS_S = 10.0
_STEPS_AT_ONCE_MAX = 2_000
"""More steps than any run takes at one virtual time: with more, it must be in an endless loop."""
_TIME_LOOKED_AT_EVERY = 64
"""The steps between two looks at whether time passes."""
STOP_S = 60.0
READ_S_MAX = 3.0
CATCH_UP_S = LEASE_S / 3 + SLOW_S_MAX + READ_S_MAX + 2.0
"""A process that has lost its lease notices it with its next heartbeat, and sends its readers to
the journal. The rest covers the longest answer under way when the disk is healed, a subscriber's
time for an event, and one poll each by the subscriber and the world."""
_OPERATOR_PAUSE_S = 1.0
_APPENDED_AT = datetime(2025, 1, 1, tzinfo=UTC)
_CAUGHT_UP_LOOK_S = 1.0
_CONDENSE_S = 600.0
_SHORT_CONDENSE_S = 0.5
_SLOW_CONDENSERS = ("summary", "careless")
_READERS_END_S = 2.0
"""How long a reader takes to end, or to read a page, if nothing fails."""

MARKS = frozenset(
    {
        *(f"journal {fault}" for fault in FAULTS),
        "fenced write",
        "unknown resolved: it was written",
        "unknown resolved: it was not",
        "orphan call resolved",
        "dedupe hit",
        "queue full",
        "turn in progress",
        "failed too often",
        "condensation",
        "condensation and a crash",
        "condenser too slow",
        "snapshot ignored",
        "snapshot used",
        "subscriber moved to the journal",
        "takeover",
        "forced takeover",
        "owned elsewhere",
        "partial answer kept",
        "turn interrupted",
        "turn failed",
        "turn completed",
        "message replaced",
        "turn taken back",
        "turn found",
        "interrupted by id",
        "message_withdrawn",
        "forked_from",
        "retraction",
        "zombie refused",
        "node restarted",
        "lease ran out",
        "deletion",
        "told of a deletion",
        "reader interrupted",
        "wall clock jumped",
        "look-up beyond memory",
        "drained, messages queue",
        "drained, messages refuse",
        "refused while draining",
        "message kept while draining",
        "interrupted by a drain",
        "went on after a drain",
        "reader ended by a drain",
        "system prompt changed",
        "pinned prompt kept",
    }
)
"""The interesting situations: a campaign that does not reach each of them proves less than it
claims."""


@dataclass(slots=True)
class Options:
    """The options of a run. All of them are drawn; the defaults have no faults."""

    nodes: int = 1
    clients: int = 1
    conversations: int = 1
    messages: int = 3
    overlaps: Sequence[OnOverlap] = OVERLAPS
    has_locks: bool = False
    has_one_shots: bool = True
    has_small_limits: bool = False
    journal_faults: dict[Fault, float] = field(default_factory=dict)
    crashes: bool = False
    freezes: bool = False
    cancels: bool = False
    impatient: bool = False
    resends: bool = False
    misbehaves: bool = False
    off_clocks: bool = False
    takes_over: bool = False
    idle_s: float | None = 300.0
    condenser: str = "none"
    queued_max: int = 256
    verifies: bool = False
    replaces: float = 0.0
    """How often a message replaces an earlier one."""
    extras: Sequence[Extra] = ()
    """The acts of clients besides sending; an act that is listed twice comes twice as often."""
    is_busy: bool = False
    """Clients do not rest."""
    agent: str = "plain"
    pieces_max: int = 4
    """The most pieces of one answer."""
    confirms: bool = False
    unfinished: Literal["end", "resume"] = "end"
    strikes_at_writes: float = 0.0
    """How often a node is struck just after one of its writes has landed."""
    subscribers: int | None = None
    """How many follow a conversation for the whole run; drawn if None."""
    interrupts: float = 0.15
    """How often a subscriber stops waiting for an event, and waits again."""
    drains: bool = False
    """Nodes are drained, and replaced by others of the same name."""
    has_prompts: bool = False
    """Each incarnation of a node draws its system prompt."""
    prompt_policy: PromptPolicy = "current"

    @property
    def is_calm(self) -> bool:
        """True if nothing fails."""
        return not (
            self.journal_faults
            or self.crashes
            or self.freezes
            or self.cancels
            or self.takes_over
            or self.strikes_at_writes
            or self.off_clocks
            or self.drains
        )

    @staticmethod
    def drawn(simulation: Simulation) -> Options:
        """Draw all options of a run."""
        chance, pick = simulation.chance, simulation.pick
        has_faults = not chance("is calm", 0.2)
        heat = pick("heat", (0.02, 0.05, 0.15, 0.5))
        has_journal_faults = has_faults and chance("has journal faults", 0.65)
        return Options(
            nodes=pick("nodes", (1, 1, 2, 2, 3)),
            clients=pick("clients", (1, 2, 2, 3)),
            conversations=pick("conversations", (1, 1, 1, 2)),
            messages=pick("messages", (2, 1, 3, 4)),
            has_locks=chance("has locks", 0.25),
            has_one_shots=not chance("has no one-shots", 0.25),
            has_small_limits=chance("has small limits", 0.8),
            overlaps=pick("overlaps", _OVERLAPS_DRAWN),
            journal_faults={
                f: heat for f in FAULTS if has_journal_faults and chance(f"has {f}", 0.4)
            },
            crashes=has_faults and chance("has crashes", 0.4),
            freezes=has_faults and chance("has freezes", 0.4),
            cancels=has_faults and chance("has cancels", 0.25),
            impatient=chance("has impatient clients", 0.5),
            resends=chance("has resends", 0.5),
            misbehaves=chance("has misbehaviour", 0.5),
            off_clocks=has_faults and chance("has clocks that are off", 0.3),
            takes_over=has_faults and chance("has forced takeovers", 0.1),
            idle_s=pick("idle", (300.0, 1.0, 5.0, None) if has_faults else (1.0, None)),
            condenser=pick("condenser", ("none", "rolling", "summary", "careless")),
            queued_max=pick("queued max", (256, 3)),
            verifies=chance("verifies", 0.3),
            extras=pick("extras", _EXTRAS_DRAWN),
            is_busy=chance("is busy", 0.6),
            agent=pick("agent", ("plain", "tool")),
            confirms=chance("confirms", 0.5),
            unfinished=pick("unfinished", ("end", "resume")),
            strikes_at_writes=(
                pick("strikes at writes", (0.0, 0.0, 0.05, 0.2)) if has_faults else 0.0
            ),
            drains=has_faults and chance("has drains", 0.2),
            has_prompts=chance("has prompts", 0.3),
            prompt_policy=pick("prompt policy", ("current", "pinned")),
        )

    @staticmethod
    def standing_still(_: Simulation | None = None) -> Options:
        """Freeze nodes right after their writes have landed, for longer than a lease."""
        return Options(
            nodes=2,
            clients=2,
            messages=3,
            freezes=True,
            strikes_at_writes=0.3,
            impatient=True,
            agent="tool",
            is_busy=True,
        )

    @staticmethod
    def crowded(_: Simulation | None = None) -> Options:
        """Crowd one conversation with small tables and a short queue; much is sent twice."""
        return Options(
            clients=3,
            messages=5,
            has_small_limits=True,
            resends=True,
            impatient=True,
            is_busy=True,
            queued_max=3,
            extras=("cancel", "fork", "append", "append wrongly"),
        )

    @staticmethod
    def watched(simulation: Simulation) -> Options:
        """Have many slow readers, which also give up waiting, with small buffers and pages."""
        return Options(
            nodes=simulation.pick("nodes", (1, 2)),
            clients=2,
            messages=3,
            has_small_limits=True,
            idle_s=simulation.pick("idle", (None, 1.0, 300.0)),
            extras=("follow", "read", "fork"),
            is_busy=True,
            resends=True,
            queued_max=3,
            subscribers=3,
            interrupts=0.5,
        )

    @staticmethod
    def deleting(simulation: Simulation) -> Options:
        """Delete conversations on a slow disk, while agents hang and others read."""
        return Options(
            nodes=simulation.pick("nodes", (1, 2)),
            clients=2,
            messages=3,
            has_small_limits=True,
            journal_faults={"slow": 0.1, "mute": 0.01},
            misbehaves=True,
            extras=("delete", "read", "view"),
            is_busy=True,
            resends=True,
            queued_max=3,
            subscribers=2,
        )

    @staticmethod
    def held(simulation: Simulation) -> Options:
        """Pause turns and ask for confirmations, with owners that rest as soon as they may."""
        return Options(
            clients=2,
            messages=3,
            idle_s=simulation.pick("idle", (None, 1.0)),
            agent="tool",
            confirms=True,
            extras=("pause", "cancel"),
            unfinished=simulation.pick("unfinished", ("end", "resume")),
            is_busy=True,
        )

    @staticmethod
    def talked_over(simulation: Simulation) -> Options:
        """Let all clients talk over agents that stream, hang and go on."""
        return Options(
            clients=3,
            messages=3,
            overlaps=simulation.pick("overlaps", _OVERLAPS_DRAWN),
            misbehaves=simulation.chance("has misbehaviour", 0.7),
            agent=simulation.pick("agent", ("tool", "plain")),
            extras=("cancel", "end", "follow", "interrupt"),
            is_busy=True,
            has_small_limits=True,
            resends=True,
            queued_max=3,
        )

    @staticmethod
    def steered(_: Simulation | None = None) -> Options:
        """Let messages join turns with many steps, which are then rolled back."""
        return Options(
            clients=3,
            messages=3,
            overlaps=("steer", "steer", "rollback"),
            agent="tool",
            is_busy=True,
            has_small_limits=True,
            resends=True,
            queued_max=3,
        )

    @staticmethod
    def crashing(simulation: Simulation) -> Options:
        """Crash nodes around their writes, so that turns are resumed again and again."""
        return Options(
            nodes=2,
            clients=2,
            messages=2,
            has_small_limits=simulation.chance("has small limits", 0.5),
            journal_faults={"crash_before": 0.02, "crash_after": 0.02},
            crashes=True,
            strikes_at_writes=0.15,
            impatient=True,
            takes_over=simulation.chance("has forced takeovers", 0.3),
            agent=simulation.pick("agent", ("tool", "plain")),
            unfinished=simulation.pick("unfinished", ("resume", "end")),
            is_busy=True,
        )

    @staticmethod
    def reloaded(simulation: Simulation) -> Options:
        """Passivate owners at once, so that they load small snapshots and condensed logs."""
        return Options(
            clients=2,
            messages=4,
            has_small_limits=True,
            resends=True,
            impatient=True,
            queued_max=3,
            idle_s=1.0,
            condenser=simulation.pick("condenser", ("rolling", "careless", "none")),
            extras=("retract", "fork", "view", "cancel", "append"),
        )

    @staticmethod
    def edited(simulation: Simulation) -> Options:
        """Edit messages, undo turns and interrupt them, over restarts, condensations and queues."""
        return Options(
            nodes=simulation.pick("nodes", (1, 2)),
            clients=2,
            messages=4,
            overlaps=simulation.pick("overlaps", _OVERLAPS_DRAWN),
            has_small_limits=simulation.chance("has small limits", 0.5),
            resends=True,
            impatient=True,
            idle_s=simulation.pick("idle", (None, 1.0)),
            strikes_at_writes=simulation.pick("strikes at writes", (0.0, 0.1)),
            crashes=True,
            condenser=simulation.pick("condenser", ("none", "none", "rolling")),
            agent=simulation.pick("agent", ("plain", "tool")),
            confirms=True,
            unfinished=simulation.pick("unfinished", ("end", "resume")),
            replaces=0.5,
            extras=("look", "interrupt", "undo", "cancel", "pause", "delete"),
            is_busy=True,
        )

    @staticmethod
    def replaced(simulation: Simulation) -> Options:
        """Drain nodes again and again, as in a rolling update of a program and its prompt."""
        return Options(
            nodes=simulation.pick("nodes", (2, 2, 3, 1)),
            clients=2,
            messages=4,
            overlaps=simulation.pick("overlaps", _OVERLAPS_DRAWN),
            impatient=True,
            idle_s=simulation.pick("idle", (300.0, 1.0)),
            crashes=simulation.chance("has crashes", 0.2),
            condenser=simulation.pick("condenser", ("none", "rolling", "careless")),
            agent=simulation.pick("agent", ("tool", "plain")),
            confirms=simulation.chance("confirms", 0.3),
            unfinished=simulation.pick("unfinished", ("end", "resume")),
            extras=("follow", "pause", "view", "fork"),
            subscribers=2,
            drains=True,
            has_prompts=True,
            prompt_policy=simulation.pick("prompt policy", ("current", "pinned")),
            is_busy=simulation.chance("is busy", 0.5),
        )

    @staticmethod
    def failing(simulation: Simulation) -> Options:
        """Let many writes fail, so that owners fail one after the other, and some too often."""
        heat = simulation.pick("heat", (0.3, 0.15))
        return Options(
            nodes=simulation.pick("nodes", (1, 2)),
            clients=2,
            messages=3,
            journal_faults={"refused": heat, "lost": heat, "unheard": heat, "broken": 0.02},
            impatient=True,
            resends=True,
            agent=simulation.pick("agent", ("tool", "plain")),
            unfinished=simulation.pick("unfinished", ("end", "resume")),
            is_busy=True,
        )

    @staticmethod
    def plain() -> Options:
        """Return the options of a small run without faults, for sweeps to strike."""
        return Options(nodes=2, clients=2, messages=2, extras=EXTRAS, agent="tool", confirms=True)


_Profile = Callable[[Simulation], Options | ActorWorld | HistoryWorld | OwnerWorld | ReaderWorld]

# Tapes hold the place of a profile: new ones go to the end.
_PROFILES: Sequence[_Profile] = (
    Options.crowded,
    Options.drawn,
    Options.reloaded,
    Options.steered,
    Options.deleting,
    Options.replaced,
    Options.standing_still,
    Options.edited,
    Options.held,
    Options.watched,
    Options.talked_over,
    Options.crashing,
    HistoryWorld,
    ActorWorld,
    OwnerWorld,
    ReaderWorld,
    Options.failing,
)
"""The kinds of runs: one draws everything, each of the others stresses one thing."""
_OWNER: _Profile = OwnerWorld
_SMALL: Sequence[_Profile] = (ActorWorld, ReaderWorld, HistoryWorld)
_LARGE: Sequence[_Profile] = (
    Options.crowded,
    Options.held,
    Options.drawn,
    Options.reloaded,
    Options.deleting,
    Options.drawn,
    Options.steered,
    Options.standing_still,
    Options.drawn,
    Options.replaced,
    Options.edited,
    Options.drawn,
    Options.watched,
    Options.talked_over,
    Options.drawn,
    Options.crashing,
    Options.failing,
)
"""Almost every third run draws everything, since only that kind has all faults of the journal."""
_ROUND: Sequence[_Profile] = tuple(
    kind
    for small, large in zip(cycle(_SMALL), _LARGE, strict=False)
    for kind in (_OWNER, small, _OWNER, _OWNER, large)
)
"""Each seed takes the next kind, so that a short search tries all of them. The small worlds, with
short runs, come between the large ones."""


_FIRST: Sequence[_Profile] = (
    *(_OWNER, ActorWorld),
    *(_OWNER, HistoryWorld),
    *(_OWNER, _OWNER, ReaderWorld),
    *(_OWNER, _OWNER, _OWNER),
)
"""How a search begins: owners find most, and the other small worlds are soon tried once each."""
_SMALL_FIRST = 2 * len(_FIRST)
"""This many runs of small worlds come before any other."""


def opening(seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds with which a search begins: small worlds, all kinds in turn."""
    kinds = {seed: _ROUND[seed % len(_ROUND)] for seed in seeds}
    of_kind = {kind: iter([s for s in seeds if kinds[s] is kind]) for kind in _FIRST}
    found = (next(of_kind[kind], None) for kind in islice(cycle(_FIRST), _SMALL_FIRST))
    return [seed for seed in found if seed is not None]


def _drawn_profile(simulation: Simulation) -> _Profile:
    tape = simulation.tape
    if not isinstance(tape.seed, int):
        return _PROFILES[tape.draw("profile", len(_PROFILES))]
    rounds, place = divmod(tape.seed, len(_ROUND))
    profile = _PROFILES[tape.draw("profile", len(_PROFILES), _PROFILES.index(_ROUND[place]))]
    if profile is not _OWNER:
        return profile
    return partial(OwnerWorld, turn=rounds * _ROUND.count(_OWNER) + _ROUND[:place].count(_OWNER))


_EXTRAS_DRAWN: Sequence[Sequence[Extra]] = (
    EXTRAS,
    (*EXTRAS, "delete", "delete"),
    ("cancel", "end"),
    ("pause", "cancel"),
    ("fork", "retract", "view"),
    ("follow", "read"),
    (),
)
"""Like the overlaps: a run with few kinds of extras has more of each."""
_PROMPTS = (None, "be kind", "be brief", "be kind and brief")
_OVERLAPS_DRAWN: Sequence[Sequence[OnOverlap]] = (
    OVERLAPS,
    ("steer", "steer", "rollback"),
    ("queue", "interrupt"),
    ("queue",),
    ("queue", "steer"),
    ("interrupt", "rollback"),
)
"""A run in which all clients use one overlap policy goes deeper into that."""


class Lost(Exception):
    """No answer in time: the request may have been served, or may still be served."""


@dataclass(eq=False, slots=True)
class _Server:
    """One incarnation of a node, as its clients see it."""

    node: Node
    journal: SimulatedJournal
    stop: anyio.Event = field(default_factory=anyio.Event)
    conversations: Conversations | None = None
    waiting: dict[EventReader, float] = field(default_factory=dict)
    """The readers that wait for an event there, and since when."""
    is_drained: bool = False
    """Its readers have ended, and it takes no others."""


class ConversationWorld:
    """Call it with a simulation. Sweeps pass `options` and `strike` instead of drawing them.

    `struck_s`: for how many seconds the simulator may freeze a node when it strikes it, at any
    time; None if it strikes none. Then owners may stop, and a frozen node answers no request in
    time, even in a world without faults of its own.
    """

    def __init__(
        self,
        options: Options | None = None,
        *,
        strike: JournalStrike | None = None,
        struck_s: float | None = None,
    ) -> None:
        self._given = options
        self._strike = strike
        self._struck_s = struck_s
        self.journal_calls = 0
        """How many calls of the journal the last run had."""
        self.places: set[Hashable] = set()
        """The places that the last run has reached; see `_search.py`."""

    async def __call__(self, simulation: Simulation) -> None:
        options = self._given or _drawn_profile(simulation)(simulation)
        if not isinstance(options, Options):
            await options.play()
            return
        simulation.note(f"{options}")
        run = _Run(simulation, options, self._strike, struck_s=self._struck_s)
        try:
            await run.play()
        finally:
            run.disk.end()
            self.journal_calls = run.disk.calls
            self.places = run.oracles.places


_LIMITS = Limits()
_SMALL_LIMITS = Limits(
    known_messages_max=6,
    recent_events_max=4,
    snapshot_events=6,
    buffered_events_max=3,
    read_page=4,
)
"""Small limits, so that short logs reach the cases beyond them."""


class _Run:
    """One run of the world."""

    def __init__(
        self,
        simulation: Simulation,
        options: Options,
        strike: JournalStrike | None,
        *,
        struck_s: float | None,
    ) -> None:
        self.simulation = simulation
        self.struck_s = struck_s
        self.options = options
        self.limits = _SMALL_LIMITS if options.has_small_limits else _LIMITS
        # What waits must be known, so the queue is shorter than the table.
        self.queued_max = min(options.queued_max, self.limits.known_messages_max - 1)
        self.disk = Disk(
            simulation,
            has_locks=options.has_locks,
            has_one_shots=options.has_one_shots,
            strike=strike,
            fault_chances=options.journal_faults,
        )
        self.oracles = Oracles(
            simulation,
            self.disk,
            queued_max=self.queued_max,
            is_calm=options.is_calm and strike is None and struck_s is None,
            holds_in_pause=options.agent == "tool",
        )
        self.disk.on_fault = lambda fault: self.oracles.moment("the disk", fault)
        self.servers: dict[str, _Server] = {}
        self.cursors: dict[str, tuple[str, int]] = {}
        """The conversation that each subscriber follows, and the newest seq that it has read."""
        self.appended: dict[str, list[Event]] = {}
        """The events that clients have appended, by conversation."""
        self.is_healed = False
        self.is_stopping = False
        self.is_all_known = False
        """True if the outcome of every chat message is known; then clients send no more."""
        self._looks_at_time = 0
        """The step before which the time is looked at next."""
        self._now = 0.0
        self._now_since = 0
        """The time at the last look, and the step of the first look at which it was the same."""
        self.unheard = 0
        """How many sends are under way without a client that waits for their answers."""
        self._strike_of_journal = strike
        self.strike_at: int | None = None
        """The step before which a node is struck next."""
        self.strikes = [
            kind
            for kind, is_there in (
                ("crash", options.crashes),
                ("freeze", options.freezes),
                ("cancel", options.cancels),
                ("jump", options.off_clocks),
            )
            if is_there
        ]
        self.names = [f"n{n}" for n in range(1, options.nodes + 1)]
        self.conversation_ids = [f"c{n}" for n in range(1, options.conversations + 1)]

    async def play(self) -> None:
        simulation = self.simulation
        simulation.scheduler.look = self._look
        self._look_before(0)
        for name in self.names:
            simulation.start_soon(self._operate, name)
        async with simulation.scheduler.open_tasks() as others:
            others.start_soon(self._strike_nodes)
            others.start_soon(self._drain_nodes)
            subscribers = self.options.subscribers
            if subscribers is None:
                subscribers = simulation.draw("subscribers", 3)
            for n in range(subscribers):
                others.start_soon(self._subscribe, f"s{n + 1}")
            with simulation.move_on_after(SAFETY_S):
                async with simulation.scheduler.open_tasks() as clients:
                    for n in range(self.options.clients):
                        clients.start_soon(self._be_client, f"u{n + 1}")
            self._heal()
            others.start_soon(self._watch_progress)
            with simulation.move_on_after(LIVENESS_S) as bound:
                await self._finish()
                if not await self._catch_up(CATCH_UP_S + (self.struck_s or 0.0)):
                    heads = {name: self.oracles.head(name) for name in self.conversation_ids}
                    self.oracles.broken("P1", f"subscribers at {self.cursors}, logs at {heads}")
            others.cancel_scope.cancel()
        if bound.cancelled_caught:
            waiting = [s.message_id for s in self.oracles.sendings.values() if s.end is None]
            self.oracles.broken("P1", f"after {LIVENESS_S:.0f} s {waiting} are not done")
            return
        await self._stop_all()
        self.oracles.check_end()

    def _look_before(self, step: int) -> None:
        """Look before this step at the latest."""
        scheduler = self.simulation.scheduler
        scheduler.looks_at = min(scheduler.looks_at, step)

    def _look(self) -> None:
        """Strike now and then at sensitive moments, or when a strike is due."""
        scheduler = self.simulation.scheduler
        steps = scheduler.steps
        if steps >= self._looks_at_time:
            self._look_at_time(steps)
        scheduler.looks_at = self._looks_at_time
        writer = self.oracles.last_writer
        if writer is not None:
            self.oracles.last_writer = None
            chance = 0.0 if self.is_healed else self.options.strikes_at_writes
            if chance and self.simulation.chance("strike at a write", chance):
                self._strike(writer.node)
        if self.strike_at is not None:
            if steps < self.strike_at:
                self._look_before(self.strike_at)
                return
            self.strike_at = None
            server = self.servers.get(self.simulation.pick("strike whom", self.names))
            if server is not None and not self.is_healed:
                self._strike(server.node)

    def _look_at_time(self, steps: int) -> None:
        """Check that time passes."""
        self._looks_at_time = steps + _TIME_LOOKED_AT_EVERY
        now = self.simulation.now()
        if now != self._now:
            self._now, self._now_since = now, steps
        elif steps - self._now_since > _STEPS_AT_ONCE_MAX:
            self.simulation.broken("budget", f"no time passes from {now:.3f} s on")

    # --- nodes -----------------------------------------------------------------------------------

    async def _operate(self, name: str) -> None:
        """Start a node, and restart it whenever it has ended."""
        simulation = self.simulation
        while not self.is_stopping:
            rate = 1.0
            if self.options.off_clocks:
                rate = simulation.pick("clock rate", (1.0, 1.05, 0.95))
            node = simulation.start(name, self._serve, clock_rate=rate)
            await node.wait_until_ended()
            if not self.is_stopping:
                simulation.mark("node restarted")
                await simulation.delay("operator", 0.5, 20.0)
                await self.simulation.sleep(_OPERATOR_PAUSE_S)

    async def _serve(self, node: Node) -> None:
        """Run the production code in a node."""
        simulation, options = self.simulation, self.options
        if options.off_clocks:
            node.wall_clock_off_s = simulation.pick("wall clock", (0.0, 3600.0, -3600.0))
        takes_over = options.takes_over and simulation.chance("takes over", 0.5)
        journal = SimulatedJournal(self.disk, node, takeover=takes_over)
        server = self.servers[node.name] = _Server(node, journal)
        node.start_soon(journal.keep_lease)
        node.start_soon(partial(self._watch, server))
        agent: Agent = SimulatedAgent(
            simulation,
            self.oracles,
            journal,
            misbehaves=options.misbehaves,
            pieces_max=options.pieces_max,
        )
        if options.agent == "tool":
            agent = SimulatedToolAgent(
                simulation,
                self.oracles,
                journal,
                misbehaves=options.misbehaves,
                confirms=options.confirms,
                pieces_max=options.pieces_max,
            )
        condense_s = _CONDENSE_S
        if options.condenser in _SLOW_CONDENSERS:
            condense_s = simulation.pick("condense within", (_CONDENSE_S, _SHORT_CONDENSE_S))
        conversations = Conversations(
            agent,
            journal=journal,
            ports=node.ports,
            limits=self.limits,
            condenser=self._condenser(condense_s),
            condense_s=condense_s,
            idle_s=options.idle_s,
            queued_messages_max=self.queued_max,
            verify="always" if options.verifies else "off",
            unfinished=options.unfinished,
            system_prompt=self._prompt_of(journal),
            prompt_policy=options.prompt_policy,
        )
        before = self._left_unfinished()
        async with conversations, self._joined(server, conversations):
            # A node that stood still as it began may have lost its lease. A later look then takes
            # up what was left unfinished.
            may_fail = options.journal_faults or self._strike_of_journal is not None
            if not may_fail and not journal.was_frozen:
                self._check_taken_up(before)
            server.conversations = conversations
            try:
                await server.stop.wait()
            finally:
                server.conversations = None

    @asynccontextmanager
    async def _joined(self, _: _Server, __: Conversations) -> AsyncIterator[None]:
        """Connect a node with the others, in worlds whose nodes ask each other."""
        yield

    def _left_unfinished(self) -> dict[str, SimulatedJournal | None]:
        """Return the unfinished conversations that no process owns, with their last owners."""
        store = self.disk.store
        owners = {
            name: owner_of(store, name)
            for name in self.conversation_ids
            if self.oracles.is_unfinished(name) and self.oracles.waits_for(name) is None
        }
        return {n: owner for n, owner in owners.items() if owner is None or not owner.is_held()}

    def _check_taken_up(self, before: dict[str, SimulatedJournal | None]) -> None:
        """Check that a new process owns the conversations that the last one left unfinished."""
        for name, owner in before.items():
            if owner_of(self.disk.store, name) is owner and self.oracles.is_unfinished(name):
                self.oracles.broken("P2", f"{name}, last owned on {owner and owner.node}")

    def _condenser(self, condense_s: float) -> Condenser | None:
        match self.options.condenser:
            case "rolling":
                return RollingCondenser(max_size=8, keep_first=1)
            case "summary":
                rolling = RollingCondenser(max_size=8, keep_first=1)
                return SummarizingCondenser(SummaryModel(self.simulation), rolling)
            case "careless":
                return CarelessCondenser(self.simulation, hangs=condense_s < _CONDENSE_S)
            case _:
                return None

    async def _watch(self, server: _Server) -> None:
        """End a node whose journal cannot write any more, as an operator does."""
        while True:
            await self.simulation.sleep(5.0)
            if server.journal.is_broken:
                server.stop.set()
                return

    async def _strike_nodes(self) -> None:
        """Crash, freeze and cancel nodes at any time."""
        simulation = self.simulation
        if not self.strikes:
            return
        while not self.is_healed:
            await simulation.sleep(0.2 + 0.2 * simulation.draw("next strike", 50))
            # Not at a time but after a number of steps.
            self.strike_at = simulation.steps + simulation.draw("strike after steps", 40)
            self._look_before(self.strike_at)

    def _strike(self, node: Node) -> None:
        simulation = self.simulation
        if not self.strikes or not node.is_alive:
            return
        how = simulation.pick("strike how", self.strikes)
        for conversation_id in self.conversation_ids:
            self.oracles.moment(conversation_id, how)
        match how:
            case "crash":
                if self.options.condenser != "none":
                    simulation.mark("condensation and a crash")
                node.crash()
            case "freeze":
                if (server := self.servers.get(node.name)) is not None:
                    server.journal.was_frozen = True
                node.freeze(simulation.pick("freeze for", (40.0, 1.0, 15.0, 40.0)))
            case "jump":
                simulation.mark("wall clock jumped")
                node.wall_clock_off_s = simulation.pick("jump to", (-5.0, 3600.0, -3600.0, 0.0))
            case _:
                node.cancel()

    def _prompt_of(self, journal: SimulatedJournal) -> str | None:
        """Draw the system prompt of a process."""
        if not self.options.has_prompts:
            return None
        self.oracles.is_pinned = self.options.prompt_policy == "pinned"
        prompt = self.simulation.pick("system prompt", _PROMPTS)
        self.oracles.prompts[journal] = prompt
        return prompt

    async def _drain_nodes(self) -> None:
        """Drain a node now and then, as an operator does before it is replaced."""
        simulation = self.simulation
        if not self.options.drains:
            return
        while not self.is_healed:
            await simulation.sleep(0.2 + 0.2 * simulation.draw("next drain", 12))
            server = self.servers.get(simulation.pick("drain whom", self.names))
            # A node whose conversations were left is about to end, and accepts no more tasks.
            is_there = server is not None and server.conversations is not None
            if server is not None and is_there and not self.is_healed:
                server.node.start_soon(partial(self._drain, server))

    async def _drain(self, server: _Server) -> None:
        """Drain a node, let it stand for a while, and stop it; runs in the node."""
        simulation, conversations = self.simulation, server.conversations
        if conversations is None or conversations.is_draining:
            return
        messages = simulation.pick("messages while draining", get_args(WhileDraining))
        grace_s = simulation.pick("grace", (1.0, 0.0, 5.0, 0.0, 20.0))
        self.oracles.drain_begins(server.journal, messages)
        is_sure = not (self.options.journal_faults or self.options.freezes) and (
            self._strike_of_journal is None and self.struck_s is None
        )
        with simulation.move_on_after(grace_s + STOP_S) as bound:
            drained = await conversations.drain(grace_s, messages=messages)
            server.is_drained = True
            simulation.mark(f"drained, messages {messages}")
            if drained.interrupted:
                simulation.mark("interrupted by a drain")
            self.oracles.drained(server.journal, is_sure=is_sure)
        if bound.cancelled_caught and is_sure:
            self.oracles.broken("H2", f"{server.node} drains")
        drained_at = simulation.now()
        await simulation.sleep(simulation.pick("stands drained", (0.0, 5.0, 20.0)))
        waited_s = [simulation.now() - max(s, drained_at) for s in server.waiting.values()]
        if is_sure and max(waited_s, default=0.0) > _READERS_END_S:
            self.oracles.broken("H2", f"readers wait on {server.node}")
        server.stop.set()

    def _heal(self) -> None:
        self.simulation.note("healed")
        self.is_healed = True
        self.disk.heal()
        for node in self.simulation.nodes.values():
            node.thaw()

    async def _stop_all(self) -> None:
        """Leave every node as an application does, and check that it ends."""
        self.is_stopping = True
        for name in self.names:
            server = self.servers.get(name)  # none if it was struck before its first step
            if server is None or not server.node.is_alive:
                continue  # its operator would have started it again
            server.stop.set()
            with self.simulation.move_on_after(STOP_S) as bound:
                await server.node.wait_until_ended()
            if bound.cancelled_caught:
                self.oracles.broken("R1", f"{server.node} has not ended in {STOP_S:.0f} s")
            elif server.node.error is not None:
                self.oracles.broken("R1", f"{server.node} ended with {server.node.error!r}")
        if self.options.misbehaves:
            # A tool that was given up as stuck is left behind; once it has ended, all has.
            await self.simulation.sleep(SWALLOWS_S)

    # --- clients ---------------------------------------------------------------------------------

    async def _request(
        self, name: str, serve: Callable[[_Server, Conversations], Awaitable[T]], limit_s: float
    ) -> T:
        """Make one request over the network, to the current node of this name."""
        server = self.servers.get(name)
        if server is None or server.conversations is None:
            raise NodeCrashed(name)
        conversations = server.conversations

        async def arrive() -> T:
            if server.conversations is not conversations:
                raise NodeCrashed(name)
            return await serve(server, conversations)

        lost_at = self.simulation.now() + limit_s
        await self._cross_network(lost_at)
        try:
            answer = await server.node.call(arrive, lost_at - self.simulation.now())
        except NotAnswered:
            raise Lost from None
        await self._cross_network(lost_at)
        return answer

    async def _cross_network(self, lost_at: float) -> None:
        """Wait as long as a message is under way; raise `Lost` if it arrives too late."""
        simulation = self.simulation
        if wait_s := drawn_wait(simulation, "network"):
            left_s = lost_at - simulation.now()
            await simulation.sleep(min(wait_s, left_s))
            if wait_s >= left_s:
                raise Lost

    def _node_for(self, conversation_id: str, attempt: int) -> str:
        """Return the node to ask: mostly the owner, as behind a router, and now and then another.

        After a failed attempt it is the next node.
        """
        owner = owner_of(self.disk.store, conversation_id)
        has_owner = owner is not None and owner.is_held() and not attempt % 3
        if owner is not None and has_owner and not self.simulation.chance("another node", 0.2):
            return owner.node.name
        place = attempt + self.simulation.draw("which node", len(self.names))
        return self.names[place % len(self.names)]

    def _limit(self) -> float:
        """Return the seconds that a client waits for an answer."""
        if self.is_healed or not self.options.impatient:
            return 40.0
        return self.simulation.pick("patience", (40.0, 5.0, 0.5, 0.02))

    async def _be_client(self, sender: str) -> None:
        simulation = self.simulation
        for number in range(self.options.messages):
            conversation_id = simulation.pick("to whom", self.conversation_ids)
            sending = Sending(
                conversation_id,
                f"{sender}-{number:02}",
                f"{sender}:{number}",
                sender,
                number,
                simulation.steps,
                self._target(conversation_id),
            )
            self.oracles.sendings[sending.message_id] = sending
            await self._send_until_known(sending)
            if self.options.extras:
                await self._do_extra(sending)
            await linger(simulation, "client rests", 0.1 if self.options.is_busy else 0.6, 4.0)

    def _target(self, conversation_id: str) -> str | None:
        """Return the message that the next one replaces, if it replaces one."""
        simulation = self.simulation
        sent = [
            sending.message_id
            for sending in self.oracles.sendings.values()
            if sending.conversation_id == conversation_id and sending.acknowledged_at is not None
        ]
        chance = self.options.replaces if sent else 0.0
        if not chance or not simulation.chance("replaces", chance):
            return None
        return simulation.pick("replaces which", sent)

    async def _send_until_known(self, sending: Sending) -> None:
        """Send a chat message until its outcome is known."""
        simulation = self.simulation
        overlap = simulation.pick("on overlap", self.options.overlaps)
        was_unknown = False
        while not (sending.is_acknowledged or sending.refusal or sending.is_dropped):
            is_healed = self.is_healed
            name = self._node_for(sending.conversation_id, sending.attempts)
            send = partial(self._send, sending, overlap)
            if self.options.resends and simulation.chance("sent twice", 0.2):
                sending.attempts += 1
                self.unheard += 1
                simulation.start_soon(self._send_unheard, sending, overlap)
            sending.attempts += 1
            try:
                turn = await self._request(name, send, self._limit())
            except (NodeCrashed, OutcomeUnknown, Lost) as error:
                was_unknown = True
                if is_healed and isinstance(error, Lost) and self.struck_s is None:
                    self.oracles.broken("M2", f"no answer to {sending.message_id} from {name}")
                self.oracles.moment(sending.conversation_id, type(error).__name__)
            except (Refused, OwnershipLost, Unavailable) as refusal:
                self.oracles.moment(sending.conversation_id, type(refusal).__name__)
                if self._is_given_up(sending, refusal):
                    return
            else:
                if was_unknown:
                    how = "it was written" if turn.is_duplicate else "it was not"
                    simulation.mark(f"unknown resolved: {how}")
                return
            await simulation.sleep(min(0.1 * 2**sending.attempts, 5.0))
            await linger(simulation, "client tries again", 0.6, 3.0)

    def _is_given_up(self, sending: Sending, refusal: Exception) -> bool:
        """Return True if a chat message that was refused is not sent again."""
        simulation = self.simulation
        match refusal:
            case TurnInProgress():
                simulation.mark("turn in progress")
            case QueueFull():
                simulation.mark("queue full")
            case TooManyRestarts():
                simulation.mark("failed too often")
            case NotReplaceable() | MessageNotFound() if sending.replaces is not None:
                simulation.mark(f"not replaced: {getattr(refusal, 'reason', 'not found')}")
                sending.is_dropped = sending.attempts > 1
            case Draining():
                simulation.mark("refused while draining")
            case OwnershipLost() | Unavailable() | ConversationsClosed():
                pass
            case _:
                simulation.broken("world", f"{sending.message_id} refused: {refusal!r}")
                return True
        # The error says that nothing happened. If there was only one attempt, that can be checked.
        is_over = isinstance(refusal, TurnInProgress | QueueFull | NotReplaceable | MessageNotFound)
        if sending.attempts == 1 and (is_over or simulation.chance("gives up", 0.2)):
            sending.refusal = repr(refusal)
            return True
        return False

    async def _send(
        self, sending: Sending, overlap: OnOverlap, _: _Server, conversations: Conversations
    ) -> Turn:
        turn = await conversations[sending.conversation_id].send(
            sending.content,
            message_id=sending.message_id,
            on_overlap=overlap,
            replaces=sending.replaces,
        )
        # Checked here, where the answer leaves the node, since it may be lost on the way.
        self.oracles.acknowledged(sending, turn.seq, turn.turn_id, is_duplicate=turn.is_duplicate)
        return turn

    async def _send_unheard(self, sending: Sending, overlap: OnOverlap) -> None:
        """Send the chat message once more, through any node, without waiting for the answer."""
        await self.simulation.delay("late delivery", 0.5, 10.0)
        name = self.simulation.pick("which node", self.names)
        try:
            await self._request(name, partial(self._send, sending, overlap), 40.0)
        except (Refused, OwnershipLost, Unavailable, OutcomeUnknown, Lost):
            self.simulation.mark("unheard refusal")
        finally:
            self.unheard -= 1

    async def _do_extra(self, sending: Sending) -> None:
        """Do something else, once."""
        simulation = self.simulation
        if not simulation.chance("extra", 0.9):
            return
        extra = simulation.pick("which extra", self._extras(sending.conversation_id))
        name = self._node_for(sending.conversation_id, 0)
        try:
            await self._request(name, partial(self._serve_extra, extra, sending), self._limit())
        except (Refused, OwnershipLost, Unavailable, OutcomeUnknown, Lost):
            simulation.mark(f"no {extra}")

    def _extras(self, conversation_id: str) -> Sequence[Extra]:
        """Return the acts that a client may draw; fitting ones come more often."""
        extras = list(self.options.extras)
        match self.oracles.waits_for(conversation_id):
            case "resume":
                extras += ["resume"] * 4
            case "confirmation":
                extras += ["confirm", "reject", "answer"] * 3
            case _:
                pass
        if self.oracles.waiting(conversation_id):
            extras += ["withdraw"] * 4
        return extras

    async def _serve_extra(  # noqa: C901 - one case for each extra, each a few lines
        self, extra: Extra, sending: Sending, server: _Server, conversations: Conversations
    ) -> None:
        simulation, oracles = self.simulation, self.oracles
        conversation = conversations[sending.conversation_id]
        match extra:
            case "view":
                floor = oracles.floor(sending.conversation_id, server.journal)
                deletions = oracles.deleted[sending.conversation_id]
                view = await conversation.view()
                is_same_log = oracles.deleted[sending.conversation_id] == deletions
                if not is_same_log or not oracles.floor(sending.conversation_id, server.journal):
                    floor = 0
                oracles.saw_view(conversation.conversation_id, view, repr(server.node), floor=floor)
            case "end" if sending.acknowledged_at is not None:
                await self._learn_end(sending, conversations)
            case "cancel" if sending.acknowledged_at is not None:
                turn = await conversation.send(
                    sending.content, message_id=sending.message_id, replaces=sending.replaces
                )
                if await turn.cancel():
                    simulation.mark("cancelled")
                    sending.is_cancelled = True
            case "withdraw":
                waiting = oracles.waiting(sending.conversation_id)
                other = oracles.sendings.get(simulation.pick("withdraw", waiting or ("",)))
                if other is not None:
                    turn = await conversation.send(
                        other.content, message_id=other.message_id, replaces=other.replaces
                    )
                    if await turn.cancel():
                        other.is_cancelled = True
            case "delete":
                await conversations.delete(sending.conversation_id)
            case "fork":
                fork_id = f"{sending.conversation_id}-{sending.message_id}"
                at = 1 + simulation.draw("fork at", max(1, oracles.head(sending.conversation_id)))
                fork = await conversation.fork(fork_id, at=at, owner=sending.sender)
                oracles.saw_fork(fork_id)
                change_id = f"title-{sending.message_id}"
                for _ in range(2):  # the second one writes nothing
                    changed = await fork.change(title=sending.content, change_id=change_id)
                    oracles.saw_change(fork_id, changed.seq, change_id)
                oracles.saw_view(fork_id, await fork.view(), "a fork", floor=0)
            case "pause":
                await conversation.pause()
                await simulation.delay("pause", 0.9, 10.0)
                await conversation.resume()
            case "resume":
                await conversation.resume()
            case "confirm":
                await conversation.confirm()
            case "reject":
                await conversation.reject("no")
            case "look":
                await self._look_for(sending, conversation)
            case "interrupt":
                running = await conversation.running()
                if running is not None and await conversation.interrupt(running.turn_id):
                    oracles.interrupted(conversation.conversation_id, running.turn_id)
            case "undo":
                for message in await conversation.undo():
                    oracles.undone(conversation.conversation_id, message)
            case "answer":
                await self._answer(conversation)
            case "append":
                await self._append(sending, conversation)
            case "append wrongly":
                await self._append_wrongly(sending, conversation)
            case "follow" if sending.acknowledged_at is not None:
                await self._follow(sending, server, conversations)
            case "retract":
                await conversation.retract_turn(sending.turn_id)
            case "read":
                at = 0
                async for logged in conversation.events(live=False):
                    oracles.saw_event(sending.conversation_id, logged, "a reader")
                    at += 1
                    simulation.require(logged.seq == at, "S1", f"{logged.seq} in place of {at}")
            case _:
                pass

    async def _look_for(self, sending: Sending, conversation: Conversation) -> None:
        """Look up turns like a process that has sent none of their messages."""
        name, oracles = conversation.conversation_id, self.oracles
        running = await conversation.running()
        if running is not None:
            oracles.saw_turn(name, running.message_id, running.seq, running.turn_id)
        for message in await conversation.queued():
            oracles.saw_turn(name, message.message_id, 0, message.turn_id or "")
        if sending.is_acknowledged and not sending.is_gone:
            deletions = oracles.deleted[name]
            try:
                turn = await conversation.turn(sending.message_id)
            except (MessageNotFound, ConversationNotFound):
                if oracles.deleted[name] == deletions:
                    oracles.broken("L1", f"{sending.message_id} of {name} is not found")
                raise
            oracles.saw_turn(name, turn.message_id, turn.seq, turn.turn_id)

    async def _append(self, sending: Sending, conversation: Conversation) -> None:
        """Append an event of the application's own, or once more one that is known."""
        name, simulation = conversation.conversation_id, self.simulation
        known = self.appended.setdefault(name, [])
        event = simulation.pick("append which", (None, *known))
        if event is None:
            # Ids need not rise.
            event_id = f"{simulation.pick('id', ('z', '0'))}-{sending.message_id}"
            event = TaskListUpdatedEvent(id=event_id, timestamp=_APPENDED_AT, tasks=())
            known.append(event)
        appended = await conversation.append(event)
        self.oracles.saw_change(name, appended.seq, event.id)

    async def _append_wrongly(self, sending: Sending, conversation: Conversation) -> None:
        """Append a result without a call: it is refused, and kept among the rejections."""
        name, oracles = conversation.conversation_id, self.oracles
        event_id = f"wrong-{sending.message_id}"
        wrong = ObservationEvent(
            id=event_id, timestamp=_APPENDED_AT, tool_call_id="nobody", content="wrong"
        )
        try:
            await conversation.append(wrong)
        except AdmissionRefused:
            if oracles.is_calm and "delete" not in self.options.extras:
                kept = await conversation.rejections()
                if not any(event_id.encode() in rejection.payload for rejection in kept):
                    oracles.broken("L7", f"{event_id} of {name}")
            oracles.saw_view(name, await conversation.view(), "one who was refused", floor=0)
        else:
            oracles.broken("T1", f"{event_id} of {name} is a result of nothing")

    async def _answer(self, conversation: Conversation) -> None:
        """Answer each waiting call separately, and then all of them once more."""
        awaiting = self.oracles.awaiting(conversation.conversation_id)
        chance = self.simulation.chance
        answers = {call: True if chance("confirmed", 0.5) else "no" for call in awaiting}
        await conversation.answer(answers)
        await conversation.answer(answers)
        if len(set(answers.values())) > 1:
            self.simulation.mark("mixed answers")

    async def _follow(
        self, sending: Sending, server: _Server, conversations: Conversations
    ) -> None:
        """Follow a turn, with the pieces of its answers."""
        turn = await conversations[sending.conversation_id].send(
            sending.content, message_id=sending.message_id, replaces=sending.replaces
        )
        seq, shown = 0, ShownAnswer(is_calm=self.oracles.is_calm)
        async for item in turn:
            if isinstance(item, LoggedEvent):
                self.oracles.saw_event(
                    sending.conversation_id, item, f"a follower on {server.node}"
                )
                if item.seq <= seq:
                    self.oracles.broken("S1", f"a follower at {seq} was given {item.seq}")
                seq = item.seq
                if (found := shown.see(item.event)) is not None:
                    self.oracles.broken("C3", found)
            else:
                self.simulation.mark("delta")
                if (found := shown.add(item)) is not None:
                    self.oracles.broken("C2", found)
                if shown.text not in self.oracles.streamed.get(item.turn_id, set()):
                    self.oracles.broken("C2", f"{shown.text!r} of turn {item.turn_id}")
        self.simulation.mark("followed to the end")

    async def _subscribe(self, name: str) -> None:
        """Follow a conversation slowly, and change from node to node."""
        simulation = self.simulation
        conversation_id = simulation.pick("follows", self.conversation_ids)
        self.cursors[name] = conversation_id, 0
        reads = attempt = 0

        async def follow(number: int, server: _Server, conversations: Conversations) -> None:
            cursor = self.cursors[name][1]
            reader = conversations[conversation_id].events(after=cursor)
            where = f"{name} on {server.node}"
            was_live = False
            while True:
                try:
                    if simulation.chance("reader interrupted", self.options.interrupts):
                        simulation.mark("reader interrupted")
                        patience_s = 0.05 * simulation.draw("for", 3)
                        with simulation.move_on_after(patience_s) as scope:
                            logged = await self._wait_at(server, reader)
                        if scope.cancelled_caught:
                            continue  # it lost nothing, and goes on where it was
                    else:
                        logged = await self._wait_at(server, reader)
                except StopAsyncIteration:
                    return
                if number != attempt:
                    return  # it was given up, on a frozen node; another one reads
                nonlocal reads
                reads = self.oracles.saw_event(conversation_id, logged, where)
                # What it has in hand is looked at from outside: it keeps its limits to itself.
                if reader.buffered_count > self.limits.buffered_events_max:
                    self.oracles.broken("B1", f"{name} has {reader.buffered_count} events")
                if was_live and reader.is_behind:
                    simulation.mark("subscriber moved to the journal")
                was_live = not reader.is_behind
                if logged.seq != cursor + 1:
                    self.oracles.broken("S1", f"{name} at {cursor} was given {logged.seq}")
                cursor = logged.seq
                self.cursors[name] = conversation_id, cursor
                if not self.is_healed:
                    await linger(simulation, f"{name} reads", 0.3, READ_S_MAX)

        for attempt in count():
            try:
                # At the end it stays on its node, and must get every event that any node writes.
                limit_s = LIVENESS_S if self.is_healed else 30.0
                place = attempt + simulation.draw("which node", len(self.names))
                await self._request(
                    self.names[place % len(self.names)], partial(follow, attempt), limit_s
                )
            except ConversationDeleted:
                simulation.mark("told of a deletion")
                if self.cursors[name][1]:
                    self.oracles.told_deleted(conversation_id, reads, name)
                self.cursors[name] = conversation_id, 0
            except (Refused, OwnershipLost, Unavailable, OutcomeUnknown, Lost):
                simulation.mark("subscriber moved on")
            await self.simulation.sleep(0.5)

    async def _wait_at(self, server: _Server, reader: EventReader) -> LoggedEvent:
        """Wait for the next event, as a subscriber of this node."""
        conversations = server.conversations
        server.waiting[reader] = self.simulation.now()
        try:
            return await anext(reader)
        except StopAsyncIteration:
            if conversations is not None and conversations.is_draining:
                self.simulation.mark("reader ended by a drain")
            raise
        finally:
            del server.waiting[reader]

    # --- the end ---------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Wait until the outcome of every message is known, and every accepted turn has ended."""
        scheduler = self.simulation.scheduler
        async with scheduler.open_tasks() as conversations:
            for conversation_id in self.conversation_ids:
                conversations.start_soon(self._finish_conversation, conversation_id)
            async with scheduler.open_tasks() as group:
                for sending in list(self.oracles.sendings.values()):
                    group.start_soon(self._finish_sending, sending)
            # After a deletion, a late message begins a new conversation.
            while self.unheard:
                await self.simulation.sleep(1.0)
            self.is_all_known = True

    async def _watch_progress(self) -> None:
        """Check that something is written now and then, until all work is done."""
        written, quiet_s = -1, 0.0
        while quiet_s < QUIET_S + (self.struck_s or 0.0):
            await self.simulation.sleep(_LOOKED_FOR_PROGRESS_S)
            quiet_s += _LOOKED_FOR_PROGRESS_S
            total = sum(map(self.oracles.head, self.conversation_ids))
            if total != written:
                written, quiet_s = total, 0.0
        left = [n for n in self.conversation_ids if self.oracles.is_unfinished(n)]
        self.oracles.broken(
            "P1", f"nothing was written for {quiet_s:.0f} s; {left} have work to do"
        )

    async def _finish_conversation(self, conversation_id: str) -> None:
        """Open it, end every pause and confirm waiting calls, until all its work is done."""

        async def release(_: _Server, conversations: Conversations) -> None:
            conversation = conversations[conversation_id]
            match self.oracles.waits_for(conversation_id):
                case "resume":
                    await conversation.resume()
                case "confirmation":
                    await conversation.confirm()
                case _:
                    await conversation.view()

        attempt = 0
        while not self.is_all_known or self.oracles.is_unfinished(conversation_id):
            owner = owner_of(self.disk.store, conversation_id)
            is_served = owner is not None and owner.is_held() and attempt % 4
            if not is_served or self.oracles.waits_for(conversation_id) is not None:
                try:
                    name = self._node_for(conversation_id, attempt)
                    await self._request(name, release, 20.0)
                except (Refused, OwnershipLost, Unavailable, OutcomeUnknown, Lost):
                    self.simulation.mark("not released")
            attempt += 1
            await self.simulation.sleep(min(1.0 + attempt / 10, 5.0))

    async def _finish_sending(self, sending: Sending) -> None:
        """Wait until a message's outcome is known, and for some also how their turns end."""
        await self._send_until_known(sending)
        learns = sending.is_cancelled or not self.simulation.chance("end not asked for", 0.5)
        if sending.acknowledged_at is None or not learns:
            return
        for attempt in count():
            name = self._node_for(sending.conversation_id, attempt)
            try:
                await self._request(name, lambda _, found: self._learn_end(sending, found), 100.0)
            except (NotReplaceable, MessageNotFound):
                if sending.is_gone:
                    return  # and the message that it replaces went with it
                self.oracles.broken("L1", f"{sending.message_id} is not known again")
                return
            except (Refused, OwnershipLost, Unavailable, OutcomeUnknown, Lost):
                await self.simulation.sleep(1.0)
            else:
                return

    async def _catch_up(self, bound_s: float) -> bool:
        """Wait until every subscriber has reached the end of its log; return False if it is late.

        While every node is drained, or is being started again, there is nowhere to read.
        """
        left_s = bound_s
        while any(at < self.oracles.head(name) for name, at in self.cursors.values()):
            if left_s <= 0:
                return False
            await self.simulation.sleep(_CAUGHT_UP_LOOK_S)
            left_s = left_s - _CAUGHT_UP_LOOK_S if self._can_be_read() else bound_s
        return True

    def _can_be_read(self) -> bool:
        """Return True if a node takes readers."""
        return any(
            server.node.is_alive and server.conversations is not None and not server.is_drained
            for server in self.servers.values()
        )

    async def _learn_end(self, sending: Sending, conversations: Conversations) -> None:
        turn = await conversations[sending.conversation_id].send(
            sending.content, message_id=sending.message_id, replaces=sending.replaces
        )
        end = await turn.end()
        if sending.is_gone:
            return  # that was the turn of another message under its id
        if sending.end is not None and sending.end[0] != end.outcome:
            told = sending.end[0]
            self.oracles.broken("E1", f"{sending.message_id}: told {told}, now {end.outcome}")
        sending.end = end.outcome, end.reply
