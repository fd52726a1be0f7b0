"""The owner world: one owner of a conversation after another, with nothing side by side.

The owner is the production code, over the simulated disk. The world itself plays the effects that
the owner starts: the agents of its turns, its condenser, its snapshots. So a command takes two or
three steps instead of dozens between nodes, and a short run reaches many places. While something
takes time (a tool, a model, a condenser, a claim), other commands come in between.

Each run draws which kinds of commands there are, and how often each comes: a run with few kinds
goes deep into their combinations. Runs in a row draw different features, and a run sends each kind
in each state before it repeats one there, so that a few runs try most of what there is. The
invariants are checked after each command.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import count
from typing import Any, TypeVar, cast
from zlib import crc32

from turnkeeper.runtime import (
    ActorContext,
    Delivery,
    Effect,
    Message,
    OutcomeUnknown,
    OwnershipLost,
    Ref,
    Refused,
    Region,
    Timers,
    Unavailable,
)
from turnkeeper.runtime.testing import Node, Simulation

from ..agents.agent import Agent
from ..agents.turn_context import TurnContext
from ..conversations.conversation import Conversation
from ..core.admission import AdmissionRefused, Appended, Duplicate
from ..core.commands import (
    Answer,
    Append,
    CancelTurn,
    Change,
    Command,
    Delete,
    DropOverdue,
    EndTurn,
    GetView,
    Interrupt,
    Leave,
    OnOverlap,
    Pause,
    Query,
    Resume,
    Retract,
    Send,
    Sent,
    Undo,
)
from ..core.condensation import Need, Proposal
from ..core.limits import Limits
from ..core.view import View
from ..core.working_state import ConversationSettings, PromptPolicy, Unfinished, WhileDraining
from ..errors import (
    Fenced,
    JournalOutcomeUnknown,
    JournalUnavailable,
    StaleTurn,
    TurnSuspended,
)
from ..events import (
    ActionEvent,
    Event,
    LoggedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    TaskListUpdatedEvent,
    TextDelta,
    TokenUsage,
    TurnEndedEvent,
    UserMessageEvent,
)
from ..models.base import ModelRequest, ModelResponse
from ..owner.actor import ConversationActor, Setup
from ..owner.subscriptions import Subscriptions
from ..tool_calls import ToolCall, ToolResult
from ._agents import pieces_of
from ._disk import LEASE_S, Disk, SimulatedJournal, owner_of
from ._oracles import INVARIANTS, Oracles, Sending, ShownAnswer
from ._states import check_state

__all__ = ["OwnerWorld"]

R = TypeVar("R")

_NAME = "c1"
_COMMANDS = 36
_NESTED_MAX = 2
_FINISH_MAX = 60
_LIMITS = Limits(
    known_messages_max=4,
    recent_events_max=4,
    snapshot_events=6,
    finished_calls_max=4,
)
_QUEUED_MAX = 3
_OVERLAPS_DRAWN: Sequence[Sequence[OnOverlap]] = (
    ("queue", "steer", "interrupt", "rollback", "reject"),
    ("queue", "interrupt"),
    ("steer", "steer", "rollback"),
    ("queue", "reject"),
    ("interrupt", "rollback"),
    ("steer", "steer", "interrupt"),
)
_STEPS_DRAWN = (
    ("say", "ask", "calls", "begin", "stream", "end"),
    ("ask", "ask", "stream", "end"),
    ("calls", "calls", "begin", "end"),
    ("stream", "stream", "say", "end"),
    ("begin", "say", "begin", "end"),
)
"""The steps of agents: a run draws one list, so a list with few kinds goes deep into these."""
_PROMPTS = (None, "be kind", "be brief")
_AT = datetime(2025, 1, 1, tzinfo=UTC)
_PARK_S = 3.0
_CONDENSE_S = 600.0
_RENEWED_S = 0.001


class _NotYet(Exception):
    """The command is answered only after the pause; until then its agent waits."""


@dataclass(slots=True)
class _Features:
    """The features of a run, and how often each comes."""

    is_resumable: bool
    unfinished: Unfinished
    prompt_policy: PromptPolicy
    has_prompts: bool
    condenses: bool
    faults: float


class _Request(Delivery[Command | Query]):
    """A command in the mailbox, and the answer to it."""

    def __init__(
        self,
        message: object,
        told: Callable[..., None] | None = None,
        refused: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.message = cast("Command | Query", message)
        self._ask = None
        self._told = told
        self._refused = refused
        self.is_answered = False
        self.value: Any = None
        self.error: BaseException | None = None

    def reply(self, value: object) -> None:
        if not self.is_answered:
            self.is_answered, self.value = True, value
            if self._told is not None:
                self._told(value)

    def fail(self, error: BaseException) -> None:
        if not self.is_answered:
            self.is_answered, self.error = True, error
            if self._refused is not None:
                self._refused(error)


class _Journal(SimulatedJournal):
    """The journal of one process, whose failures the world decides."""

    def __init__(self, world: OwnerWorld, node: Node, *, takeover: bool) -> None:
        super().__init__(world.disk, node, takeover=takeover)
        self._world = world

    async def ask(
        self,
        call: str,
        do: Callable[[], Coroutine[Any, Any, R]],
        *,
        is_write: bool,
        is_detached: bool = False,
    ) -> R:
        del is_detached
        return await self._world.call_journal(call, do, is_write=is_write)


class _Effect(Effect):
    """An effect that the owner has started, and that the world plays."""

    def __init__(self, process: _Process, run: Callable[[], Awaitable[None]], name: str) -> None:
        self.name = name
        kind, _, turn_id = name.partition(" ")
        self.turn_id = turn_id if kind == "turn" else ""
        """The turn that it runs the agent of; empty if it is another effect."""
        self.is_done = False
        self.run = run
        self.turn: TurnContext | None = None
        """The turn that its agent answers, once it has begun."""
        self.waits_for: _Request | None = None
        """The command of its agent that is answered after a pause."""
        self.is_acting = False
        """Its agent is in the middle of a step that takes time."""
        self.ends_turn = False
        """Its agent is ending the turn by itself."""
        self._process = process

    @property
    def unstarted(self) -> Sequence[str]:
        """The calls that the agent of a turn is told to start."""
        return cast("Sequence[str]", cast("partial[Any]", self.run).args[1]) if self.turn_id else ()

    @property
    def is_cancelled(self) -> bool:
        return self.is_done

    def cancel(self) -> None:
        self.is_done = True

    async def wait_until_ended(self) -> None:
        if not self.is_done:
            await self._process.play(self)


class _Ref(Ref[Command | Query]):
    """The mailbox of the owner of one process."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    async def ask(
        self, message: Message[R], *, timeout: float | None = None, control: bool = False
    ) -> R:
        del timeout, control
        request = _Request(message)
        self._process.mail.append(request)
        await self._process.handle()
        if not request.is_answered:
            raise _NotYet(request)
        if request.error is not None:
            raise request.error
        return cast("R", request.value)

    async def tell(self, message: object, *, control: bool = False) -> None:
        self.tell_nowait(message, control=control)

    def tell_nowait(self, message: object, *, control: bool = False) -> None:
        self._process.mail.insert(0 if control else len(self._process.mail), _Request(message))


