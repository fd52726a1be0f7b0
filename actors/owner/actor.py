"""The conversation actor: the only writer of its conversation.

It owns one log at its newest epoch. Its loop is always the same five moves:

1. take the messages that wait in the mailbox, at most `batch_max`;
2. decide which events follow from each, folding them at once into the working state;
3. commit all of them in one durable write;
4. publish them to subscribers, and answer the callers;
5. start effects: agents and condensers (`condensing.py`), child tasks that talk back through the
   mailbox.

It promises: nothing is seen outside before its commit has returned; a command is all or nothing;
an action is durable before its effect starts; no model, tool or condenser is awaited here.

If a commit fails, every caller of the batch gets the journal's own error, and this actor is
discarded with its working state. Its supervisor starts another, which claims the next epoch, reads
the log, and ends the turn that was cut off. The log survives a crash. A partial answer is kept when
its turn is interrupted, and lost when the process dies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeVar

import anyio

from turnkeeper.runtime import (
    Actor,
    Delivery,
    Effect,
    InvariantViolation,
    Message,
    OutcomeUnknown,
    OwnershipLost,
    Ports,
    Ref,
    Refused,
    TurnkeeperError,
    Unavailable,
)
from turnkeeper.runtime.lowlevel import closing_scopes, persist, running_task

from ..agents.agent import Agent
from ..agents.turn_context import TurnContext, is_own_failure
from ..agents.watcher import NoteFailure, Watcher, Watching
from ..core.admission import AdmissionRefused
from ..core.commands import (
    Append,
    AppendAll,
    BeginStep,
    Change,
    Command,
    Delete,
    DropOverdue,
    EndTurn,
    GetView,
    NoteRequest,
    Pause,
    Propose,
    ProposeFailed,
    ProposeLate,
    Query,
    Recover,
    Stream,
    TurnAppend,
)
from ..core.condensation import Condenser
from ..core.decide import decide
from ..core.limits import Limits
from ..core.listing import changes_listing
from ..core.metrics import Metrics
from ..core.parking import Parking
from ..core.snapshots import Slices
from ..core.state import ColdLoad
from ..core.stuck import SeenEvent
from ..core.turn_rules import decide_piece, decide_request
from ..core.turn_table import RunningTurn
from ..core.view import View, ViewCheck
from ..core.working_state import (
    ConversationSettings,
    StartTurn,
    StopTurn,
    TurnEffect,
    WorkingState,
)
from ..errors import (
    ConversationDeleted,
    ConversationNotFound,
    ConversationsClosed,
    CorruptLog,
    EventIdConflict,
    Fenced,
    LeaseExpired,
    ResultNotKept,
    StaleTurn,
    TurnPaused,
    TurnSuspended,
)
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    Event,
    LLMConvertibleEvent,
    LoggedEvent,
    TextDelta,
    TokenUsage,
)
from ..journal import Journal, Listing, Record, Snapshot
from ..log_lines import log_failure, log_unavailable
from ..values.text import error_text
from ..values.type_names import a_type
from .batch import Decided, Taken, between_deletions, events_of
from .condensing import Condensing
from .draining import Drain
from .loading import fold_log, in_slices, load_state
from .look_ups import find_events, look_up, look_up_in_batch, may_be_known, note_decided
from .nodes import NodeLink
from .subscriptions import Subscriptions
from .wait_graph import Inside, WaitGraph, turn_of

__all__ = ["ConversationActor", "Forking", "Setup", "Verify"]

T = TypeVar("T")
Failure = TypeVar("Failure", bound=Exception)

_SAMPLED = 1 / 64
_PARK_TIMER = "park"

Verify = Literal["off", "sampled", "always"]
"""How often, after a commit, the view is rebuilt from the log on the side and compared."""


_APPENDS = (Append, AppendAll)
_steers_of = attrgetter("steers")


def _has_all_its_events(command: Command | Query) -> bool:
    """True if a command needs no new ids in a log that has begun: its events have theirs."""
    return type(command) in _APPENDS or (isinstance(command, TurnAppend) and not command.ends)


# Commands and queries that neither answer an open call nor need it to be answered.
_LEAVING_CALLS_OPEN = (
    BeginStep,
    Change,
    GetView,
    NoteRequest,
    Pause,
    Propose,
    ProposeFailed,
    ProposeLate,
    Stream,
)


@dataclass(slots=True)
class Forking:
    """A fork that is being made. The commands of handles of its name wait until it is made."""

    made: anyio.Event = field(default_factory=anyio.Event)
    """Set even if it could not be made."""
    is_free: bool = False
    """True once its name was found free: from then on, owners of the name wait before they begin.
    """


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings and services that all conversations of one `Conversations` share."""

    agent: Agent
    journal: Journal
    subscriptions: Subscriptions
    condenser: Condenser | None
    settings: ConversationSettings
    verify: Verify
    park_s: float
    condense_s: float
    limits: Limits
    ports: Ports
    wait_graph: WaitGraph = field(default_factory=WaitGraph)
    drain: Drain = field(default_factory=Drain)
    watching: Watching = field(default_factory=Watching)
    node_link: NodeLink = field(default_factory=NodeLink)
    forking: dict[str, Forking] = field(default_factory=dict)
    """The forks that are being made, by their names."""


