"""The conversation actor: the only writer of its conversation.

It owns one log at its newest epoch, and does five moves, always the same:

1. take what waits in the mailbox, at most `batch_max` messages;
2. decide what follows from each, folding it at once into the working state;
3. commit all of it in one durable write;
4. publish it to subscribers, and answer the callers;
5. start effects: agents and condensers, child tasks that talk back through the mailbox.

It promises: nothing is seen outside before its commit has returned; a command is all or nothing;
an action is durable before its effect starts; no model, tool or condenser is awaited here.

When a commit fails, every caller of the batch gets the journal's own error, and this actor with
its working state is thrown away: its supervisor starts another, which claims the next epoch,
reads the log and ends what was left unfinished. The log survives a crash; what a running turn's
model had said and not finished is lost with the process, and kept over an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import ClassVar, Literal, TypeVar

import structlog

from turnkeeper.runtime import (
    Actor,
    Delivery,
    Effect,
    InvariantViolation,
    Message,
    OutcomeUnknown,
    OwnershipLost,
    Ports,
    Refused,
    TurnkeeperError,
    Unavailable,
    clear_stray_cancellation,
)

from ._decide import decide
from ._loading import fold_log, load_state
from ._owner import Decision, Owner, Policy, Stamp, StartTurn, StopTurn
from ._parking import Parking
from ._records import logged_event, record_of
from ._subscriptions import Subscriptions
from ._text import error_text
from ._waits import Inside, Waits, turn_of
from .admission import AdmissionRefused
from .agents import Agent, OwnerSide, TurnContext
from .commands import (
    Append,
    AppendAll,
    Command,
    Delete,
    DropOverdue,
    EndTurn,
    Propose,
    ProposeFailed,
    Query,
    Recover,
    Send,
    Stream,
)
from .condensers import Condenser, Proposal
from .errors import (
    ConversationDeleted,
    LeaseExpired,
    ResultNotKept,
    StaleTurn,
    TurnPaused,
    TurnSuspended,
)
from .events import (
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    TextDelta,
    UserMessageEvent,
    encode_event,
)
from .journal import Journal, Rejection, Snapshot
from .state import ColdLoad
from .turns import KnownMessage, RunningTurn, content_digest
from .view import View, ViewCheck

__all__ = ["ConversationActor", "Setup", "Verify"]

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_SAMPLED = 1 / 64
_SNAPSHOT_EVENTS = 200
_PARK_TIMER = "park"

Verify = Literal["off", "sampled", "always"]
"""How often, after a commit, the view is rebuilt from the log on the side and compared."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every conversation of one `Conversations` shares."""

    agent: Agent
    journal: Journal
    subscriptions: Subscriptions
    waits: Waits
    condenser: Condenser
    policy: Policy
    verify: Verify
    park_s: float
    ports: Ports


@dataclass(frozen=True, slots=True)
class _Taken:
    """One command of a batch; the owner's own has no delivery."""

    command: Command | Query
    stamp: Stamp
    delivery: Delivery[Command | Query] | None


@dataclass(frozen=True, slots=True)
class _Decided:
    """What a command led to: a decision, or why not."""

    taken: _Taken
    decision: Decision
    refusal: Exception | None = None