class _Context(ActorContext):
    """The runtime, as the owner of one process uses it."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    @property
    def ref(self) -> Ref[Any]:
        return self._process.ref

    @property
    def is_at_rest(self) -> bool:
        return not self._process.mail and not self._process.is_handling

    @property
    def timers(self) -> Timers:
        return cast("Timers", self)

    def once(self, delay_s: float, message: object, *, key: object = None) -> None:
        """Arm the one timer that an owner has."""
        del message, key
        self._process.due_at = self._process.node.monotonic() + delay_s

    async def wait_for(self, awaited: Awaitable[R]) -> R:
        return await awaited

    def start_effect(self, run: Callable[[], Awaitable[None]], *, name: str) -> Effect:
        effect = _Effect(self._process, run, name)
        self._process.started(effect)
        return effect


class _Owner(ConversationActor):
    """The owner of one process, with that process in place of the runtime."""

    def __init__(self, process: _Process) -> None:
        super().__init__(_NAME, process.setup)
        self._process = process

    @property
    def context(self) -> _Context:
        return _Context(self._process)


class _Subscriptions(Subscriptions):
    """Stands in for the readers of one process: checks everything that readers would get."""

    def __init__(self, process: _Process) -> None:
        super().__init__(process.journal, _LIMITS)
        self._world = process.world
        self._shown = ShownAnswer(is_calm=True)

    def publish(
        self, conversation_id: str, events: Sequence[LoggedEvent], large_bytes: int = 0
    ) -> None:
        for logged in events:
            self._world.oracles.saw_event(conversation_id, logged, "readers")
            if (found := self._shown.see(logged.event)) is not None:
                self._world.oracles.broken("C3", found)
        super().publish(conversation_id, events, large_bytes)

    def publish_piece(self, conversation_id: str, piece: TextDelta, head: int) -> None:
        if (found := self._shown.add(piece)) is not None:
            self._world.oracles.broken("C2", found)
        super().publish_piece(conversation_id, piece, head)

    def owner_ended(self, conversation_id: str, *, is_wanted: bool) -> None:
        self._shown = ShownAnswer(is_calm=True)
        super().owner_ended(conversation_id, is_wanted=is_wanted)

    def deleted(self, conversation_id: str) -> None:
        self._shown = ShownAnswer(is_calm=True)
        self._world.told_deleted()
        super().deleted(conversation_id)


class _Process:
    """One process: its journal, its owner, and the effects that the owner has started."""

    def __init__(self, world: OwnerWorld, name: str, *, takeover: bool) -> None:
        features = world.features
        self.world = world
        # A node without a task: only its clocks, ids and random numbers are used.
        self.node = Node(world.simulation, name, 1, clock_rate=1.0)
        self.journal = _Journal(world, self.node, takeover=takeover)
        self.mail: list[_Request] = []
        self.unanswered: list[_Request] = []
        self.effects: list[_Effect] = []
        self.owner: ConversationActor | None = None
        self.is_handling = False
        self.is_gone = False
        """It has crashed, or was ended."""
        self.due_at: float | None = None
        """When the timer of the owner fires."""
        self.ref = _Ref(self)
        prompt = None
        if features.has_prompts:
            prompt = world.simulation.pick("system prompt", _PROMPTS)
            world.oracles.prompts[self.journal] = prompt
        settings = ConversationSettings(
            queued_messages_max=_QUEUED_MAX,
            system_prompt=prompt,
            prompt_policy=features.prompt_policy,
            unfinished=features.unfinished,
            is_resumable=features.is_resumable,
        )
        self.setup = Setup(
            agent=cast("Agent", self),  # its turns are played by the world
            journal=self.journal,
            subscriptions=_Subscriptions(self),
            condenser=_Condenser(self),
            settings=settings,
            verify="off",
            park_s=_PARK_S,
            condense_s=_CONDENSE_S,
            limits=_LIMITS,
            ports=self.node.ports,
        )
        self.journal.watch_lease(self.setup.subscriptions.lease_lost)

    @property
    def is_newest(self) -> bool:
        """True if no other process has claimed the conversation after this one."""
        return owner_of(self.world.disk.store, _NAME) is self.journal

    @property
    def is_draining(self) -> bool:
        return self.setup.drain.messages is not None

    def started(self, effect: _Effect) -> None:
        """Note an effect in the very step in which the owner starts it."""
        self.effects = [each for each in self.effects if not each.is_done][-8:]
        self.effects.append(effect)
        if effect.turn_id:
            self.world.turn_starts(self, effect)

    # --- its owner -------------------------------------------------------------------------------

    async def handle(self) -> None:
        """Let the owner take the messages in its mailbox; start an owner first if there is none."""
        if self.is_handling:
            return
        if self.is_gone:
            self.end(JournalUnavailable("the process is gone"))
            return
        self.is_handling = True
        owner = self.owner
        faults = self.world.faults
        try:
            if owner is None:
                owner = _Owner(self)
                await owner.on_start()
                self.owner = owner
            mail, self.mail = self.mail, []
            if mail:
                self.unanswered += mail
                await owner.receive_batch(mail)
        except Exception as error:  # noqa: BLE001 - the supervisor's boundary
            await self.fail(owner, error, has_failed=self.world.faults != faults)
        finally:
            self.is_handling = False
        self.unanswered = [each for each in self.unanswered if not each.is_answered]
        self.world.look(self)

    async def fail(
        self, owner: ConversationActor | None, error: BaseException, *, has_failed: bool
    ) -> None:
        """Check that an owner may fail like this, and end it as a supervisor does."""
        self.world.check_failure(self, owner, error, has_failed=has_failed)
        self.end(error)
        await self._stop(owner)

    def end(self, error: BaseException) -> None:
        """End all effects of the owner, and refuse its mail."""
        for effect in self.effects:
            effect.cancel()
        mail, self.mail = [*self.unanswered, *self.mail], []
        self.unanswered = []
        for request in mail:
            request.fail(error)

    async def _stop(self, owner: ConversationActor | None) -> None:
        self.owner = None
        self.due_at = None
        if owner is not None and hasattr(owner, "_working"):
            await owner.on_stop()

    async def stop(self) -> None:
        """Stop the owner while it rests."""
        owner = self.owner
        self.end(JournalUnavailable("the owner was stopped"))
        await self._stop(owner)

    async def leave(self) -> None:
        """End the process: its effects do nothing more."""
        self.is_gone = True
        self.end(JournalUnavailable("the process is gone"))
        await self.journal.__aexit__()

    async def play(self, effect: _Effect) -> None:
        """Run a condenser or a snapshot to its end."""
        if effect.is_done:
            return
        faults = self.world.faults
        owner = self.owner
        try:
            await effect.run()
        except Exception as error:  # noqa: BLE001 - an effect that raises fails its owner
            if self.owner is owner and not effect.is_done:
                await self.fail(owner, error, has_failed=self.world.faults != faults)
        effect.is_done = True


@dataclass(frozen=True, slots=True)
class _Condenser:
    """Proposes any range of the view that it was shown, even if the view has changed since."""

    process: _Process

    def need(self, view: View) -> Need | None:
        if not self.process.world.features.condenses:
            return None
        if view.unhandled_condensation_request:
            return "hard"
        return "soft" if len(view) > 4 else None  # noqa: PLR2004 - any small number

    async def propose(self, view: View, need: Need) -> Proposal | None:
        del need
        world = self.process.world
        await world.meanwhile(self.process)
        await world.meanwhile(self.process)
        start = world.simulation.draw("forget from", len(view))
        size = 1 + world.simulation.draw("forget so many", min(3, len(view) - start))
        ids = tuple(event.id for event in view[start : start + size])
        return Proposal(ids, world.simulation.pick("with a summary", (None, "a summary")))


@dataclass(frozen=True, slots=True)
class _Model:
    """Writes a text in pieces, or calls tools."""

    process: _Process
    turn: TurnContext

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        world, turn = self.process.world, self.turn
        world.oracles.asks_model(_NAME, turn.turn_id, request.view)
        await world.meanwhile(self.process)
        if world.simulation.chance("calls", 0.5):
            return ModelResponse(calls=world.calls())
        return ModelResponse(text=await world.write(self.process, turn, write))


class _Regions:
    """The region of one process, as a fork asks it to make room."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    def __getitem__(self, _: str) -> Ref[Command | Query]:
        return self._process.ref

    async def passivate(self, _: str) -> bool:
        """Return True: no fork has an owner here."""
        return True


