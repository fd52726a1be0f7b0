"""The turn that each run of an agent is given.

The agent runs as a supervised child task of its conversation's actor, and writes to the log only
through the actor's mailbox. Its messages, calls and results are durable when the call returns;
pieces of an answer are not. An interrupt cancels its task, and refuses anything it still sends as
`StaleTurn`, so nothing can land in the next turn.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import anyio

from turnkeeper.runtime import Effect, Message, Ports, Ref
from turnkeeper.runtime.lowlevel import (
    clear_stray_cancellation,
    closing_scopes,
    is_interruption,
    pausing,
    persist,
    task_group,
)

from ..core.admission import AdmissionRefused
from ..core.commands import (
    BeginStep,
    Command,
    EndTurn,
    NoteRequest,
    Query,
    RepairView,
    Stream,
    TurnAppend,
)
from ..core.limits import Limits
from ..core.metrics import Metrics
from ..core.records import check_texts, check_written
from ..core.stuck import SeenEvent
from ..core.turn_table import RunningTurn
from ..core.view import View
from ..errors import AnswerTooLong, ContextTooLong, InvalidInput, LeaseExpired, TurnSuspended
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationRequestEvent,
    ConfirmationRequestedEvent,
    Event,
    LLMConvertibleEvent,
    LoggedEvent,
    ObservationEvent,
    StepFinishedEvent,
    StepRequest,
    ThinkingBlock,
    TokenUsage,
    UserMessageEvent,
    encode_event,
)
from ..models.base import Model, ModelRequest, ModelResponse, request_of
from ..tool_calls import ToolCall, ToolResult
from ..values.frozen import FrozenObject, check_json
from ..values.text import ERROR_LENGTH_MAX, check_bool, error_text, storable
from ..values.type_names import a_type
from .watcher import Watcher

__all__ = [
    "ToolRunner",
    "TurnContext",
    "is_own_failure",
]


T = TypeVar("T")
P = ParamSpec("P")
E = TypeVar("E", bound=Event)

MALFORMED_LENGTH_MAX = 2_000


ToolRunner = Callable[[ActionEvent], Awaitable[str | ToolResult]]
"""Runs one call and returns its result. Raising makes the result an error."""


class TurnOwner(Protocol):
    """The conversation's owner, as the context of its running turn uses it.

    The conversation actor implements it. Everything it shows is committed.
    """

    @property
    def ref(self) -> Ref[Command | Query]: ...

    @property
    def ports(self) -> Ports: ...

    @property
    def is_agent_resumable(self) -> bool: ...

    @property
    def answer_length_max(self) -> int: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def watcher(self) -> Watcher: ...

    @property
    def view(self) -> View: ...

    @property
    def steps(self) -> int:
        """How many steps were finished in the turn that runs, or ran last."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def recently_seen(self) -> Sequence[SeenEvent | LLMConvertibleEvent]:
        """The newest events that the model saw since the last user message."""

    @property
    def is_step_held(self) -> bool:
        """True if a pause, a confirmation or a steering chat message comes before the next step."""

    def running_turn(self, turn_id: str) -> RunningTurn:
        """Return the turn; raise `StaleTurn` once it has ended."""

    def take_at_once(self, command: Stream | NoteRequest) -> bool:
        """Take what stays in memory at once; False if it has to go through the mailbox.

        Raises `StaleTurn`.
        """

    def running_condenser(self) -> Effect | None: ...

    def must_wait_for_condenser(self) -> bool: ...

    def is_too_long(self) -> bool:
        """True if the view is over a hard limit, and nothing more of it can be left out."""

    async def find_broken(self) -> tuple[str, ...]:
        """Return the events in the view that enforcement over the whole log would remove."""

    async def find_result(self, tool_call_id: str) -> LoggedEvent | None:
        """Return the result of this call, if it is in the view."""

    def check_lease(self) -> None:
        """Raise `LeaseExpired` if another process may own the conversation by now."""