class ConversationActor(Actor[Command | Query]):
    """One conversation's owner. Spawned by the region in `Conversations`, one for each id."""

    batch_max: ClassVar[int] = 64

    def __init__(self, conversation_id: str, setup: Setup) -> None:
        self._conversation_id = conversation_id
        self._setup = setup
        self._agent: Effect | None = None
        self._agent_of = ""
        self._held: list[_Taken] = []
        """What an agent that cannot be run again said during a pause: decided after it."""
        self._condenser_effect: Effect | None = None
        self._is_condensing_hard = False
        self._condenser_rests_at: tuple[int, bool] | None = None
        self._parking: Parking[_Taken] = Parking(wait_s=setup.park_s)
        self._snapshot_effect: Effect | None = None
        self._snapshot_seq = 0
        self._is_wanted = True
        """Somebody may wait for what this owner would do; until the log has been read, that too."""

    async def on_start(self) -> None:
        await self._open()

    async def _open(self) -> None:
        """Own the log as it is now, and end or take up what an owner before left unfinished."""
        journal = self._setup.journal
        # Claimed before the head is read: an append of the owner before this one has then either
        # landed, and is read, or never will.
        self._claimed_at = self._setup.ports.monotonic()
        claim = await journal.claim(self._conversation_id)
        state, enforced_away = await load_state(journal, self._conversation_id, claim.head)
        self._owner = Owner(self._conversation_id, claim.epoch, self._setup.policy, state)
        self._show_state()
        self._snapshot_seq = state.seq
        if enforced_away or self._is_wanted:
            stamp = Stamp(self._setup.ports.now(), self._setup.ports.ids.block())
            await self._run([_Taken(Recover(enforced_away), stamp, None)])
        # Last, for an owner that could not start is not told to stop. What the one before this
        # one committed and could not publish is in the log.
        self._setup.subscriptions.owner_began(self._conversation_id)

    async def on_stop(self) -> None:
        for parked in self._parking.take_all():
            if parked.ticket.delivery is not None:
                error = ResultNotKept(self._conversation_id, parked.event.tool_call_id)
                parked.ticket.delivery.fail(error)
        self._setup.subscriptions.owner_ended(self._conversation_id, is_wanted=self._is_wanted)

    async def receive_batch(self, deliveries: Sequence[Delivery[Command | Query]]) -> None:
        try:
            for is_deletion, some in groupby(
                deliveries, lambda one: isinstance(one.message, Delete)
            ):
                if is_deletion:
                    for delivery in some:
                        await self._delete(delivery)
                else:
                    await self._run(await self._take(list(some)))
        except Exception as error:
            for delivery in deliveries:
                delivery.fail(error)
            if isinstance(error, Refused):
                # A refusal of one command was answered to it alone. One that comes out here was
                # the journal's, of an append that this actor must be able to make.
                raise InvariantViolation(
                    f"the journal refused the owner of conversation {self._conversation_id}"
                ) from error
            raise

    async def _delete(self, delivery: Delivery[Command | Query]) -> None:
        """Delete the log, end all that went on over it, and own a new one of that name.

        So what was sent before this is gone with the log, and what is sent after it is not.
        """
        command, state = delivery.message, self._owner.state
        if isinstance(command, Delete) and command.head not in {None, state.seq}:
            delivery.reply(None)
            return
        journal, epoch = self._setup.journal, self._owner.epoch
        try:
            deletion = await journal.delete(self._conversation_id, epoch=epoch)
        except Refused as refusal:
            delivery.fail(refusal)  # there was nothing to delete, or it is damaged
            return
        gone = ConversationDeleted(self._conversation_id)
        self._setup.subscriptions.deleted(self._conversation_id)
        waiting = [*self._held, *(parked.ticket for parked in self._parking.take_all())]
        for one in waiting:
            if one.delivery is not None:
                one.delivery.fail(gone)
        delivery.reply(deletion)
        # Not waited for: what they still send or write is of an older epoch.
        for effect in (self._agent, self._condenser_effect, self._snapshot_effect):
            if effect is not None:
                effect.cancel()
        self._agent = self._condenser_effect = self._snapshot_effect = None
        self._condenser_rests_at, self._held = None, []
        await self._open()

    async def _run(self, batch: Sequence[_Taken]) -> None:
        decided = self._decide(batch)
        try:
            await self._commit(decided)
        except Exception as error:
            # Parked results that this batch let out are among the decided, and in no mailbox.
            for one in decided:
                if one.taken.delivery is not None:
                    one.taken.delivery.fail(error)
            raise
        self._publish(decided)
        self._start_effects(decided)

    # --- 1. take ---------------------------------------------------------------------------------

    async def _take(self, deliveries: Sequence[Delivery[Command | Query]]) -> Sequence[_Taken]:
        """Give each command its time and ids, and what the log knows beyond our memory."""
        batch = []
        ports = self._setup.ports
        now = ports.now()
        for delivery in deliveries:
            command = delivery.message
            stamp = Stamp(now, ports.ids.block())
            match command:
                case Send(message_id=message_id):
                    stamp.known_message = await self._look_up_message(message_id)
                case Append(event=event):
                    stamp.known_event = await self._look_up_event(event.id)
                    if isinstance(event, UserMessageEvent) and event.message_id is not None:
                        stamp.known_message = await self._look_up_message(event.message_id)
                case AppendAll(events=events):
                    for event in events:
                        stamp.known_event = await self._look_up_event(event.id)
                        if stamp.known_event is not None:
                            break
                case _:
                    pass
            batch.append(_Taken(command, stamp, delivery))
        return batch

    async def _look_up_message(self, message_id: str) -> KnownMessage | None:
        # Nobody but this actor writes the log, so what is read here still holds when it decides.
        turns = self._owner.state.turns
        # What is known now goes with the command: by the time that it is decided, what was decided
        # before it in its batch may have made the table forget.
        if (known := turns.find(message_id)) is not None:
            return known
        if not turns.may_have_forgotten(message_id):
            return None
        found = await self._setup.journal.find_messages(self._conversation_id, [message_id])
        if message_id not in found:
            return None
        seq = found[message_id]
        event = await self._read_one(seq)
        if not isinstance(event, UserMessageEvent | MessageQueuedEvent):
            raise InvariantViolation(
                f"seq {seq} of conversation {self._conversation_id} carries message id "
                f"{message_id} and is a {event.kind}"
            )
        digest = content_digest(event.content, event.images)
        return KnownMessage(message_id, seq, event.turn_id or "", digest)

    async def _look_up_event(self, event_id: str) -> LoggedEvent | None:
        owner = self._owner
        if (recent := owner.recent.get(event_id)) is not None:
            return recent
        if event_id > owner.state.event_id_max:
            return None
        found = await self._setup.journal.find_events(self._conversation_id, [event_id])
        if event_id not in found:
            return None
        return LoggedEvent(found[event_id], await self._read_one(found[event_id]))

    async def _read_one(self, seq: int) -> Event:
        records = await self._setup.journal.read(self._conversation_id, after=seq - 1, limit=1)
        return logged_event(self._conversation_id, records[0]).event

    # --- 2. decide -------------------------------------------------------------------------------

    def _decide(self, batch: Sequence[_Taken]) -> Sequence[_Decided]:
        return [decided for taken in batch for decided in self._decide_one(taken)]

    def _decide_one(self, taken: _Taken) -> Iterator[_Decided]:
        """What this command leads to, and then what the calls it brings let out of the parking."""
        command = taken.command
        if isinstance(command, DropOverdue):
            for parked in self._parking.take_overdue(self._setup.ports.monotonic()):
                refusal = AdmissionRefused(self._conversation_id, parked.violation)
                yield _Decided(parked.ticket, Decision(), refusal)
        try:
            decision = decide(self._owner, command, taken.stamp)
        except AdmissionRefused as refusal:
            if not isinstance(command, Append) or not command.park:
                yield _Decided(taken, Decision(), refusal)
                return
            now = self._setup.ports.monotonic()
            violation = self._parking.park(refusal.violation, taken, now=now)
            if violation is not None:
                refusal = AdmissionRefused(self._conversation_id, violation)
                yield _Decided(taken, Decision(), refusal)
        except TurnPaused:
            self._held.append(taken)
        except Exception as error:  # noqa: BLE001 - answered to its caller alone, in `_publish`
            yield _Decided(taken, Decision(), error)
        else:
            self._owner.apply(decision)
            yield _Decided(taken, decision)
            for parked in self._parking.take_ready(self._owner.state.admission.open_calls):
                yield from self._decide_one(parked.ticket)
            if self._held and self._owner.state.turns.waits_for is None:
                held, self._held = self._held, []
                for waiting in held:
                    yield from self._decide_one(waiting)

    # --- 3. commit -------------------------------------------------------------------------------

    async def _commit(self, decided: Sequence[_Decided]) -> None:
        """Write what the batch led to. Everything that anybody may see waits for this."""
        owner = self._owner
        journal = self._setup.journal
        rejections = [
            _rejection(one.refusal, one.taken)
            for one in decided
            if isinstance(one.refusal, AdmissionRefused)
        ]
        if rejections:
            await journal.reject(self._conversation_id, rejections)
        records = [record_of(event) for one in decided for event in one.decision.events]
        if not records:
            return
        first = owner.state.seq - len(records) + 1
        seqs = await self.context.outcome(
            journal.append(
                self._conversation_id,
                records,
                epoch=owner.epoch,
                expected_seq=first,
                is_unfinished=owner.state.turns.is_unfinished,
            )
        )
        if seqs[0] != first or seqs[-1] != owner.state.seq:
            raise InvariantViolation(
                f"conversation {self._conversation_id}: decided seqs {first} to "
                f"{owner.state.seq}, the journal has them at {seqs[0]} to {seqs[-1]}"
            )

    # --- 4. publish ------------------------------------------------------------------------------

    def _publish(self, decided: Sequence[_Decided]) -> None:
        """Show what is committed: the view, the subscribers, the replies, in this order."""
        seq = self._seq
        self._show_state()
        subscriptions = self._setup.subscriptions
        events: list[LoggedEvent] = []
        for one in decided:
            command = one.taken.command
            if isinstance(command, Stream) and one.refusal is None:
                # Between the events that came before it and those that come after.
                if events:
                    subscriptions.publish(self._conversation_id, events)
                    events = []
                delta = TextDelta(command.turn_id, command.text, command.is_first)
                subscriptions.publish_delta(self._conversation_id, delta, seq)
            for event in one.decision.events:
                seq += 1
                events.append(LoggedEvent(seq, event))
        if events:
            subscriptions.publish(self._conversation_id, events)
        for one in decided:
            delivery = one.taken.delivery
            if delivery is None:
                if one.refusal is not None:
                    raise one.refusal
            elif one.refusal is None:
                delivery.reply(one.decision.reply)
            else:
                delivery.fail(one.refusal)

    def _show_state(self) -> None:
        """The working state is committed: what readers and effects see of it, until the next."""
        state = self._owner.state
        turns = state.turns
        self._view = state.view
        self._seq = state.seq
        self._steps = state.iteration
        self._running = running = turns.running
        self._is_wanted = turns.is_unfinished and turns.waits_for is None
        self._is_step_held = running is not None and (
            turns.waits_for is not None
            or any(waiting.steers == running.turn_id for waiting in turns.queued.values())
        )

    # --- 5. start effects ------------------------------------------------------------------------

    def _start_effects(self, decided: Sequence[_Decided]) -> None:
        for one in decided:
            for effect in one.decision.effects:
                match effect:
                    case StopTurn(turn_id):
                        # Not waited for: what it still sends carries its turn id, and is stale.
                        if self._agent is not None and self._agent_of == turn_id:
                            self._agent.cancel()
                    case StartTurn(turn_id, unstarted):
                        self._start_turn(turn_id, unstarted)
        self._start_condenser()
        if any(one.decision.events for one in decided):
            self._start_verifying()
            self._start_snapshot()
        if (deadline := self._parking.next_deadline) is not None:
            delay_s = deadline - self._setup.ports.monotonic()
            self.context.timers.once(max(0.0, delay_s), DropOverdue(), key=_PARK_TIMER)

    def _start_turn(self, turn_id: str, unstarted: tuple[str, ...]) -> None:
        if self._running is None or self._running.turn_id != turn_id:
            return  # a later command of the same batch has ended it already
        run = partial(self._run_turn, turn_id, unstarted)
        self._agent = self.context.start_effect(run, name=f"turn {turn_id}")
        self._agent_of = turn_id

    def _start_condenser(self) -> None:
        if self._condensing() is not None:
            return
        if _appetite(self._view) == self._condenser_rests_at:
            return  # it could do nothing with this view
        try:
            need = self._setup.condenser.need(self._view)
        except Exception as error:  # noqa: BLE001 - it becomes a recorded event
            run = partial(self._rest_condenser, self._view, error)
            self._condenser_effect = self.context.start_effect(run, name="condenser")
        else:
            self._is_condensing_hard = need == "hard"
            if need is not None:
                effect = self.context.start_effect(self._run_condenser, name="condenser")
                self._condenser_effect = effect

    def _start_verifying(self) -> None:
        verify = self._setup.verify
        if verify == "always" or (
            verify == "sampled" and self._setup.ports.random.random() < _SAMPLED
        ):
            run = partial(self._run_verifying, self._owner, self._view, self._seq)
            self.context.start_effect(run, name="verify")

    def _start_snapshot(self) -> None:
        """Write the folds down now and then; so seldom that it costs each event O(1)."""
        state = self._owner.state
        if state.seq - self._snapshot_seq < max(_SNAPSHOT_EVENTS, len(self._view)):
            return
        if self._snapshot_effect is None or self._snapshot_effect.is_done:
            self._snapshot_seq = state.seq
            # Taken here, where the working state is the committed one; written beside the loop.
            run = partial(self._run_snapshot, state.to_snapshot(), self._owner.epoch)
            self._snapshot_effect = self.context.start_effect(run, name="snapshot")

    async def _run_snapshot(self, snapshot: Snapshot, epoch: int) -> None:
        try:
            await self._setup.journal.write_snapshot(self._conversation_id, snapshot, epoch=epoch)
        except TurnkeeperError as error:
            # Losing a snapshot costs time at the next activation, never data.
            _log.warning(
                "snapshot not written", conversation=self._conversation_id, error=str(error)
            )

    async def _run_turn(self, turn_id: str, unstarted: tuple[str, ...]) -> None:
        """The effect that answers one turn. Runs beside the loop, not in it."""
        owner = self._owner
        self._check_lease()
        # From the check above to the agent's first await there is none.
        side = OwnerSide(
            ref=self.context.ref,
            ports=self._setup.ports,
            is_resumable=self._setup.policy.is_resumable,
            running=lambda: self._running_turn(turn_id),
            view=lambda: self._view,
            steps=lambda: self._steps,
            is_step_held=lambda: self._is_step_held,
            condensing=self._condensing,
            is_condensing_hard=self._must_wait_for_condenser,
            find_broken=self._find_broken,
            check_lease=self._check_lease,
        )
        turn = TurnContext(self._conversation_id, owner.epoch, side, unstarted)
        inside = Inside(self._setup.waits, self._conversation_id)
        turn_of.set(inside)
        failure: BaseException | None = None
        end = EndTurn(turn_id, owner.epoch)
        try:
            await self._setup.agent.run(turn)
        except LeaseExpired:
            raise  # not the turn's failure but its owner's
        except BaseException as error:
            # A cancellation that nobody asked for is a failure like any other.
            if not isinstance(error, Exception) and not clear_stray_cancellation(error):
                raise
            if isinstance(error, StaleTurn | TurnSuspended) and not self._is_going_on(turn):
                return  # ended or held from outside; whoever did it has written that down
            failure = error
            end = EndTurn(turn_id, owner.epoch, type(error).__name__, error_text(error))
        finally:
            inside.is_over = True
        if turn.is_held:
            # It swallowed that, or it came in a group. The turn is another run's to end.
            if isinstance(failure, BaseExceptionGroup):
                failure = failure.split((StaleTurn, TurnSuspended))[1]
            if failure is not None:
                _log.warning(
                    "agent failed in a turn that is held",
                    conversation=self._conversation_id,
                    turn=turn_id,
                    exc_info=failure,
                )
            return
        if await self._tell_owner(end) and failure is not None:
            # Not where the owner has ended under its agent, and that is all that failed.
            _log.warning(
                "turn failed",
                conversation=self._conversation_id,
                turn=turn_id,
                error=end.error,
                exc_info=failure,
            )

    def _check_lease(self) -> None:
        """Raise where this owner may have been taken over: what it does outside cannot be fenced.

        From here to the first await of what it guards there must be none.
        """
        if not self._setup.journal.is_lease_valid(since=self._claimed_at):
            raise LeaseExpired(self._conversation_id, self._owner.epoch)

    async def _tell_owner(self, command: Message[T]) -> T | None:
        """What an effect says in the end. None where this owner or this turn is no more.

        The journal's errors are the owner's own failure, which is dealt with where it happened.
        """
        try:
            return await self.context.ref.ask(command)
        except (StaleTurn, OwnershipLost, Unavailable, OutcomeUnknown):
            return None

    def _running_turn(self, turn_id: str) -> RunningTurn:
        if self._running is None or self._running.turn_id != turn_id:
            raise StaleTurn(self._conversation_id, turn_id)
        return self._running

    def _is_going_on(self, turn: TurnContext) -> bool:
        """Whether this run is still its turn's: what says otherwise was of another turn."""
        running = self._running
        return running is not None and running.turn_id == turn.turn_id and not turn.is_held

    def _condensing(self) -> Effect | None:
        effect = self._condenser_effect
        return None if effect is None or effect.is_done else effect

    def _must_wait_for_condenser(self) -> bool:
        return self._is_condensing_hard or self._view.unhandled_condensation_request

    async def _find_broken(self) -> tuple[str, ...]:
        """What enforcement over the whole log takes from the view as it is now."""
        view, load = self._view, ColdLoad()
        await fold_log(self._setup.journal, self._conversation_id, 0, self._seq, load.fold)
        state, _ = load.finish()
        kept = {event.id for event in state.view}
        return tuple(event.id for event in view if event.id not in kept)

    async def _run_condenser(self) -> None:
        """The effect that condenses while there is a need, and it makes the view shorter."""
        condenser, epoch = self._setup.condenser, self._owner.epoch
        while True:
            shown = self._view
            try:
                need = condenser.need(shown)
                self._is_condensing_hard = need == "hard"
                proposal = None if need is None else await condenser.propose(shown, need)
                if not isinstance(proposal, Proposal | None):
                    raise TypeError(f"its proposal is a {type(proposal).__name__}")
            except BaseException as error:
                # A cancellation that nobody asked for is a failure like any other.
                if not isinstance(error, Exception) and not clear_stray_cancellation(error):
                    raise
                await self._rest_condenser(shown, error)
                return
            if need is None:
                return
            await self._tell_owner(Propose(epoch, proposal, shown))
            if _appetite(self._view) == _appetite(shown):
                # Nothing to propose, refused as it is, or no shorter for it: not again until the
                # view has grown. A view that has changed meanwhile is shown to it anew.
                self._condenser_rests_at = _appetite(shown)
                return

    async def _rest_condenser(self, shown: View, error: BaseException) -> None:
        """Write down that the condenser failed, and let it rest until the view has grown."""
        self._condenser_rests_at = _appetite(shown)
        failed = ProposeFailed(self._owner.epoch, type(error).__name__, error_text(error))
        await self._tell_owner(failed)

    async def _run_verifying(self, owner: Owner, view: View, seq: int) -> None:
        """The effect that rebuilds the view from the log; a divergence fails the actor."""
        check = ViewCheck()
        try:
            await fold_log(self._setup.journal, self._conversation_id, 0, seq, check.fold)
        except (Unavailable, OutcomeUnknown) as error:
            _log.warning("view not verified", conversation=self._conversation_id, error=str(error))
            return
        except Refused:
            if self._owner is not owner:
                return  # deleted meanwhile
            raise
        found = check.find_divergence(view)
        if found is not None and self._owner is owner:
            raise InvariantViolation(
                f"the view of conversation {self._conversation_id} at seq {seq} is not the fold of "
                f"its log: {found}; the log is right; the owner is started again from it"
            )


def _appetite(view: View) -> tuple[int, bool]:
    """What a condenser that could do nothing looks at again only once it has changed."""
    return len(view), view.unhandled_condensation_request


def _rejection(refusal: AdmissionRefused, taken: _Taken) -> Rejection:
    violation = refusal.violation
    return Rejection(
        at=taken.stamp.now,
        violation=violation.name,
        reason=violation.reason,
        payload=encode_event(violation.event),
    )