class OwnerWorld:
    """One run of it."""

    def __init__(self, simulation: Simulation, turn: int | None = None) -> None:
        """`turn`: how many runs of this world come before it; None if that is not known."""
        pick = partial(_pick_evenly, simulation, turn)
        self.simulation = simulation
        self.features = _Features(
            is_resumable=pick("is resumable", (True, True, False)),
            unfinished=pick("unfinished", ("end", "resume")),
            prompt_policy=pick("prompt policy", ("current", "pinned")),
            has_prompts=pick("has prompts", (False, True, True)),
            condenses=pick("condenses", (False, False, True)),
            faults=pick("faults", (0.0, 0.0, 0.0, 0.03, 0.1)),
        )
        self.disk = Disk(simulation, has_one_shots=False)
        self.oracles = Oracles(simulation, self.disk, queued_max=_QUEUED_MAX)
        self.oracles.is_pinned = self.features.prompt_policy == "pinned"
        self.faults = 0
        """How many calls of journals have failed."""
        self._kinds = [
            kind for kind, weights in _KINDS for _ in range(pick(f"how many {kind}", weights))
        ]
        self._decks: dict[Hashable, list[int]] = {}
        """The options that have not come yet, by label and state: see `_deal`."""
        self._overlaps = pick("overlaps", _OVERLAPS_DRAWN)
        self._steps = pick("agent's steps", _STEPS_DRAWN)
        self._stands_still = "take_over" in self._kinds
        self._numbers = count(1)
        self._process = self._new_process()
        self._rival: _Process | None = None
        """The previous process, which does not know yet that it owns nothing any more."""
        self._is_healed = False
        self._is_interfering = False
        self._depth = 0
        self._told_deleted = 0
        self._sendings: list[Sending] = []
        self._appended: list[Event] = []
        self._shown: list[tuple[View, tuple[Event, ...]]] = []
        """Views that were given out, with the events that they had then."""
        self._rejected: set[str] = set()
        """The calls that the user rejected."""
        self._confirmed: dict[str, ConversationActor | None] = {}
        """The calls that the user confirmed, with the owner that was told."""

    def _broken(self, invariant: str, detail: str) -> None:
        self.simulation.broken(invariant, f"{INVARIANTS.get(invariant, '')}: {detail}")

    async def play(self) -> None:
        """Play commands, then end everything that runs, and check all of it."""
        await self._process.journal.__aenter__()
        for _ in range(_COMMANDS):
            await self._play_one(self._process)
        await self._finish()
        self.oracles.check_end()
        if self.simulation.chance("is read by a state", 0.25):
            check_state(self.simulation, self.oracles.events(_NAME))

    async def _finish(self) -> None:
        self._is_healed = self.disk.is_healed = True
        if self._rival is not None:
            await self._rival.leave()
            self._rival = None
        for _ in range(_FINISH_MAX):
            process = self._process
            await self._renew(process)
            if process.is_draining:
                await self._replace(process)
                continue
            match self.oracles.waits_for(_NAME):
                case "resume":
                    await self._answer_by_hand(process)
                    await self._post(process, Resume())
                case None if self.oracles.is_unfinished(_NAME):
                    await self._answer_by_hand(process)
                    await self._post(process, GetView())
                case "confirmation":
                    await self._post(process, Answer(answers=True))
                case _:
                    await self._post(process, GetView())
            await process.handle()
            for effect in [each for each in process.effects if not each.is_done]:
                waits_for = effect.waits_for
                if effect.turn_id and (waits_for is None or waits_for.is_answered):
                    await self._end_turn(process, effect)
            if process.owner is not None and not self.oracles.is_unfinished(_NAME):
                return
        self._broken("P1", f"{_NAME} has unfinished turns in the end")

    # --- processes and their journals ------------------------------------------------------------

    def _new_process(self, *, takeover: bool = False) -> _Process:
        return _Process(self, f"n{next(self._numbers)}", takeover=takeover)

    async def call_journal(
        self, call: str, do: Callable[[], Coroutine[Any, Any, R]], *, is_write: bool
    ) -> R:
        """Make a call, which may fail, and during which another process may act."""
        await self._interfere()
        fault = None
        chance = self.features.faults
        if is_write and chance and not self._is_healed and self.simulation.chance(call, chance):
            fault = self.simulation.pick("fault", ("refused", "lost", "unheard"))
            self.faults += 1
            self.simulation.mark(f"journal {fault}")
            self.oracles.moment(_NAME, fault)
        if fault == "refused":
            raise JournalUnavailable(f"{call}: nothing was done")
        if fault == "lost":
            raise JournalOutcomeUnknown(f"{call}: the answer is lost")
        result = await do()
        if call == "append" and self.simulation.chance("arrives twice", 0.1):
            again = await do()
            if list(cast("Sequence[int]", again)) != list(cast("Sequence[int]", result)):
                self._broken("L3", f"an append that came twice is at {result} and at {again}")
        await self._interfere()
        if fault == "unheard":
            raise JournalOutcomeUnknown(f"{call}: the answer is lost")
        return result

    async def _interfere(self) -> None:
        rival = self._rival
        if rival is None or rival.owner is None or self._is_interfering or rival.is_handling:
            return
        if self.simulation.chance("the other process acts", 0.3):
            self._is_interfering = True
            try:
                await self._play_one(rival)
            finally:
                self._is_interfering = False

    async def _take_over(self, process: _Process, how: str | None = None) -> None:
        """Let another process own the conversation, or stop the owner here while it rests."""
        if process is not self._process or self._is_interfering:
            return
        how = how or self._deal("another process", ("crash", "lease", "force", "rest"))
        if how == "rest":
            if not any(each.turn_id for each in process.effects if not each.is_done):
                await process.stop()
            return
        if how == "crash":
            await process.leave()
        elif how == "lease":
            await self.simulation.sleep(LEASE_S + 1.0)
        if self._rival is not None:
            await self._rival.leave()
        successor = self._new_process(takeover=how == "force")
        await successor.journal.__aenter__()
        self._process = successor
        self._rival = None if how == "crash" else process
        await successor.handle()
        if how == "lease" and self.simulation.chance("renewed too late", 0.5):
            await self._renew(process)
        await self._post(successor, GetView())

    async def _renew(self, process: _Process) -> None:
        """Renew a process's lease; if it was taken over, only once the takeover is done."""
        if process is self._process or self._process.is_newest:
            process.journal.renew(asked_at=process.node.monotonic())
            await self.simulation.sleep(_RENEWED_S)

    async def _drain(self, process: _Process) -> None:
        if process is not self._process or process.is_draining or self._is_interfering:
            return
        messages: WhileDraining = self.simulation.pick(
            "messages while draining", ("queue", "refuse")
        )
        process.setup.drain.begin(messages, until=0.0)
        self.oracles.drain_begins(process.journal, messages)

    async def _replace(self, process: _Process) -> None:
        """End a process that drains, and begin the next one."""
        faults = self.faults
        await self._post(process, Leave())
        await process.handle()
        await process.stop()
        self.oracles.drained(process.journal, is_sure=self.faults == faults)
        await process.leave()
        self._process = self._new_process()
        await self._process.journal.__aenter__()

    async def _wait(self, process: _Process) -> None:
        """Let some time pass, and the owner's timer fire."""
        await self.simulation.sleep(_PARK_S + 1.0)
        for each in (process, self._process):
            await self._renew(each)
        if process.due_at is not None and process.due_at <= process.node.monotonic():
            process.due_at = None
            process.ref.tell_nowait(DropOverdue())
            await process.handle()

    # --- commands --------------------------------------------------------------------------------

    async def _play_one(self, process: _Process) -> None:
        if process is self._process:
            if not process.journal.is_lease_valid():
                await self._renew(process)
            if process.is_draining and self.simulation.chance("is replaced", 0.2):
                await self._replace(process)
                return
        chance = self.simulation.chance
        if self.oracles.awaiting(_NAME) and chance("answered", 0.3):
            await self._answer(process)
            return
        if self.oracles.waits_for(_NAME) == "resume" and chance("resumed", 0.2):
            await self._resume(process)
            return
        # Without a turn, there is little that commands could interrupt.
        agents = [each for each in process.effects if each.turn_id and not each.is_done]
        has_agent = any(not each.is_acting for each in agents)
        if self.simulation.chance("goes on", 0.5):
            await (self._agent if has_agent else self._send)(process)
            return
        stands = self.oracles.running(_NAME) is not None, self.oracles.waits_for(_NAME)
        kind = self._deal("which", self._kinds, stands)
        await getattr(self, f"_{kind}")(process)

    def _deal(self, label: str, options: Sequence[R], state: Hashable = None) -> R:
        """Draw one of the options; in one state all of them come before any comes again."""
        tape = self.simulation.tape
        deck = self._decks.get((label, state))
        if not deck:
            deck = self._decks[label, state] = list(range(len(options)))
        chosen = deck.pop(int(tape.random.random() * len(deck)))
        return options[tape.draw(label, len(options), chosen)]

    async def meanwhile(self, process: _Process) -> None:
        """Play other commands while something takes time."""
        if self._depth >= _NESTED_MAX or self._is_healed or process.is_handling:
            return
        self._depth += 1
        for _ in range(self.simulation.draw("meanwhile", 3)):
            await self._play_one(process)
        self._depth -= 1

    async def _post(
        self,
        process: _Process,
        command: Command | Query,
        told: Callable[..., None] | None = None,
        refused: Callable[[BaseException], None] | None = None,
    ) -> None:
        process.mail.append(_Request(command, told, refused))
        if not self.simulation.chance("stays in the mailbox", 0.3):
            await process.handle()

    async def _send(self, process: _Process) -> None:
        simulation = self.simulation
        known = [each for each in self._sendings if not (each.refusal or each.is_gone)]
        if known and simulation.chance("sent again", 0.3):
            sending = simulation.pick("which again", known)
        else:
            number = next(self._numbers)
            # Ids need not rise.
            message_id = f"{simulation.pick('message id', ('m', 'z', 'a'))}{number:03}"
            target = [each.message_id for each in known if each.is_acknowledged]
            replaces = None
            if target and simulation.chance("replaces", 0.15):
                replaces = simulation.pick("replaces which", target)
            steps = simulation.steps
            sending = Sending(_NAME, message_id, f"say {number}", "u", number, steps, replaces)
            self._sendings.append(sending)
            self.oracles.sendings[message_id] = sending
        sending.attempts += 1
        overlap = self._deal("on overlap", self._overlaps)
        command = Send(
            sending.message_id, sending.content, on_overlap=overlap, replaces=sending.replaces
        )
        await self._post(
            process, command, partial(self._sent, sending), partial(self._not, sending)
        )

    def _sent(self, sending: Sending, sent: Sent) -> None:
        self.oracles.acknowledged(sending, sent.seq, sent.turn_id, is_duplicate=sent.is_duplicate)

    def _not(self, sending: Sending, error: BaseException) -> None:
        """Note that a chat message was refused."""
        if not isinstance(error, Refused):
            return
        if sending.attempts == 1:
            sending.refusal = repr(error)

    async def _cancel(self, process: _Process) -> None:
        known = [each for each in self._sendings if each.is_acknowledged and not each.is_gone]
        if not known:
            return
        sending = self.simulation.pick("cancel which", known)
        command = CancelTurn(sending.message_id, sending.turn_id)
        await self._post(process, command, partial(self._cancelled, sending))

    def _cancelled(self, sending: Sending, is_cancelled: bool) -> None:  # noqa: FBT001
        """Check that exactly the cancelled message is withdrawn, or its turn interrupted."""
        if not is_cancelled or sending.is_gone:
            return
        self.simulation.mark("cancelled")
        events = self.oracles.events(_NAME)
        newest = [e for e in events if getattr(e, "message_id", None) == sending.message_id][-1]
        ends = [e.outcome for e in events
                if isinstance(e, TurnEndedEvent) and e.turn_id == newest.turn_id]  # fmt: skip
        if not isinstance(newest, MessageWithdrawnEvent) and ends != ["interrupted"]:
            self._broken("E2", f"{sending.message_id} was cancelled, and {newest.kind}, {ends}")

    async def _interrupt(self, process: _Process) -> None:
        await self._post(process, Interrupt(None))

    async def _pause(self, process: _Process) -> None:
        await self._post(process, Pause())

    async def _resume(self, process: _Process) -> None:
        await self._post(process, Resume())

    async def _answer(self, process: _Process) -> None:
        awaiting = self.oracles.awaiting(_NAME)
        if not awaiting:
            return
        chance = self.simulation.chance
        answers = {call: "no" if chance("rejected", 0.5) else True for call in awaiting}

        def told(_: object) -> None:
            for call, answer in answers.items():
                if answer is True:
                    self._confirmed.setdefault(call, process.owner)
                else:
                    self._rejected.add(call)

        await self._post(process, Answer(cast("Any", answers)), told)

    async def _view(self, process: _Process) -> None:
        floor = self.oracles.head(_NAME) if process.is_newest else 0
        deletions = self.oracles.deleted[_NAME]

        def told(view: View) -> None:
            self._shown.append((view, tuple(view)))
            is_same = self.oracles.deleted[_NAME] == deletions
            name = process.node.name
            self.oracles.saw_view(_NAME, view, name, floor=floor if is_same else 0)

        await self._post(process, GetView(), told)

    async def _retract(self, process: _Process) -> None:
        known = [each for each in self._sendings if each.is_acknowledged and not each.is_gone]
        if known:
            turn_id = self.simulation.pick("retract which", known).turn_id
            await self._post(process, Retract(turn_id=turn_id))

    async def _undo(self, process: _Process) -> None:
        def told(messages: Sequence[UserMessageEvent]) -> None:
            for message in messages:
                self.oracles.undone(_NAME, message)

        await self._post(process, Undo(), told)

    async def _change(self, process: _Process) -> None:
        change_id = f"{self.simulation.pick('id', ('z', '0'))}-change{next(self._numbers)}"
        for _ in range(2):
            change = Change(title="a title", change_id=change_id)
            await self._post(process, change, partial(self._appended_at, change_id))

    def _appended_at(self, event_id: str, appended: Appended | Duplicate) -> None:
        self.oracles.saw_change(_NAME, appended.seq, event_id)

    async def _append(self, process: _Process) -> None:
        """Append an event of the application, or a known one once more."""
        simulation = self.simulation
        # An owner that was taken over does not know the outcome.
        known = self._appended if process.is_newest else ()
        event = simulation.pick("append which", (None, *known))
        if event is None:
            event_id = f"{simulation.pick('id', ('z', '0'))}-{next(self._numbers)}"
            event = TaskListUpdatedEvent(id=event_id, timestamp=_AT, tasks=())
            self._appended.append(event)
        await self._post(process, Append(event), partial(self._appended_at, event.id))

    async def _append_wrongly(self, process: _Process) -> None:
        """Append a result without a call: it is refused, and kept among the rejections."""
        event_id = f"wrong{next(self._numbers)}"
        wrong = ObservationEvent(id=event_id, timestamp=_AT, tool_call_id="nobody", content="wrong")
        log = self.disk.store.log(_NAME)
        has_begun = bool(log.records)  # else it need not be kept

        def refused(error: BaseException) -> None:
            is_kept = has_begun and self.disk.store.log(_NAME) is log  # it was not deleted since
            if not isinstance(error, AdmissionRefused) or not is_kept:
                return
            if not any(event_id.encode() in rejection.payload for rejection in log.rejections):
                self._broken("L7", event_id)

        def told(_: object) -> None:
            self._broken("T1", f"{event_id} is a result of nothing")

        await self._post(process, Append(wrong), told, refused)

    async def _call_by_hand(self, process: _Process) -> None:
        """Append a result, and then the call that it answers."""
        number = next(self._numbers)
        call_id = f"hand{number}"
        result = ObservationEvent(
            id=f"z-result{number}", timestamp=_AT, tool_call_id=call_id, content="done"
        )
        call = ActionEvent(
            id=f"z-call{number}",
            timestamp=_AT,
            tool_call_id=call_id,
            tool_name="act",
            llm_response_id=f"response{number}",
        )
        if not self.oracles.is_unfinished(_NAME):
            await self._post(process, Append(result, park=True))
            if not self.simulation.chance("its call does not come", 0.2):
                await self._post(process, Append(call))

    async def _answer_by_hand(self, process: _Process) -> None:
        """Append the results of calls that were appended by hand; no turn begins before them."""
        if self.oracles.running(_NAME) is None:
            for call_id in tuple(self.oracles.open_calls(_NAME)):
                result = ObservationEvent(
                    id=f"z-late{next(self._numbers)}",
                    timestamp=_AT,
                    tool_call_id=call_id,
                    content="late",
                )
                await self._post(process, Append(result))

    async def _delete(self, process: _Process) -> None:
        await self._post(process, Delete())

    async def _fork(self, process: _Process) -> None:
        head = self.oracles.head(_NAME)
        if not head or process.is_handling:
            return
        fork_id = f"fork{next(self._numbers)}"
        region = cast("Region[Command | Query]", _Regions(process))
        conversation = Conversation(_NAME, region, process.setup)
        try:
            await conversation.fork(fork_id, at=1 + self.simulation.draw("fork at", head))
        except (Refused, Unavailable, OutcomeUnknown, OwnershipLost):
            return
        self.oracles.saw_fork(fork_id)

    # --- the agent of the running turn -----------------------------------------------------------

    def turn_starts(self, process: _Process, effect: _Effect) -> None:
        """Check that the turn is in the log when its agent is started, and the agent's input."""
        running = self.oracles.running(_NAME)
        if process.is_newest and (running is None or running.turn_id != effect.turn_id):
            # The turn may have ended in the same batch: then its agent is cancelled in this very
            # step.
            started = [e.turn_id for e in self.oracles.events(_NAME) if e.kind == "turn_started"]
            if effect.turn_id not in started:
                self._broken("C1", f"turn {effect.turn_id} starts, and is not in the log")
        due = self.oracles.open_calls(_NAME) - {*effect.unstarted, *self.oracles.tools.started}
        for call in sorted(due):
            if process.owner is not None and self._confirmed.get(call) is process.owner:
                self._broken("T16", f"call {call}")

    async def _agent(self, process: _Process) -> None:
        """Let the agent of the running turn take its next step."""
        agents = [each for each in process.effects if each.turn_id and not each.is_done]
        if not agents:
            return
        effect = agents[-1]
        if effect.waits_for is not None:
            if not effect.waits_for.is_answered:
                return
            effect.waits_for = None
        owner = process.owner
        if owner is None or process.is_handling or effect.is_acting:
            return
        effect.is_acting = True
        try:
            if effect.turn is None:
                # As `ConversationActor` does, with no await before the agent's first.
                owner.check_lease()
                running = owner.running_turn(effect.turn_id)
                epoch = owner._working.epoch  # noqa: SLF001 - as it is given to the real one
                effect.turn = TurnContext(_NAME, running.turn_id, epoch, owner, effect.unstarted)
                self.oracles.agent_begins(_NAME, effect.turn_id)
                await self._take_up(process, effect.turn)
                return
            await self._step(process, effect, effect.turn)
        except (TurnSuspended, StaleTurn):
            effect.is_done = True
        except _NotYet as waits:
            effect.waits_for = waits.args[0]
        except AdmissionRefused as refusal:
            self._broken("world", f"an agent did nothing wrong, and was refused: {refusal!r}")
        except Refused as refusal:
            await self._end_turn(process, effect, refusal)
        except (Unavailable, OutcomeUnknown, OwnershipLost) as error:
            # Its owner has failed, or fails by this: the agent is the first to see that the lease
            # has run out.
            if process.owner is owner and not effect.is_done:
                await process.fail(owner, error, has_failed=False)
            effect.is_done = True
        finally:
            effect.is_acting = False

    async def _take_up(self, process: _Process, turn: TurnContext) -> None:
        """Answer the calls that are open when a turn is resumed."""
        self.oracles.saw_view(_NAME, turn.view, f"turn {turn.turn_id}", floor=0)
        for action in turn.open_calls.values():
            if turn.is_unstarted(action.tool_call_id):
                await turn.run_calls([action], partial(self._run_call, process))
            else:
                await turn.run_calls([action], _not_known)

    async def _step(self, process: _Process, effect: _Effect, turn: TurnContext) -> None:
        simulation = self.simulation
        if turn.open_calls:  # it waited in the middle of a step, and goes on after it
            await self._take_up(process, turn)
            return
        self.oracles.saw_view(_NAME, turn.view, f"turn {turn.turn_id}", floor=0)
        match self._deal("agent step", self._steps):
            case "ask":
                view = await turn.begin_step()
                self._check_step_begins(process, effect)
                if turn.open_calls:
                    return
                response = await turn.ask(_Model(process, turn), ModelRequest(view))
                if response.calls:
                    await self._propose(process, effect, turn, response.calls)
                else:
                    await turn.say(response.text, usage=TokenUsage(input_tokens=1))
            case "say":
                await turn.say(f"hm {next(self._numbers)}")
            case "calls":
                await self._propose(process, effect, turn, self.calls())
            case "begin":
                await turn.begin_step()
                self._check_step_begins(process, effect)
            case "stream":
                text = await self.write(process, turn, turn.writer())
                if not simulation.chance("does not say it", 0.5):
                    await turn.say(text)
            case _ if simulation.chance("raises", 0.15):
                await self._end_turn(process, effect, RuntimeError("the agent raises"))
            case _:
                effect.ends_turn = True
                await turn.say(f"done {next(self._numbers)}", ends_turn=True)
                await self._end_turn(process, effect)

    def _check_step_begins(self, process: _Process, effect: _Effect) -> None:
        # An agent whose owner has ended is cancelled: here it goes on, and nothing comes of it.
        if effect.is_done:
            return
        if process.is_newest and self.oracles.waits_for(_NAME) is not None:
            self._broken("T12", f"{_NAME}[{self.oracles.head(_NAME)}]")

    async def _propose(
        self, process: _Process, effect: _Effect, turn: TurnContext, calls: Sequence[ToolCall]
    ) -> None:
        asks = self.features.is_resumable and self.simulation.chance("asks the user", 0.4)
        actions = await turn.propose_calls(calls, needs_confirmation=asks)
        await self.meanwhile(process)
        if self.simulation.chance("begins a step between", 0.2):
            await turn.begin_step()
            self._check_step_begins(process, effect)
        if self._stands_still and self.simulation.chance("stands still", 0.3):
            await self._take_over(process, "lease")
        if effect.is_done:  # its owner has ended, and so it was cancelled
            return
        for action in actions:
            await turn.run_calls([action], partial(self._run_call, process))

    async def _run_call(self, process: _Process, action: ActionEvent) -> str:
        call_id = action.tool_call_id
        if call_id in self._rejected:
            self._broken("T9", f"call {call_id}, which the user rejected")
        self.oracles.starts_tool(_NAME, call_id, process.journal, is_idempotent=False)
        await self.meanwhile(process)
        text = f"done {call_id[-6:]}"
        self.oracles.tools.returned.setdefault(call_id, set()).add(text)
        return text

    def calls(self) -> Sequence[ToolCall]:
        """Draw the calls of one response."""
        return [ToolCall("act", {"n": n}) for n in range(1 + self.simulation.draw("calls", 3))]

    async def write(
        self, process: _Process, turn: TurnContext, write: Callable[[str], Awaitable[None]]
    ) -> str:
        """Write an answer piece by piece; no two begin alike."""
        begins, count = f"{next(self._numbers)}:", 1 + self.simulation.draw("pieces", 4)
        said = ""
        for piece in pieces_of(self.oracles, turn.turn_id, begins, count):
            said += piece
            await write(piece)
        await self.meanwhile(process)
        return said

    async def _end_turn(
        self, process: _Process, effect: _Effect, error: BaseException | None = None
    ) -> None:
        """Tell the owner that the agent has returned or raised; its run is over."""
        owner = process.owner
        effect.is_done = True
        for call in effect.unstarted:  # it was to start them, and does not
            self._confirmed.pop(call, None)
        if owner is None:
            return
        epoch = owner._working.epoch  # noqa: SLF001 - as it is given to the real one
        end = EndTurn(effect.turn_id, epoch)
        if error is not None:
            self.oracles.raised.add(effect.turn_id)
            end = EndTurn(effect.turn_id, epoch, type(error).__name__, "it raised")
        try:
            if not await process.ref.ask(end):
                self.oracles.raised.discard(effect.turn_id)  # its agent runs again
        except (Refused, Unavailable, OutcomeUnknown, OwnershipLost):
            self.oracles.raised.discard(effect.turn_id)  # another owner may run it again
        except _NotYet:
            effect.is_done, effect.ends_turn = False, True
            effect.waits_for = _Request(GetView())  # nothing more comes from it

    async def _effect(self, process: _Process) -> None:
        """Run a condenser or a snapshot that was started."""
        others = [each for each in process.effects if not each.turn_id and not each.is_done]
        if others and not process.is_handling:
            await process.play(self.simulation.pick("which effect", others))

    # --- what must hold --------------------------------------------------------------------------

    def told_deleted(self) -> None:
        """Check that the log is really deleted when readers are told so."""
        self._told_deleted += 1
        if self.oracles.deleted[_NAME] < self._told_deleted:
            self._broken("D1", _NAME)

    def check_failure(
        self,
        process: _Process,
        owner: ConversationActor | None,
        error: BaseException,
        *,
        has_failed: bool,
    ) -> None:
        """Check that an owner that failed had a reason."""
        if process.is_gone:
            return
        if has_failed and isinstance(error, Unavailable | OutcomeUnknown):
            return
        is_lost = not process.is_newest or not process.journal.is_lease_valid(
            since=getattr(owner, "_claimed_at", None)
        )
        if (
            isinstance(error, OwnershipLost)
            and is_lost
            and not (isinstance(error, Fenced) and process.is_newest)
        ):
            return
        self._broken("world", f"the owner on {process.node.name} failed: {error!r}")

    def look(self, process: _Process) -> None:
        """Check an owner that rests."""
        owner = process.owner
        for view, events in self._shown[-4:]:
            if tuple(view) != events:
                self._broken("V1", f"a view of {[event.id for event in events]} has changed")
        if owner is None or not process.is_newest:
            return
        state = self.oracles.state(_NAME)
        turns = state.turns
        running = turns.running
        if owner.view.seq != state.seq:
            self._broken("V1", f"the owner rests at {owner.view.seq}, the log is at {state.seq}")
        working = owner._working.state.turns  # noqa: SLF001 - at rest it is the fold of the log
        for kept, logged in (
            (list(working.queued), list(turns.queued)),
            (working.waits_for, turns.waits_for),
            (working.awaiting, turns.awaiting),
        ):
            if kept != logged:
                self._broken("V1", f"the owner rests with {kept}, and the log says {logged}")
        agents = [each for each in process.effects if each.turn_id and not each.is_done]
        for agent in agents:
            is_over = running is None or running.turn_id != agent.turn_id
            if is_over and not agent.ends_turn:
                self._broken("T14", f"turn {agent.turn_id}")
        waits = turns.waits_for is not None or process.is_draining
        if not waits and running is not None and not agents:
            self._broken("P1", f"turn {running.turn_id} runs, and has no agent")
        # No turn begins before the results of calls that were appended by hand.
        waits = waits or bool(self.oracles.open_calls(_NAME))
        if not waits and running is None and turns.queued:
            self._broken("P1", f"{[*turns.queued]} wait, and no turn runs")
        parked = set()
        for request in process.unanswered:
            match request.message:
                case Append(event=ObservationEvent(tool_call_id=call_id)):
                    parked.add(call_id)
                case _ if turns.waits_for is None:
                    self._broken("M2", f"{request.message}")
                case _:
                    pass
        if parked and parked <= self.oracles.called(_NAME):
            self._broken("M2", f"the results of {sorted(parked)}, whose calls have come")