class TurnContext:
    """One turn, as its agent sees it. Made by the conversation actor, used by one run of an agent.

    Every event it writes is durable when the call returns. If a call is cancelled, its write is in
    the log as a whole or not at all. Once the turn has ended, reading it and writing to it raise
    `StaleTurn`. Several tasks of the run may call it at once; their writes go into the log one
    after another.
    """

    def __init__(
        self,
        conversation_id: str,
        turn_id: str,
        epoch: int,
        owner: TurnOwner,
        unstarted: Collection[str],
    ) -> None:
        self.conversation_id = conversation_id
        self.turn_id = turn_id
        self.ports = owner.ports
        self._epoch = epoch
        self._owner = owner
        self._owner_ref = owner.ref  # made at each look
        self._unstarted = frozenset(unstarted)
        self._is_held = False
        self._asked: StepRequest | None = None
        """The newest request to a model; the end of the step names it."""
        self._response_id: str | None = None
        self._writers = 0
        """How many writers were made; the newest alone may write."""

    @property
    def is_held(self) -> bool:
        """True if `TurnSuspended` has ended this run; every further call here raises it again."""
        return self._is_held

    @property
    def messages(self) -> tuple[UserMessageEvent, ...]:
        """The chat messages that this turn answers."""
        return self._running().messages

    @property
    def message(self) -> UserMessageEvent:
        """The newest chat message that this turn answers."""
        return self.messages[-1]

    @property
    def view(self) -> View:
        """The view as committed now. The value never changes: read it again for a newer one."""
        self._running()  # raises if the turn has ended: the view is another turn's by now
        return self._owner.view

    @property
    def metrics(self) -> Metrics:
        """The totals of all model calls of the conversation, this turn's included."""
        self._running()
        return self._owner.metrics

    @property
    def recently_seen(self) -> Sequence[SeenEvent | LLMConvertibleEvent]:
        """The newest events that the model saw since the last user message, forgotten ones too."""
        self._running()
        return self._owner.recently_seen

    @property
    def steps(self) -> int:
        """How many steps this turn has finished, in all runs of its agent."""
        self._running()
        return self._owner.steps

    # --- resuming a turn, and continuing it ------------------------------------------------------

    @property
    def open_calls(self) -> Mapping[str, ActionEvent]:
        """The calls without a result, by call id. A turn that is resumed may have some."""
        view = self.view
        if not view.has_open_calls:
            return {}
        answered = {event.tool_call_id for event in view if isinstance(event, RESULT_CLASSES)}
        return {
            event.tool_call_id: event
            for event in view
            if isinstance(event, ActionEvent) and event.tool_call_id not in answered
        }

    def is_unstarted(self, tool_call_id: str) -> bool:
        """True if this open call cannot have begun: it has just been confirmed."""
        return tool_call_id in self._unstarted

    @property
    def has_answered(self) -> bool:
        """True if the turn has its answer, and a pause has kept it from ending."""
        view, seen = self.view, self.recently_seen
        newest = view[-1] if view else None
        if seen and not isinstance(newest, AgentMessageEvent):
            newest_seen = seen[-1]  # a condensation may have taken the answer out of the view
            if isinstance(newest_seen, SeenEvent):
                return newest_seen.turn_id == self.turn_id
            newest = newest_seen
        return (
            isinstance(newest, AgentMessageEvent)
            and newest.turn_id == self.turn_id
            and not newest.interrupted
        )

    async def begin_step(self) -> View:
        """Begin the next step; return the view for its model call.

        A pause takes effect here, steering chat messages join here, and a condensation that the
        turn needs is awaited. If the turn is held, the run of a resumable agent ends with
        `TurnSuspended`; any other agent waits. Raises `ContextTooLong` if the view is over a hard
        limit of the condenser and nothing more of it can be left out.
        """
        owner = self._owner
        while True:
            self._check_going_on()
            if owner.is_step_held:
                begin = BeginStep(self.turn_id, self._epoch)
                if not await self._owner_ref.ask(begin):
                    raise self._held()
            condensing = owner.running_condenser()
            if condensing is None or not owner.must_wait_for_condenser():
                if owner.is_too_long():
                    raise ContextTooLong(self.conversation_id, self.turn_id)
                return self.view
            await condensing.wait_until_ended()

    async def ask(self, model: Model, request: ModelRequest) -> ModelResponse:
        """Ask a model, as a step of this turn; return its answer, which is not in the log yet.

        Its text streams as through `writer`. The event that ends the step names the request, also
        if the step fails or is interrupted. Raises what `Model.respond` raises.
        """
        asked = request_of(model, request)
        await self.note_request(asked)
        with (
            self._owner.watcher.asking(self.conversation_id, model, asked) as note,
            closing_scopes(f"model {type(model).__name__}"),
        ):
            response = await model.respond(request, self.writer())
            if not isinstance(response, ModelResponse):
                raise TypeError(f"the model returned {a_type(response)}, and not a ModelResponse")
            note(response)
        self._response_id = response.provider_response_id
        return response

    async def note_request(self, request: StepRequest) -> None:
        """Note what a model is asked, for an agent that asks it without `ask`."""
        # An agent that asks again and again, and a model that never waits, would keep all other
        # tasks from running. Before the note: a cancellation here leaves no request that was never
        # made.
        await pausing()()
        self._check_going_on()
        self._asked, self._response_id = request, None
        note = NoteRequest(self.turn_id, self._epoch, request)
        if not self._owner.take_at_once(note):
            await self._owner_ref.tell(note)

    async def condense(self) -> bool:
        """Ask for a condensation, because the view is too long for the model, and wait for it.

        Return False if there is no condenser, or if it could not condense anything.
        """
        await self._append(self._make(CondensationRequestEvent))
        return await self._is_condensed()

    async def repair_history(self, detail: str) -> bool:
        """Repair a history that a model refused as malformed; wait until it is done.

        The owner rebuilds the view from the log, forgets the events that break it, logs the
        refusal, and asks for a condensation. Return True if the view changed. `detail`: what the
        model said, of which the first 2,000 characters are logged.
        """
        broken = await self._owner.find_broken()
        said = storable(detail)[:ERROR_LENGTH_MAX]
        repair = RepairView(self.turn_id, self._epoch, broken, said)
        has_forgotten = await self._ask(repair)
        return await self._is_condensed() or has_forgotten

    async def _is_condensed(self) -> bool:
        while (condensing := self._owner.running_condenser()) is not None:
            await condensing.wait_until_ended()
        return not self.view.unhandled_condensation_request

    async def end_as_stuck(self, detail: str) -> None:
        """End the turn because its agent repeats itself. Return from the agent after this call.

        `detail`: what it repeats, of which the first 2,000 characters are logged.
        """
        said = storable(detail)[:ERROR_LENGTH_MAX]
        end = EndTurn(self.turn_id, self._epoch, "Stuck", said, is_stuck=True)
        if not await self._ask(end):
            raise self._held()

    # --- saying ----------------------------------------------------------------------------------

    async def say(
        self,
        text: str,
        *,
        thinking: tuple[ThinkingBlock, ...] = (),
        llm_response_id: str | None = None,
        usage: TokenUsage | None = None,
        ends_turn: bool = False,
    ) -> LoggedEvent:
        """Say something to the user; `llm_response_id` is the model's id of its response.

        With `usage`, the same commit finishes a step. With `ends_turn` it also ends the turn,
        unless a pause holds it; return from the agent after that. Raises `AnswerTooLong`, and
        `InvalidInput` for an argument that cannot be used.
        """
        check_bool("ends_turn", ends_turn)
        message = self._make(
            AgentMessageEvent,
            content=self._answer(text),
            thinking=thinking,
            llm_response_id=llm_response_id,
        )
        finished = () if usage is None else (self._step_finished(usage),)
        return (await self._append(message, *finished, ends=ends_turn))[0]

    def writer(self) -> Callable[[str], Awaitable[None]]:
        """Begin an answer, or begin it anew; return the function that takes its pieces.

        Readers that follow the turn see the pieces live. The pieces are not durable: `say` or
        `propose_calls` logs the answer. An interrupt before that logs the pieces so far, marked as
        interrupted; if the process dies, they are lost. If they get longer than
        `answer_length_max`, the owner fails the turn. Once another writer has begun, this one
        raises `InvalidInput`: a model call that was given up may still be writing.
        """
        self._writers += 1
        number = self._writers  # not the function, which would refer to itself
        is_first = True
        pause = pausing()

        async def write(piece: str) -> None:
            nonlocal is_first
            self._check_going_on()
            if number != self._writers:
                raise InvalidInput("a newer writer has begun the answer anew; use that one")
            stream = Stream(self.turn_id, self._epoch, piece, is_first=is_first)
            is_first = False
            if not self._owner.take_at_once(stream):
                await self._owner_ref.tell(stream)
                # The owner handles it meanwhile. Without this, a source that never waits would come
                # back each time just before the owner is at rest, and all pieces would be messages.
                await pause()
            # A source of pieces that never waits would keep all other tasks from running, and every
            # interrupt from arriving.
            await pause()

        return write

    async def stream(self, chunks: AsyncIterable[str]) -> LoggedEvent:
        """Say `chunks` as they come: one chat message, durable when this returns.

        If the turn is interrupted halfway, the pieces so far are kept as a chat message marked as
        interrupted, and the generator is closed.
        """
        pieces: list[str] = []
        write = self.writer()
        closing = aclosing(chunks) if isinstance(chunks, AsyncGenerator) else nullcontext()
        async with closing:
            async for piece in chunks:
                await write(piece)
                pieces.append(piece)
        return await self.say("".join(pieces))

    def _answer(self, text: str) -> str:
        """Return the text as it can be stored; raise `AnswerTooLong` if it is too long."""
        said = storable(text)
        if len(said) > self._owner.answer_length_max:
            raise AnswerTooLong(self.conversation_id, self.turn_id, self._owner.answer_length_max)
        return said

    async def remind(self, text: str) -> LoggedEvent:
        """Tell the model something in the middle of the turn; it is marked as not the user's."""
        reminder = self._make(UserMessageEvent, content=storable(text), is_reminder=True)
        return (await self._append(reminder))[0]

    async def finish_step(self, usage: TokenUsage) -> LoggedEvent:
        """Log the tokens, cost and time of one model call."""
        return (await self._append(self._step_finished(usage)))[0]

    def _step_finished(self, usage: TokenUsage) -> StepFinishedEvent:
        asked, self._asked = self._asked, None
        response_id = None if asked is None else self._response_id
        return self._make(StepFinishedEvent, usage=usage, request=asked, response_id=response_id)

    # --- doing -----------------------------------------------------------------------------------

    async def call_tools(
        self, calls: Sequence[ToolCall], run: ToolRunner, *, text: str = ""
    ) -> Sequence[LoggedEvent]:
        """Log the calls of one model response, run them concurrently, and return their results.

        `propose_calls` followed by `run_calls`. `run` is called with each call; the results are in
        the order of the calls. `text` is the model's text beside its calls.
        """
        return await self.run_calls(await self.propose_calls(calls, text=text), run)

    async def propose_calls(
        self,
        calls: Sequence[ToolCall],
        *,
        text: str = "",
        thinking: tuple[ThinkingBlock, ...] = (),
        usage: TokenUsage | None = None,
        needs_confirmation: bool = False,
    ) -> Sequence[ActionEvent]:
        """Log the calls of one model response, all in one commit, before any of them runs.

        `text` is the model's text beside its calls. With `usage`, the same commit finishes a step.
        With `needs_confirmation` the turn waits for the user, and this ends the agent's run with
        `TurnSuspended`; only a resumable agent can ask for that. Raises `AnswerTooLong`,
        and `InvalidInput` for an argument that cannot be used.
        """
        check_bool("needs_confirmation", needs_confirmation)
        if not calls:
            return ()
        if needs_confirmation and not self._owner.is_agent_resumable:
            raise InvalidInput(
                "only an agent with `is_resumable = True` can wait for a confirmation: it runs "
                "again once the user has answered"
            )
        said = self._answer(text)
        response_id = self.ports.ids.new()
        actions = [
            self._make(
                ActionEvent,
                tool_call_id=self.ports.ids.new(),
                provider_call_id=call.provider_call_id and storable(call.provider_call_id),
                tool_name=storable(call.name),
                arguments=arguments,
                malformed_arguments=malformed and storable(malformed),
                llm_response_id=response_id,
                thinking=thinking if n == 0 else (),
                text=said if n == 0 else "",
                risk=call.risk,
            )
            for n, call in enumerate(calls)
            for arguments, malformed in (_arguments(call, self._owner.limits),)
        ]
        events: Sequence[Event] = actions
        if usage is not None:
            # Logged with the calls and not after them, so that a crash in a call does not lose it.
            events = (*actions, self._step_finished(usage))
        if not needs_confirmation:
            await self._append(*events)
            return actions
        requested = self._make(
            ConfirmationRequestedEvent,
            tool_call_ids=tuple(action.tool_call_id for action in actions),
        )
        await self._append(*events, requested, suspends=True)
        raise self._held()

    async def run_calls(
        self, actions: Sequence[ActionEvent], run: ToolRunner
    ) -> Sequence[LoggedEvent]:
        """Run calls that are in the log, concurrently; return their results in the order of calls.

        `run` is called with each of `actions`. A result is durable as soon as its call has ended,
        whatever the others do. If `run` raises, the result is that error. If the result of a call
        was appended by hand while it ran, that one stays, and is returned; the call's own is kept
        among `Conversation.rejections`. If this is cancelled, so are the running calls; they stay
        open, and the owner answers them when the turn ends, with a result which says that the call
        may have happened.
        """
        if not actions:
            return []
        results: dict[str, LoggedEvent] = {}
        try:
            async with task_group() as group:
                for action in actions:
                    group.start_soon(self._run_call, action, run, results)
        except ExceptionGroup as failed:
            # A tool's failure is its result, so these are refusals by the owner. But for rare ones,
            # they are the same for every call of the turn.
            raise failed.exceptions[0] from None
        for action in actions:
            if action.id not in results:  # its task was cancelled, and no scope had asked for that
                said = "no result: its task was cancelled by another; it may have happened"
                result = ToolResult(said, is_error=True, may_have_happened=True)
                results[action.id] = await self._log_result(action, result)
        return [results[action.id] for action in actions]

    def check_lease(self) -> None:
        """Raise `LeaseExpired` if another process may own this conversation by now.

        `run_calls` calls this right before it runs a call. If your runner awaits anything before
        its first effect outside, call it again then: such an effect can be neither undone nor
        fenced.
        """
        self._owner.check_lease()

    async def _run_call(
        self, action: ActionEvent, run: ToolRunner, results: dict[str, LoggedEvent]
    ) -> None:
        # An agent that swallowed the end of its run may not run anything more.
        self._check_going_on()
        # This process may have been suspended since the call was committed, for longer than its
        # lease. Nothing waits from here to the call of `run`, with which `_result_of` begins.
        self.check_lease()
        result = await self._result_of(action, run)
        # The call may have cancelled this very task, which would end the other calls.
        results[action.id] = await persist(partial(self._log_result, action, result))

    async def _log_result(self, action: ActionEvent, result: ToolResult) -> LoggedEvent:
        """Log a call's result; return that, or the result that the call has already."""
        try:
            try:
                logged = await self._append(self._observed(action, result))
            except InvalidInput as error:
                # The call has run, so it gets a result, and the turn goes on.
                said = f"the call ran, and its result cannot be kept: {error_text(error)}"
                too_large = ToolResult(said, is_error=True)
                logged = await self._append(self._observed(action, too_large))
        except AdmissionRefused:
            if (by_hand := await self._owner.find_result(action.tool_call_id)) is None:
                raise
            return by_hand
        return logged[0]

    async def _result_of(self, action: ActionEvent, run: ToolRunner) -> ToolResult:
        """Run a call; an error that it raises becomes its result."""
        try:
            with (
                self._owner.watcher.calling(self.conversation_id, action) as note_failure,
                closing_scopes(f"call of {action.tool_name}"),
            ):
                returned = await run(action)
                result = ToolResult(returned) if isinstance(returned, str) else returned
                if not isinstance(result, ToolResult):
                    raise TypeError(
                        f"the call ran and returned {a_type(result)}; it must return a "
                        "str or a ToolResult"
                    )
                if result.is_error:
                    note_failure("may_have_happened" if result.may_have_happened else "tool_error")
                return result
        except BaseException as error:
            # A stray cancellation, passed on to the task group, would silently end the other calls.
            if not is_own_failure(error):
                raise
            if isinstance(error, LeaseExpired):
                self.check_lease()  # raises if it is this owner's: the next one answers the call
            return ToolResult(f"{type(error).__name__}: {error_text(error)}", is_error=True)

    def _observed(
        self, action: ActionEvent, result: ToolResult
    ) -> ObservationEvent | AgentErrorEvent:
        call_id, content = action.tool_call_id, storable(result.content)
        if result.may_have_happened:
            return self._make(
                AgentErrorEvent, tool_call_id=call_id, content=content, may_have_happened=True
            )
        return self._make(
            ObservationEvent, tool_call_id=call_id, content=content, is_error=result.is_error
        )

    def _make(self, make: Callable[P, E], *args: P.args, **fields: P.kwargs) -> E:
        """Return a new event of this class, with these fields, of this turn."""
        # Any: the fields are checked against `make`; those that all events of a turn have are added
        # to them.
        drawn: dict[str, Any] = {
            "id": self.ports.ids.new(),
            "timestamp": datetime.fromtimestamp(self.ports.now(), UTC),
            "turn_id": self.turn_id,
        }
        return cast("Callable[..., E]", make)(*args, **fields, **drawn)

    async def _append(
        self, *events: Event, suspends: bool = False, ends: bool = False
    ) -> Sequence[LoggedEvent]:
        written: list[bytes] = []
        for event in events:
            check_texts(event)
            written.append(encode_event(event))
            check_written(event, written[-1])  # here, where it fails the turn and not the owner
        append = TurnAppend(
            self.turn_id, self._epoch, events, suspends=suspends, ends=ends, written=written
        )
        return await self._ask(append)

    async def _ask(self, command: Message[T]) -> T:
        self._check_going_on()
        return await self._owner_ref.ask(command)

    def _held(self) -> TurnSuspended:
        """Note that the turn is held, which ends this run; return the error that says so."""
        self._is_held = True
        return TurnSuspended(self.conversation_id, self.turn_id)

    def _check_going_on(self) -> None:
        """Raise `TurnSuspended` if the turn is held, `StaleTurn` if it has ended."""
        if self._is_held:
            raise self._held()
        self._owner.running_turn(self.turn_id)

    def _running(self) -> RunningTurn:
        """Return the turn; raise `StaleTurn` once it has ended."""
        return self._owner.running_turn(self.turn_id)


