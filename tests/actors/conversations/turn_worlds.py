"""What the tests of turns share: an agent that can be run again, and logs in a few words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar

import anyio

from turnkeeper.actors import (
    Conversation,
    Event,
    TokenUsage,
    ToolCall,
    ToolResult,
    TurnContext,
)
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    RetractionEvent,
    StepFinishedEvent,
    StepUnfinishedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
)

USAGE = TokenUsage(input_tokens=1)
HALF = "half"
"""What the agent has written of an answer when a test holds it in the middle."""


class StepAgent:
    """A function of its turn's view: takes the steps of a script, and then answers.

    Its turn's first chat message says which script. It answers with the names of all chat messages
    of the turn, `A+B`. A test can hold it at a point: `A thinks`, `A writes`, `A calls` (in a
    tool), `A answered` (before its turn ends), or at the same of a step, `A thinks 1`.
    """

    is_resumable: ClassVar[bool] = True

    def __init__(
        self, scripts: Mapping[str, str] | None = None, *, idempotent: bool = False
    ) -> None:
        self._scripts = scripts or {}
        self._idempotent = idempotent
        self.held: dict[str, anyio.Event] = {}
        self.reached: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
        self.shown: list[str] = []
        """What each model call was shown, in brief."""
        self.ran: list[str] = []
        """The tool calls that were run, by id."""

    def hold(self, *points: str) -> None:
        for point in points:
            self.held[point] = anyio.Event()

    def release(self) -> None:
        """Let go of everything, and hold nothing from now on."""
        held, self.held = self.held, {}
        for event in held.values():
            event.set()

    async def _stop(self, point: str, step: int) -> None:
        for name in (point, f"{point} {step}"):
            self.reached[name].set()
            if name in self.held:
                await self.held[name].wait()

    async def run(self, turn: TurnContext) -> None:
        name = turn.messages[0].content
        script = self._scripts.get(name, "").split()
        await turn.run_calls(tuple(turn.open_calls.values()), self._taken_up(turn, name))
        if turn.has_answered:
            return
        while True:
            view = await turn.begin_step()
            step = turn.steps
            self.shown.append(brief(*view))
            await self._stop(f"{name} thinks", step)
            if step >= len(script):
                break
            calls = [ToolCall("look") for _ in range(1 + (script[step] in ("calls", "asks-two")))]
            asks = script[step].startswith("asks")
            actions = await turn.propose_calls(calls, usage=USAGE, needs_confirmation=asks)
            await turn.run_calls(actions, self._tool(name, step))
        write = turn.writer()
        await write(HALF)
        await self._stop(f"{name} writes", turn.steps)
        await turn.say("+".join(m.content for m in turn.messages), usage=USAGE)
        await self._stop(f"{name} answered", turn.steps)
        if "fails" in name:
            raise RuntimeError(name)

    def _taken_up(
        self, turn: TurnContext, name: str
    ) -> Callable[[ActionEvent], Awaitable[ToolResult | str]]:
        run = self._tool(name, turn.steps)

        async def answer(action: ActionEvent) -> ToolResult | str:
            if turn.is_unstarted(action.tool_call_id) or self._idempotent:
                return await run(action)
            return ToolResult("it may have", is_error=True, may_have_happened=True)

        return answer

    def _tool(self, name: str, step: int) -> Callable[[ActionEvent], Awaitable[str]]:
        async def look(action: ActionEvent) -> str:
            self.ran.append(action.tool_call_id)
            await self._stop(f"{name} calls", step)
            return "seen"

        return look


class OnceAgent(StepAgent):
    """The same, but it says that it cannot be run again on a turn that has begun."""

    is_resumable: ClassVar[bool] = False


def word(event: Event) -> str:
    """An event in one word, as `docs/turns.md` writes it; empty for those that it leaves out."""
    match event:
        case UserMessageEvent(content=content):
            return f"u{content}"
        case AgentMessageEvent(content=content, interrupted=True):
            return "a…" if content == HALF else f"a…({content})"
        case AgentMessageEvent(content=content):
            return f"a{content}"
        case AgentErrorEvent():
            return "unknown" if event.may_have_happened else "no result"
        case MessageQueuedEvent(content=content):
            return f"q{content}-again" if event.queued_again else f"q{content}"
        case MessageWithdrawnEvent(message_id=message_id):
            return f"w{message_id}"
        case TurnEndedEvent(outcome=outcome):
            return outcome.replace("_", "-")
        case ConfirmationGivenEvent(confirmed=confirmed):
            return "confirmed" if confirmed else "rejected"
        case _:
            return _WORDS.get(type(event), event.kind)


_WORDS: dict[type[Event], str] = {
    ActionEvent: "call",
    ObservationEvent: "result",
    UserRejectEvent: "not-run",
    TurnStartedEvent: "started",
    ConfirmationRequestedEvent: "asked",
    RetractionEvent: "retracted",
    CondensationEvent: "condensed",
    StepFinishedEvent: "",
    StepUnfinishedEvent: "",
}


def brief(*events: Event) -> str:
    """Events in a line."""
    return " ".join(filter(None, map(word, events)))


async def events_of(chat: Conversation) -> Sequence[Event]:
    """The whole log as it is now."""
    return [logged.event async for logged in chat.events(live=False)]


async def log_of(chat: Conversation) -> str:
    """The whole log as it is now, in a line."""
    return brief(*await events_of(chat))


async def until(chat: Conversation, kind: str, *, times: int = 1) -> None:
    """Wait until the log has this many events of a kind."""
    async for logged in chat.events():
        times -= logged.event.kind == kind
        if not times:
            return