def _pick_evenly(simulation: Simulation, turn: int | None, label: str, options: Sequence[R]) -> R:
    """Return one of the options: in a round of as many runs, each comes once."""
    chosen = None
    if turn is not None:
        number, place = divmod(turn, len(options))
        chosen = _order_of(label, number, len(options))[place]
    return options[simulation.tape.draw(label, len(options), chosen)]


@lru_cache
def _order_of(label: str, number: int, count: int) -> Sequence[int]:
    """Return the order in which the options come in one round."""
    hashes = [crc32(f"{label} {number} {n}".encode()) for n in range(count)]
    return sorted(range(count), key=hashes.__getitem__)


async def _not_known(_: ActionEvent) -> ToolResult:
    return ToolResult("it may have happened", may_have_happened=True)


_RARE = (0, 0, 2)
_SOME = (0, 1, 2)
_KINDS: Sequence[tuple[str, Sequence[int]]] = (
    ("send", (2, 1, 3)),
    ("agent", (3, 2, 4)),
    ("cancel", _SOME),
    ("interrupt", _RARE),
    ("pause", _SOME),
    ("view", (0, 1)),
    ("effect", (1,)),
    ("retract", _RARE),
    ("undo", _RARE),
    ("change", _RARE),
    ("append", _SOME),
    ("append_wrongly", _RARE),
    ("call_by_hand", _RARE),
    ("delete", _RARE),
    ("fork", _RARE),
    ("take_over", _SOME),
    ("drain", _RARE),
    ("wait", _RARE),
)
"""The kinds of commands, and how often each may come."""
