"""The worker: runs the conversations of a replay in a process that may be killed at any moment.

The command line starts it as `python -m turnkeeper.actors.cli.worker`. It reads orders from its
standard input and writes reports to its standard output, one JSON object on a line. It ends when
its input ends, so it never outlives the process that started it. A report is written only after its
content is durable, and in one piece before anything else happens.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial

import anyio
import anyio.lowlevel
import structlog

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import thread_caller

from ..agents.turn_context import TurnContext
from ..conversations.conversation import Conversation
from ..conversations.conversations import Conversations
from ..core.condensation import RollingCondenser
from ..errors import QueueFull, TurnInProgress
from ..events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ImageContent,
    LoggedEvent,
    SystemPromptEvent,
)
from ..journal import Journal
from ..journals.sqlite.journal import SQLiteJournal
from ..recordings.audit import message_id
from ..recordings.transcripts import RecordedStep
from ..tool_calls import ToolCall
from ._error_lines import error_line
from ._protocol import (
    Accepted,
    Ended,
    Failed,
    GetViews,
    Held,
    Logged,
    Order,
    Part,
    Ready,
    Refused,
    Release,
    Report,
    Send,
    Start,
    StartStress,
    Views,
    orders,
)

__all__ = ["main", "perform", "serve", "views_of"]

_READ_SIZE = 1 << 16


class _Player:
    """The agent: it answers as recorded, and reports each event once it is durable."""

    def __init__(self, start: Start, report: Callable[[Report], None]) -> None:
        self._pace_s = start.pace_s
        self._report = report
        self._parts = {part.conversation: part for part in start.parts}
        self._exchanges = {
            message_id(part.conversation, n): n
            for part in start.parts
            for n in range(len(part.recorded.exchanges))
        }
        self._held: dict[tuple[str, int], anyio.Event] = {}

    async def run(self, turn: TurnContext) -> None:
        # One message after another; steering messages join while earlier ones are answered.
        answered = 0
        while answered < len(turn.messages):
            message = turn.messages[answered].message_id or ""
            await self._answer(turn, self._exchanges[message])
            answered += 1

    async def _answer(self, turn: TurnContext, exchange: int) -> None:
        part = self._parts[turn.conversation_id]
        steps = part.recorded.exchanges[exchange].steps
        held_at = part.held.get(exchange)

        async def hold() -> None:
            held = self._held[part.conversation, exchange] = anyio.Event()
            self._report(Held(conversation=part.conversation, exchange=exchange))
            await held.wait()

        for number, step in enumerate(steps):
            await turn.begin_step()
            await anyio.sleep(self._pace_s)
            pause = hold if number == held_at else anyio.lowlevel.checkpoint
            await perform(turn, step, pause, self._report)
        if not steps and held_at is not None:
            await hold()

    def release(self, order: Release) -> None:
        """Let a held exchange go on. Its turn may have ended meanwhile."""
        held = self._held.pop((order.conversation, order.exchange), None)
        if held is not None:
            held.set()


async def perform(
    turn: TurnContext,
    step: RecordedStep,
    pause: Callable[[], Awaitable[None]],
    report: Callable[[Report], None],
) -> None:
    """Give one recorded answer, with a pause halfway: in its last call, or in its text.

    Each event is reported as soon as it is durable.
    """

    def tell(logged: LoggedEvent) -> None:
        report(
            Logged(
                conversation=turn.conversation_id,
                event_id=logged.event.id,
                seq=logged.seq or None,
            )
        )

    async def run(action: ActionEvent) -> str:
        # An action is durable before its effect starts, so this is an acknowledgement too.
        tell(LoggedEvent(0, action))
        call = recorded[action.provider_call_id or ""]
        if call is step.calls[-1]:
            await pause()
        return call.result

    async def words() -> AsyncIterator[str]:
        middle = len(step.text) // 2
        yield step.text[:middle]
        await pause()
        yield step.text[middle:]

    recorded = {call.provider_call_id: call for call in step.calls}
    if step.calls:
        calls = [ToolCall(c.tool_name, c.arguments, c.provider_call_id) for c in step.calls]
        for logged in await turn.call_tools(calls, run, text=step.text):
            tell(logged)
    else:
        tell(await turn.stream(words()))


class _Desk:
    """Carries out the orders."""

    def __init__(self, start: Start, player: _Player, report: Callable[[Report], None]) -> None:
        self._start = start
        self._player = player
        self._report = report
        self._parts = {part.conversation: part for part in start.parts}

    async def work(self, conversations: Conversations, orders_: AsyncIterator[Order]) -> None:
        """Carry out the orders until they end; turns that still run stay unfinished."""
        async with anyio.create_task_group() as group:
            self._report(Ready())
            async for order in orders_:
                match order:
                    case Send():
                        group.start_soon(self._send, conversations[order.conversation], order)
                    case Release():
                        self._player.release(order)
                    case GetViews():
                        self._report(await views_of(conversations, order.conversations))
                    case Start() | StartStress():
                        raise ValueError("the worker has been started already")
            group.cancel_scope.cancel()

    async def _send(self, conversation: Conversation, order: Send) -> None:
        part, exchange = self._parts[order.conversation], order.exchange
        message = part.recorded.exchanges[exchange]
        try:
            if exchange == 0:
                await self._open(conversation, part)
            turn = await conversation.send(
                message.content,
                images=[ImageContent(url=url) for url in message.images],
                message_id=message_id(part.conversation, exchange),
                on_overlap=order.on_overlap,
            )
        except (TurnInProgress, QueueFull) as refused:
            self._report(
                Refused(conversation=part.conversation, exchange=exchange, why=str(refused))
            )
            return
        self._report(
            Accepted(
                conversation=part.conversation,
                exchange=exchange,
                seq=turn.seq,
                is_duplicate=turn.is_duplicate,
            )
        )
        end = await turn.end()
        self._report(Ended(conversation=part.conversation, exchange=exchange, outcome=end.outcome))

    async def _open(self, conversation: Conversation, part: Part) -> None:
        """Begin the log with the events before the first user message.

        Ids and time are the same after every restart, so these are the same events.
        """
        at = self._start.started_at
        begin: list[Event] = [
            AgentMessageEvent(id=f"{part.conversation}/opening/{n}", timestamp=at, content=text)
            for n, text in enumerate(part.recorded.opening)
        ]
        if part.recorded.system_prompt is not None:
            prompt = part.recorded.system_prompt
            begin.insert(
                0,
                SystemPromptEvent(id=f"{part.conversation}/system", timestamp=at, content=prompt),
            )
        for event in begin:
            seq = (await conversation.append(event)).seq
            self._report(Logged(conversation=part.conversation, event_id=event.id, seq=seq))


async def views_of(conversations: Conversations, names: Iterable[str]) -> Views:
    """Return the views of some conversations, read from their owners."""
    views = {name: await conversations[name].view() for name in names}
    return Views(event_ids={name: tuple(e.id for e in view) for name, view in views.items()})


async def read_orders(ports: Ports) -> AsyncGenerator[Order, None]:
    """Yield the orders, to the end of the input.

    A separate thread reads them, even while the reports wait to be read. Otherwise both sides could
    wait for each other.
    """
    call = thread_caller()
    lines: deque[bytes] = deque()
    more = anyio.Event()

    def take(chunk: bytes) -> None:
        lines.append(chunk)
        more.set()

    def read() -> None:
        # Not `sys.stdin`: a thread that waits with its lock would block the end of the process.
        while chunk := os.read(0, _READ_SIZE):
            call(partial(take, chunk))
        call(partial(take, b""))

    ports.start_thread("orders", read)
    rest = b""
    while True:
        await more.wait()
        more = anyio.Event()
        while lines:
            chunk = lines.popleft()
            if not chunk:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield orders.validate_json(line)


async def _main(
    report: Callable[[Report], None], lines: AsyncIterator[Order], journal: Callable[[str], Journal]
) -> None:
    start = await anext(lines)
    if not isinstance(start, Start):
        raise TypeError(f"the first order is {start.kind}, not start")
    player = _Player(start, report)
    async with Conversations(
        player,
        journal=journal(start.db),
        condenser=RollingCondenser(max_size=start.view_events_max),
        # Turns that other programs left unfinished are not ended or answered here.
        recover="on_enter" if start.is_own_journal else "on_message",
    ) as conversations:
        await _Desk(start, player, report).work(conversations, lines)


def serve(
    work: Callable[[Callable[[Report], None], AsyncIterator[Order]], Awaitable[None]],
    backend: str = "asyncio",
) -> None:
    """Run `work` with a function that reports, and with the orders, until standard input ends."""
    # Prints go to standard error, so that nothing mixes with the reports.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # One line for each record; by default structlog draws tracebacks, and slowly.
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    )

    def report(one: Report) -> None:
        out.write(one.model_dump_json().encode() + b"\n")
        out.flush()

    async def run() -> None:
        async with aclosing(read_orders(Ports())) as lines:
            await work(report, lines)

    try:
        anyio.run(run, backend=backend)
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        report(Failed(error=type(cause).__name__, why=error_line(cause)))
        raise SystemExit(1) from error


def main(journal: Callable[[str], Journal] = SQLiteJournal) -> None:
    """Run until the standard input ends; `journal` opens a journal file."""
    serve(partial(_main, journal=journal))


if __name__ == "__main__":
    main()