def _as_answer(error: Failure) -> Failure:
    """Return the error, without its traceback if it is a refusal, which is an ordinary answer.

    The traceback refers to the frame that decided, and the frame to the batch that holds the
    refusal: a reference cycle, which only the garbage collector could free.
    """
    return error.with_traceback(None) if isinstance(error, Refused) else error


class ConversationActor(Actor[Command | Query]):
    """The owner of one conversation. The region in `Conversations` spawns one for each id."""

    batch_max: ClassVar[int] = 64

    # Instances share one table of names only if the first is complete before many are made. If a
    # hundred begin at once, each one since then has a dictionary of its own: 670 bytes. So all
    # attributes are named here, also that of `Actor`, which has no slots: the dictionary is never
    # made.
    __slots__ = (
        "_agent_effect",
        "_agent_of",
        "_claimed_at",
        "_condensing",
        "_conversation_id",
        "_held",
        "_is_step_held",
        "_is_wanted",
        "_listed_seq",
        "_parking",
        "_running",
        "_seq",
        "_setup",
        "_snapshot_effect",
        "_snapshot_seq",
        "_spent",
        "_turnkeeper_life",
        "_view",
        "_working",
        "recently_seen",
        "steps",
    )

    # Set by `_open`. `_working` is ahead of the log from a decision until its commit.
    _claimed_at: float
    _working: WorkingState

    # The committed state, for readers and effects; `_show_state` sets it after each commit.
    recently_seen: Sequence[SeenEvent | LLMConvertibleEvent]
    steps: int
    _spent: tuple[Metrics, Sequence[TokenUsage]]
    _seq: int
    _running: RunningTurn | None
    _is_step_held: bool

    def __init__(self, conversation_id: str, setup: Setup) -> None:
        self._conversation_id = conversation_id
        self._setup = setup
        self._view: View | None = None
        """The committed view; None from a commit until `view` is next read."""
        self._agent_effect: Effect | None = None
        self._agent_of = ""
        """The turn that the agent's effect runs for."""
        self._held: Sequence[Taken] = ()
        """Commands of an agent that is not resumable, sent during a pause: decided after it."""
        self._condensing: Condensing | None = None
        if setup.condenser is not None:
            self._condensing = Condensing(conversation_id, setup.condenser, setup.condense_s)
        self._parking: Parking[Taken] | None = None
        """Made when the first result is parked: few conversations park any."""
        self._snapshot_effect: Effect | None = None
        self._snapshot_seq = 0
        self._listed_seq: int | None = None
        """The seq of the newest listing; None until this owner's first append writes one."""
        self._is_wanted = True
        """True until the log has been read, and then while a turn runs or a message waits."""

    # --- the loop: five moves --------------------------------------------------------------------

    def receive_batch(
        self, deliveries: Sequence[Delivery[Command | Query]]
    ) -> Coroutine[Any, Any, None]:
        """Make move 1, and return the coroutine that makes the others.

        A batch with a deletion is taken part by part: its later commands go to another log.
        """
        for delivery in deliveries:
            if isinstance(delivery.message, Delete):
                return self._run_around_deletions(deliveries)
        return self._run(self._take(deliveries), deliveries)

    async def _run(
        self, batch: Sequence[Taken], deliveries: Sequence[Delivery[Command | Query]] = ()
    ) -> None:
        """Make moves 2 to 5 for a batch that was taken. `deliveries`: those of its callers.

        A thousand owners may wait at the commit at once, and the garbage collector looks at every
        object that they hold. So this is one coroutine, and it lets go of all that led to the
        decisions.
        """
        try:
            # Before the decisions, which do not wait: find the ids that memory no longer has.
            for taken in batch:
                if may_be_known(taken.command, self._working.state):
                    await look_up(taken, self._working, self._setup.journal)

            # 2. Decide. Commands that were parked or held are not in `decided`, and parked results
            # that were released now are. If the commit fails, the runtime answers the callers of
            # the former.
            decided = self._decide(batch)
            deliveries, answers = decided.deliveries, decided.answers
            records, shown, effects = decided.records, decided.shown, decided.effects
            rejections = decided.rejections
            del batch, taken, decided

            # 3. Commit.
            # Not beside a log that this batch begins: if the commit fails, no deletion would remove
            # what was kept under a name without a conversation.
            if self._seq and rejections:
                name, epoch = self._conversation_id, self._working.epoch
                await self._setup.journal.reject(name, rejections, epoch=epoch)
            if records:
                with self._setup.watching.watcher.committing(self._conversation_id, len(records)):
                    seqs = await self.context.wait_for(self._commit(records))
                if not self._are_in_place(records, seqs):
                    await self._refuse_places(records, seqs)
            else:
                # A write proves that no rival has taken over; without one, the lease has to.
                if not self._working.state.seq:
                    await self._check_is_empty()
                self.check_lease()

            # 4. Publish, and answer the callers. 5. Start effects.
            self._publish(shown, self._working.note_sizes(records))
            self._answer(deliveries, answers)
            self._start_effects(effects, has_written=bool(records))
        except Exception as error:  # noqa: BLE001 - raised below
            failure = self._lost_or(error)
            try:
                # The runtime answers any other error, which a watcher or a journal of the
                # application may raise, with `ActorFailed`: the events may have been written by
                # then.
                if isinstance(failure, TurnkeeperError):
                    for delivery in deliveries:
                        delivery.fail(failure)
                if deliveries:
                    self._raise_if_refused(failure)
                if failure is not error:
                    raise failure from error
                raise
            finally:
                del failure  # its traceback refers to this frame, and so to this owner

    def _lost_or(self, error: Exception) -> Exception:
        """Return the error, or `LeaseExpired` if the log is gone: a newer owner has deleted it."""
        if isinstance(error, ConversationNotFound):
            return LeaseExpired(self._conversation_id, self._working.epoch)
        return error

    def _raise_if_refused(self, error: Exception) -> None:
        """Raise `InvariantViolation` if the journal has refused this owner.

        A refused command does not end its batch: its caller alone gets the refusal. So a refusal
        that ends the batch is the journal's, which must never refuse the newest owner's append.
        """
        if isinstance(error, Refused):
            raise InvariantViolation(
                "the journal refused a write of the newest owner of conversation "
                f"{self._conversation_id}, of epoch {self._working.epoch}; no event was written; "
                "the owner is started again from the log"
            ) from error

    # --- 1. take ---------------------------------------------------------------------------------

    def _take(self, deliveries: Sequence[Delivery[Command | Query]]) -> Sequence[Taken]:
        """Give each command its time and ids."""
        ports, has_begun = self._setup.ports, self._working.state.seq > 0
        now = ports.now()
        taken: list[Taken] = []
        for each in deliveries:
            needs_ids = not (has_begun and _has_all_its_events(each.message))
            taken.append(Taken(each.message, now, ports.ids.block() if needs_ids else 0, each))
        return taken

    # --- 2. decide -------------------------------------------------------------------------------

    def _decide(self, batch: Sequence[Taken]) -> Decided:
        """Decide each command in turn, and return all that follows."""
        self._working.draining = self._setup.drain.messages
        if self._agent_effect is not None or (
            self._condensing is not None and self._condensing.effect is not None
        ):
            # Invariant: `view` is the committed view. The working state is ahead of the log from
            # here until the commit has returned. Agents and condensers may read the view while the
            # commit is awaited: so it is made now. No other code reads it then.
            self._view = self.view
        decided = Decided()
        turns = self._working.state.turns
        for taken in batch:
            self._decide_one(taken, decided)
            if turns.queued and turns.running is None:
                # This message came during a pause, or while an earlier owner was drained, and
                # waited for the answer to a call that was appended by hand. Its turn starts before
                # any other.
                recover = Recover(enforced_away=())
                self._decide_one(Taken(recover, taken.now, self._setup.ports.ids.block()), decided)
        return decided

    def _decide_one(self, taken: Taken, decided: Decided) -> None:
        """Decide a command, and then the parked results that its calls release."""
        command = taken.command
        if decided.shown:
            look_up_in_batch(taken, decided, self._working, committed_seq=self._seq)
        if (parking := self._parking) and not self._may_precede_more_calls(command):
            self._release_parked(parking, decided)
        if isinstance(command, ProposeLate) and self._condensing is not None:
            self._condensing.late = command.asked
        if isinstance(command, DropOverdue) and parking:
            self._refuse_overdue(parking, decided)
        try:
            decision = decide(self._working, command, taken)
        except (AdmissionRefused, EventIdConflict) as refusal:
            if (answer := self._park(taken, _as_answer(refusal))) is not None:
                decided.refuse(taken, answer)
        except TurnPaused:
            self._held = (*self._held, taken)
        except Exception as error:  # noqa: BLE001 - answered to its caller alone, in `_answer`
            decided.refuse(taken, _as_answer(error))
        else:
            self._working.apply(decision)
            decided.add(taken, decision)
            if parking:
                note_decided(decision.events, self._working, parking.tickets)
                # Do this now, while `look_up_in_batch` still finds these events.
                for parked in parking.take_forestalled(decision.events):
                    self._decide_one(parked.ticket, decided)
                is_waiting = parking.is_waiting(self._working.state.admission.open_calls)
                if not (is_waiting and self._may_precede_more_calls(command)):
                    self._release_parked(parking, decided)
            if self._held and self._working.state.turns.waits_for is None:
                held, self._held = self._held, ()
                for waiting in held:
                    self._decide_one(waiting, decided)

    def _park(
        self, taken: Taken, refusal: AdmissionRefused | EventIdConflict
    ) -> TurnkeeperError | None:
        """Park a result that came before its call. Return the error if its caller must not wait.

        If one event of a refused command is parked already, the command waits for that event. It is
        decided again once the event is in the log, and stays refused if the event is refused.
        """
        command, parking = taken.command, self._parking
        if parking and (parked := parking.find(events_of(command))):
            if parking.join(parked, refusal, taken):
                return None
            return OutcomeUnknown(
                f"append on conversation {self._conversation_id}: event {parked.event.id} is "
                "parked, and too many callers wait for it; it may yet get into the log; "
                "append it again, or read back"
            )
        if not (
            isinstance(command, Append) and command.park and isinstance(refusal, AdmissionRefused)
        ):
            return refusal
        if parking is None:
            parking = self._parking = Parking(wait_s=self._setup.park_s)
        return parking.park(refusal, taken, now=self._setup.ports.loop_time())

    def _release_parked(self, parking: Parking[Taken], decided: Decided) -> None:
        """Append the parked results whose calls have come."""
        for parked in parking.take_ready(self._working.state.admission.open_calls):
            self._decide_one(parked.ticket, decided)

    def _refuse_overdue(self, parking: Parking[Taken], decided: Decided) -> None:
        """Refuse the parked results whose calls have not come in time."""
        for parked in parking.take_overdue(self._setup.ports.loop_time()):
            decided.refuse(parked.ticket, parked.refusal)

    def _may_precede_more_calls(self, command: Command | Query) -> bool:
        """True if more calls of the newest response may still be appended after this command.

        A result closes its response: no further call can join it. So parked results wait until
        the last call of their response has come, or a command comes that needs the calls answered.
        """
        if isinstance(command, Append) and isinstance(command.event, ActionEvent):
            newest = self._working.state.view[-1:]
            return any(
                isinstance(event, ActionEvent)
                and event.llm_response_id == command.event.llm_response_id
                for event in newest
            )
        return isinstance(command, _LEAVING_CALLS_OPEN)

    # --- 3. commit -------------------------------------------------------------------------------

    def _commit(self, records: Sequence[Record]) -> Awaitable[Sequence[int]]:
        """Write the events of the batch. Everything visible outside waits for this."""
        working = self._working
        return self._setup.journal.append(
            self._conversation_id,
            records,
            epoch=working.epoch,
            expected_seq=working.state.seq - len(records) + 1,
            listing=self._new_listing(records),
            is_unfinished=working.state.turns.has_work,
        )

    async def _check_is_empty(self) -> None:
        """Raise `Fenced` if the log has begun: a fork may take our name while our log is empty."""
        with suppress(ConversationNotFound):
            found = await self._setup.journal.info(self._conversation_id)
            raise Fenced(
                self._conversation_id,
                epoch=self._working.epoch,
                expected_seq=1,
                found_epoch=found.epoch,
                head=found.head,
            )

    def _are_in_place(self, records: Sequence[Record], seqs: Sequence[int]) -> bool:
        """True if the journal has the events where they were decided."""
        last = self._working.state.seq
        return seqs[0] == last - len(records) + 1 and seqs[-1] == last

    async def _refuse_places(self, records: Sequence[Record], seqs: Sequence[int]) -> None:
        """Raise the error for events that the log already has, at other seqs than decided."""
        last = self._working.state.seq
        epoch = self._working.epoch
        if (await self._setup.journal.info(self._conversation_id)).epoch != epoch:
            # The same events were sent to a newer owner too, in another process, and it wrote them.
            raise LeaseExpired(self._conversation_id, epoch)
        raise InvariantViolation(
            f"conversation {self._conversation_id}: decided seqs {last - len(records) + 1} to "
            f"{last}, the journal has them at {seqs[0]} to {seqs[-1]}"
        )

    def _new_listing(self, records: Sequence[Record]) -> Listing | None:
        """Return the listing after these records; None if they cannot have changed it."""
        state, listed_seq = self._working.state, self._listed_seq
        if listed_seq is not None and not changes_listing(
            records, since=state.seq - listed_seq, in_turn=state.turns.running is not None
        ):
            return None
        # If the commit fails, this owner ends, and the next one begins with a listing.
        self._listed_seq = state.seq
        return state.listing

    # --- 4. publish ------------------------------------------------------------------------------

    def _publish(self, shown: Sequence[Event | TextDelta], large_bytes: int) -> None:
        """Show the committed batch to effects, then to subscribers.

        `large_bytes`: the bytes of its large events.
        """
        seq = self._seq
        self._show_state()
        if not seq and self._seq:
            self._setup.subscriptions.owner_began(self._conversation_id, self, (0, None))
            # The lease may have been lost since the commit, before readers were here.
            self.end_if_lapsed()
        name, setup = self._conversation_id, self._setup
        is_followed = setup.watching.is_watched or setup.subscriptions.is_followed(name)
        events: list[LoggedEvent] = []
        for one in shown:
            if isinstance(one, TextDelta):
                # Readers get the piece after the events decided before it, and before later ones.
                self._publish_events(events, large_bytes)
                events = []
                self._publish_piece(one, seq)
                is_followed = True  # by the answer that is being written
            else:
                seq += 1
                if is_followed:
                    events.append(LoggedEvent(seq, one))
        self._publish_events(events, large_bytes)

    def _publish_events(self, events: Sequence[LoggedEvent], large_bytes: int) -> None:
        if events:
            self._setup.watching.watcher.committed(self._conversation_id, events)
            self._setup.subscriptions.publish(self._conversation_id, events, large_bytes)

    def _publish_piece(self, piece: TextDelta, seq: int) -> None:
        if piece.text:
            self._setup.subscriptions.publish_piece(self._conversation_id, piece, seq)

    def _answer(
        self, deliveries: Sequence[Delivery[Command | Query]], answers: Sequence[object]
    ) -> None:
        """Answer the callers of the committed batch. An error is the refusal of a command."""
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, Exception):
                delivery.fail(answer)
            else:
                delivery.reply(answer)

    def _show_state(self) -> None:
        """Show the working state, which is committed now, to readers and effects."""
        state = self._working.state
        turns = state.turns
        self._view = None
        self._seq = state.seq
        self._running = running = turns.running
        self._is_wanted = turns.has_work
        if self._setup.watching.is_watched:
            self._setup.watching.watcher.owned(self._conversation_id, len(turns.queued))
        if running is None:
            self._is_step_held = False
            return
        # Only the agent of the running turn reads these.
        self.recently_seen = state.recently_seen
        self._spent = state.spent
        self.steps = state.iteration
        self._is_step_held = turns.waits_for is not None or running.turn_id in map(
            _steers_of, turns.queued.values()
        )

    # --- 5. start effects ------------------------------------------------------------------------

    def _start_effects(self, effects: Sequence[TurnEffect], *, has_written: bool) -> None:
        for effect in effects:
            match effect:
                case StopTurn(turn_id, is_drained):
                    self._stop_agent(turn_id)
                    if is_drained:
                        self._setup.drain.interrupted.add(self._conversation_id)
                case StartTurn(turn_id, unstarted):
                    self._start_agent(turn_id, unstarted)
        if self._condensing is not None:
            self._condensing.start_if_needed(self)
        if has_written:
            if self._setup.verify != "off":
                self._start_verifying()
            self._start_snapshot()
        if self._parking and (deadline := self._parking.next_deadline) is not None:
            delay_s = deadline - self._setup.ports.loop_time()
            self.context.timers.once(max(0.0, delay_s), DropOverdue(), key=_PARK_TIMER)

    def _stop_agent(self, turn_id: str) -> None:
        # No need to wait for its end: anything it still sends has its turn id, and is refused as
        # stale.
        if self._agent_effect is not None and self._agent_of == turn_id:
            self._agent_effect.cancel()

    def _start_agent(self, turn_id: str, unstarted: tuple[str, ...]) -> None:
        # If a later command of the same batch has ended the turn, its `StopTurn` follows, and an
        # effect that is cancelled before it begins never runs.
        run = partial(self._run_turn, turn_id, unstarted)
        self._agent_effect = self.context.start_effect(run, name=f"turn {turn_id}")
        self._agent_of = turn_id

    def _start_verifying(self) -> None:
        if self._setup.verify == "always" or self._setup.ports.random.random() < _SAMPLED:
            run = partial(self._run_verifying, self._working, self.view, self._seq)
            self.context.start_effect(run, name="verify")

    def _start_snapshot(self) -> None:
        """Start to write a snapshot if one is due; they are rare enough to cost an event O(1)."""
        state = self._working.state
        new = state.seq - self._snapshot_seq
        if new < self._setup.limits.snapshot_events or new < len(state.admission.events):
            return
        if self._snapshot_effect is None or self._snapshot_effect.is_done:
            self._snapshot_seq = state.seq
            # Taken here, while the working state is the committed one; written beside the loop.
            run = partial(self._run_snapshot, state.writing_snapshot(), self._working.epoch)
            self._snapshot_effect = self.context.start_effect(run, name="snapshot")

    # --- opening and leaving the log -------------------------------------------------------------

    async def on_start(self) -> None:
        await self._open()

    async def _open(self) -> None:
        """Claim the log as it is now, and end or resume the turn that the last owner left."""
        journal = self._setup.journal
        # An owner that began before the fork would go on with an empty log.
        forking = self._setup.forking.get(self._conversation_id)
        if forking is not None and forking.is_free:
            await forking.made.wait()
        # The claim comes first: once it returns, an append of an older owner has either landed, and
        # is read below, or is refused for good.
        self._claimed_at = self._setup.ports.monotonic()
        claim = await journal.claim(self._conversation_id)
        try:
            state, enforced_away = await load_state(
                journal, self._conversation_id, claim.head, limits=self._setup.limits
            )
        except (ConversationNotFound, CorruptLog) as error:
            # The log ends before the head that was claimed. If the lease still holds, that is
            # damage. If it has run out, another process has claimed and deleted the log since.
            is_valid = journal.is_lease_valid(since=self._claimed_at)
            if isinstance(error, CorruptLog) and is_valid:
                raise
            raise LeaseExpired(self._conversation_id, claim.epoch) from error
        self._working = WorkingState(
            self._conversation_id, claim.epoch, self._setup.settings, state
        )
        self._show_state()
        self._snapshot_seq = state.restored_seq
        self._listed_seq = None
        if enforced_away or self._is_wanted:
            ports = self._setup.ports
            await self._run([Taken(Recover(enforced_away), ports.now(), ports.ids.block())])
        newest = await self._find_newest()
        self.check_lease()  # there is no await from here to the end
        # Readers are told last: `on_stop`, which undoes this, is not called if the start fails.
        # They find in the log what the last owner committed and could not publish. As long as the
        # log is empty, they follow the journal: another process may make a fork under this name.
        if self._working.state.seq:
            self._setup.subscriptions.owner_began(self._conversation_id, self, newest)

    async def _find_newest(self) -> tuple[int, str] | None:
        """Return the seq and the id of the newest event; None without events or readers here.

        This one read saves each reader that has seen the whole log a read of its own.
        """
        seq = self._working.state.seq
        if not seq or not self._setup.subscriptions.has_readers(self._conversation_id):
            return None
        try:
            page = await self._setup.journal.read(self._conversation_id, after=seq - 1, limit=1)
        except (ConversationNotFound, CorruptLog):
            # Either the lease has run out and another process has deleted the log. Or the record is
            # damaged, and this owner has read a snapshot instead: it can work, and its readers will
            # find the damage.
            return None
        return (seq, page[0].event_id) if page else None

    async def on_stop(self) -> None:
        for parked in self._parking.take_all() if self._parking is not None else ():
            if parked.ticket.delivery is not None:
                error = ResultNotKept(self._conversation_id, parked.event.tool_call_id)
                parked.ticket.delivery.fail(error)
        self.watcher.released(self._conversation_id)
        is_draining = self._setup.drain.messages is not None
        self._setup.subscriptions.owner_ended(
            self._conversation_id, is_wanted=self._is_wanted and not is_draining
        )
        if is_draining:
            await self._release()

    async def _release(self) -> None:
        """Let another process claim the conversation now, and not only when the lease ends."""
        epoch = self._working.epoch
        try:
            await self._setup.journal.release(self._conversation_id, epoch=epoch)
        except TurnkeeperError as error:
            log_unavailable("conversation not released", error, conversation=self._conversation_id)

    # --- deleting the log ------------------------------------------------------------------------

    async def _run_around_deletions(self, deliveries: Sequence[Delivery[Command | Query]]) -> None:
        """Carry out a batch part by part, in its order: each deletion stands alone."""
        try:
            for some in between_deletions(deliveries):
                taken = self._take(some)
                if isinstance(taken[0].command, Delete):
                    await self._delete(some[0], taken[0])
                else:
                    await self._run(taken, some)
        except Exception as error:
            if isinstance(error, TurnkeeperError):  # as in `_run`
                for delivery in deliveries:
                    delivery.fail(error)
            self._raise_if_refused(error)
            raise

    async def _delete(self, delivery: Delivery[Command | Query], taken: Taken) -> None:
        """Delete the log, end everything that runs on it, and open a new log under the same id.

        Messages taken before this one are deleted with the log; later ones go to the new log.
        """
        await look_up(taken, self._working, self._setup.journal)
        try:
            decide(self._working, taken.command, taken)
        except Refused as refusal:
            delivery.fail(refusal)
            return
        journal, epoch = self._setup.journal, self._working.epoch
        try:
            if isinstance(taken.command, Delete) and (listed := taken.command.listed) is not None:
                found = await journal.info(self._conversation_id)
                if not found.is_unchanged_since(listed):
                    delivery.reply(None)
                    return
            deletion = await journal.delete(self._conversation_id, epoch=epoch)
        except Refused as refusal:
            delivery.fail(refusal)  # there was nothing to delete, or it is damaged
            return
        self._setup.subscriptions.deleted(self._conversation_id)
        self._setup.subscriptions.owner_ended(self._conversation_id, is_wanted=False)
        self._fail_waiting(ConversationDeleted(self._conversation_id))
        delivery.reply(deletion)
        self._drop_effects()
        await self._open()

    def _fail_waiting(self, error: ConversationDeleted) -> None:
        """Answer the commands that are held or parked."""
        waiting, self._held = list(self._held), ()
        if self._parking is not None:
            waiting += (parked.ticket for parked in self._parking.take_all())
        for one in waiting:
            if one.delivery is not None:
                one.delivery.fail(error)

    def _drop_effects(self) -> None:
        """Cancel the effects of the deleted log.

        No need to wait for their end: anything they still send or write has an older epoch.
        """
        for effect in (self._agent_effect, self._snapshot_effect):
            if effect is not None:
                effect.cancel()
        self._agent_effect = self._snapshot_effect = None
        self.recently_seen = ()  # events of the deleted log
        if self._condensing is not None:
            self._condensing.drop()

    # --- the effects, each a child task ----------------------------------------------------------

    async def _run_turn(self, turn_id: str, unstarted: tuple[str, ...]) -> None:
        """Run the agent of one turn: an effect beside the loop."""
        working = self._working
        self.check_lease()
        # There is no await between the check above and the agent's first one.
        running = self.running_turn(turn_id)  # raises if it has ended before its agent began
        turn = TurnContext(self._conversation_id, turn_id, working.epoch, self, unstarted)
        try:
            with self.watcher.running(self._conversation_id, running, self._setup.agent) as note:
                await self._run_agent(turn, working.epoch, note)
        finally:
            if self._running is None:  # else it may be the effect of the next turn
                self._agent_effect = None

    async def _run_agent(self, turn: TurnContext, epoch: int, note_failure: NoteFailure) -> None:
        turn_id = turn.turn_id
        inside = Inside(self._setup.wait_graph, self._conversation_id, id(running_task()))
        turn_of.set(inside)
        failure: BaseException | None = None
        end = EndTurn(turn_id, epoch)
        try:
            with closing_scopes(f"agent of turn {turn_id}"):
                running: object = self._setup.agent.run(turn)
                if isawaitable(running):
                    await running
                else:
                    raise TypeError(
                        f"the agent's `run` returned {a_type(running)}; write it as an `async def` "
                        "that answers with `turn.say` or `turn.stream`"
                    )
        except BaseException as error:
            if not is_own_failure(error):
                if isinstance(error, BaseExceptionGroup):
                    # Beside the agent's cancellation, trio raises what its tasks got that wrote to
                    # the turn after its end. That is no failure, and the runtime would report it.
                    raise (error.split((StaleTurn, TurnSuspended))[1] or error) from None
                raise
            if isinstance(error, LeaseExpired):
                self.check_lease()  # raises if it is this owner's; another's is the turn's failure
            if isinstance(error, StaleTurn | TurnSuspended) and not self._is_going_on(turn):
                return  # the turn was ended or held from outside, and the log has that already
            failure = error
            note_failure(error)
            end = EndTurn(turn_id, epoch, type(error).__name__, error_text(error))
        finally:
            inside.is_over = True
        try:
            await self._end_run(turn, end, failure)
        finally:
            del failure  # its traceback refers to this frame

    async def _end_run(
        self, turn: TurnContext, end: EndTurn, failure: BaseException | None
    ) -> None:
        """End the turn after a run of its agent, if it still goes on; log what the agent raised."""
        fields = {"conversation": self._conversation_id, "turn": turn.turn_id}
        if isinstance(failure, BaseExceptionGroup) and not self._is_going_on(turn):
            # What its tasks got that wrote to the turn after its end is no failure.
            failure = failure.split((StaleTurn, TurnSuspended))[1]
        if turn.is_held:
            # The agent swallowed `TurnSuspended`, or raised it in a group. A later run of the
            # agent ends the turn.
            if failure is not None:
                log_failure("agent failed in a turn that is held", failure, **fields)
            return
        has_ended: bool | None = None
        try:
            has_ended = self._is_going_on(turn) and await self.tell_owner(end)
        finally:
            # An interrupt of this turn cancels the wait above.
            if failure is not None:
                if has_ended:
                    log_failure("turn failed", failure, **fields)
                elif not self._is_going_on(turn):
                    log_failure("agent failed after its turn's end", failure, **fields)
                elif has_ended is not None:  # a pause holds the turn
                    log_failure("agent failed in a turn that is held", failure, **fields)
                # Else the owner has ended, and the failure may only be a consequence of that.

    def _is_going_on(self, turn: TurnContext) -> bool:
        """True if this run still answers its turn; a `StaleTurn` then came from another turn."""
        running = self._running
        return running is not None and running.turn_id == turn.turn_id and not turn.is_held

    async def tell_owner(self, command: Message[T]) -> T | None:
        """Ask this owner as an effect's last act. Returns None if the owner or the turn has ended.

        A journal's error is the owner's own failure, which its supervisor handles. What ran before
        in this task, an agent or a condenser, may have cancelled it: that does not end the wait.
        """
        try:
            return await persist(partial(self.context.ref.ask, command))
        except (StaleTurn, ConversationsClosed, OwnershipLost, Unavailable, OutcomeUnknown):
            return None

    async def _run_snapshot(self, slices: Slices[Snapshot], epoch: int) -> None:
        snapshot = await in_slices(slices)
        self.check_lease()
        try:
            await self._setup.journal.write_snapshot(self._conversation_id, snapshot, epoch=epoch)
        except TurnkeeperError as error:
            # Losing a snapshot costs time at the next activation, never data.
            log_unavailable("snapshot not written", error, conversation=self._conversation_id)

    async def _run_verifying(self, working: WorkingState, view: View, seq: int) -> None:
        """Rebuild the view from the log and compare: an effect. A divergence fails the actor."""
        check = ViewCheck()
        try:
            await fold_log(self._setup.journal, self._conversation_id, 0, seq, check.fold)
        except (Unavailable, OutcomeUnknown) as error:
            log_unavailable("view not verified", error, conversation=self._conversation_id)
            return
        except ConversationNotFound:
            return  # deleted meanwhile; the owner may not have opened its new log yet
        except Refused:
            if self._working is not working:
                return  # deleted, and begun anew
            raise
        found = check.find_divergence(view)
        if found is not None and self._working is working:
            self.check_lease()
            raise InvariantViolation(
                f"the view of conversation {self._conversation_id} at seq {seq} is not the fold of "
                f"its log: {found}; the log is right; the owner is started again from it"
            )

    # --- for its readers: `LiveOwner` ------------------------------------------------------------

    def end_if_lapsed(self) -> bool:
        if self._setup.journal.is_lease_valid(since=self._claimed_at):
            return False
        # Goes ahead of waiting messages. It writes nothing, so its batch checks the lease, and that
        # ends this owner.
        self.context.ref.tell_nowait(GetView(), control=True)
        return True

    def recent_after(self, seq: int) -> Sequence[LoggedEvent]:
        if not self._setup.journal.is_lease_valid(since=self._claimed_at):
            return ()  # another process may have written more
        found: list[LoggedEvent] = []
        for logged in self._working.recent_backwards():
            if logged.seq <= seq:
                break
            if logged.seq <= self._seq:  # else it is decided and not committed yet
                found.append(logged)
        return found[::-1] if found and found[-1].seq == seq + 1 else ()

    # --- for the running turn: `TurnOwner` -------------------------------------------------------

    @property
    def view(self) -> View:
        """The committed view, for agents and condensers. Made when it is first read after a commit.

        If one of them may be running, `_decide` has read it before the working state moved on.
        """
        if self._view is None:
            self._view = self._working.state.view
        return self._view

    @property
    def metrics(self) -> Metrics:
        totals, new = self._spent  # added up here: few agents ask
        return totals.plus(new) if new else totals

    @property
    def epoch(self) -> int:
        return self._working.epoch

    @property
    def ref(self) -> Ref[Command | Query]:
        return self.context.ref

    @property
    def ports(self) -> Ports:
        return self._setup.ports

    @property
    def watcher(self) -> Watcher:
        return self._setup.watching.watcher

    @property
    def is_step_held(self) -> bool:
        is_leaving = self._setup.drain.messages is not None and self._working.hands_turns_over
        return self._is_step_held or is_leaving

    @property
    def is_agent_resumable(self) -> bool:
        return self._setup.settings.is_resumable

    @property
    def limits(self) -> Limits:
        return self._setup.limits

    @property
    def answer_length_max(self) -> int:
        return self._setup.settings.answer_length_max

    def check_lease(self) -> None:
        """Raise `LeaseExpired` if this owner may have been taken over.

        An effect outside cannot be fenced, so there must be no await between this check and it.
        """
        if not self._setup.journal.is_lease_valid(since=self._claimed_at):
            raise LeaseExpired(self._conversation_id, self._working.epoch)

    def running_turn(self, turn_id: str) -> RunningTurn:
        if self._running is None or self._running.turn_id != turn_id:
            raise StaleTurn(self._conversation_id, turn_id)
        return self._running

    def take_at_once(self, command: Stream | NoteRequest) -> bool:
        # Invariant: at rest, the working state is the committed one, and no earlier command waits
        # in the mailbox. There is no await from here to the end.
        is_valid = self._setup.journal.is_lease_valid(since=self._claimed_at)
        if not (self.context.is_at_rest and is_valid):
            return False
        decision = (
            decide_piece(self._working, command)
            if isinstance(command, Stream)
            else decide_request(self._working, command, self._setup.ports.now())
        )
        if decision is None:
            return False  # the turn fails, which takes a commit
        self._working.apply(decision)
        if decision.piece is not None:
            self._publish_piece(decision.piece, self._seq)
        return True

    def running_condenser(self) -> Effect | None:
        return None if self._condensing is None else self._condensing.running()

    def must_wait_for_condenser(self) -> bool:
        return self._condensing is not None and self._condensing.must_be_awaited(self.view)

    def is_too_long(self) -> bool:
        return self._condensing is not None and self._condensing.is_too_long(self.view)

    async def find_broken(self) -> tuple[str, ...]:
        """Return the events in the view that enforcement over the whole log would remove."""
        view, load = self.view, ColdLoad()
        await fold_log(self._setup.journal, self._conversation_id, 0, self._seq, load.fold)
        state, _ = load.finish()
        kept = {event.id for event in state.view}
        return tuple(event.id for event in view if event.id not in kept)

    async def find_result(self, tool_call_id: str) -> LoggedEvent | None:
        """Return the result of this call, if it is in the view."""
        for event in reversed(self.view):
            if isinstance(event, RESULT_CLASSES) and event.tool_call_id == tool_call_id:
                found = await find_events([event.id], self._working, self._setup.journal)
                return found.get(event.id)
        return None