def _arguments(call: ToolCall, limits: Limits) -> tuple[FrozenObject, str | None]:
    """Return the arguments and the malformed text to log; arguments out of bounds become text."""
    try:
        arguments = FrozenObject(call.arguments)
        depth_max, digits_max = limits.arguments_depth_max, limits.arguments_digits_max
        check_json(arguments, depth_max=depth_max, digits_max=digits_max)
    except ValueError:
        try:
            written = repr(dict(call.arguments))
        except Exception:  # noqa: BLE001 - too deep, too many digits, or an object's own error
            written = "arguments that cannot be written as text"
        return FrozenObject(), storable(written)[:MALFORMED_LENGTH_MAX]
    return arguments, call.malformed_arguments


def is_own_failure(error: BaseException) -> bool:
    """True if an agent, a condenser or a tool failed; False if it is cancelled or the program ends.

    A bare `BaseException` is a failure like any other. So is a stray cancellation, which no scope
    asked for, alone or in a group with other errors: it is cleared.
    """
    rest: BaseException | None = error
    if isinstance(error, BaseExceptionGroup):
        stray, rest = error.split(anyio.get_cancelled_exc_class())
        if stray is not None and not clear_stray_cancellation(stray):
            return False
    return rest is None or clear_stray_cancellation(rest) or not is_interruption(rest)
