"""Agents that misbehave, for the turns of the simulated world, with their models and tools.

The tape decides what an agent does; by default it answers at once. A plain agent may think, say
several things, stream, call tools side by side, raise, hang, end without an answer, swallow its
cancellation for a while, and go on after its turn has ended. The other agent is the production
`ToolAgent`, with a model that streams, calls existing and missing tools, writes invalid JSON, fails
in every way that models may, and breaks off in the middle.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ClassVar

import anyio

from turnkeeper.runtime import TurnkeeperError
from turnkeeper.runtime.testing import Simulation

from ..agents.agent import Agent
from ..agents.tool_agent import ToolAgent
from ..agents.tools import ToolContext, Tools, tool
from ..agents.turn_context import TurnContext
from ..core.condensation import Need, Proposal
from ..core.view import View
from ..events import ActionEvent, TokenUsage
from ..models.base import (
    ContextOverflow,
    MalformedHistory,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelUnavailable,
)
from ..tool_calls import ToolCall
from ..values.text import hold_back_half, storable
from ._disk import SimulatedJournal, linger
from ._oracles import Oracles

__all__ = [
    "SWALLOWS_S",
    "CarelessCondenser",
    "SimulatedAgent",
    "SimulatedToolAgent",
    "SummaryModel",
    "pieces_of",
]

SWALLOWS_S = 2.0
"""How long a tool swallows its cancellation: longer than the runtime waits for it."""
_STEPS_MAX = 3
_FACE = "\ud83d\ude00"
"""A character in the two halves in which some models send it."""
_CALLS_MAX = 3
_PATIENCE_S = 0.5
_DEAF_S = 0.8
"""Longer than a condenser may take where some hang, and shorter than a runtime's `kill_s`."""


def pieces_of(oracles: Oracles, turn_id: str, begins: str, count: int) -> Iterator[str]:
    """Yield an answer that begins so, and have the oracles know each piece before it is written.

    Every second piece ends in the middle of a character.
    """
    streamed = oracles.streamed.setdefault(turn_id, set())
    said = ""
    for n in range(count):
        piece = f"p{n}.{_FACE[0]}" if n % 2 else f"{_FACE[1] if n else begins}p{n}."
        said += piece
        streamed.update((storable(said), hold_back_half(said)[0]))
        yield piece


class ToolBroke(Exception):
    """A simulated tool, model or condenser fails."""


@dataclass(frozen=True, slots=True)
class _Outside:
    """The outside world of one node's agents and tools, and how badly they behave in it."""

    simulation: Simulation
    oracles: Oracles
    journal: SimulatedJournal
    misbehaves: bool
    pieces_max: int

    def look(self, turn: TurnContext, view: View) -> None:
        self.oracles.saw_view(turn.conversation_id, view, f"turn {turn.turn_id}", floor=0)

    async def act(self, conversation_id: str, call_id: str, *, is_idempotent: bool) -> str:
        """Act on the outside world: the only thing here that no journal can take back."""
        simulation, ledger = self.simulation, self.oracles.tools
        self.journal.node.check_alive()
        self.oracles.starts_tool(
            conversation_id, call_id, self.journal, is_idempotent=is_idempotent
        )
        await linger(simulation, "tool", 0.5, 5.0)
        if self.misbehaves:
            if simulation.chance("tool raises", 0.1):
                raise ToolBroke("the tool raises")
            if simulation.chance("tool hangs", 0.05):
                await self.simulation.sleep(30.0)
            if simulation.chance("tool swallows its cancellation", 0.05):
                with anyio.CancelScope(shield=True):
                    await self.simulation.sleep(SWALLOWS_S)
        is_wordy = self.misbehaves and simulation.chance("tool is wordy", 0.1)
        text = f"done {call_id[-6:]}" + "!" * (40_000 * is_wordy)
        ledger.returned.setdefault(call_id, set()).add(text)
        return text

    async def pieces(self, turn: TurnContext) -> AsyncGenerator[str, None]:
        """Yield an answer piece by piece; no two answers begin alike."""
        simulation = self.simulation
        begins = f"{simulation.steps}:"
        count = 1 + simulation.draw("pieces", self.pieces_max)
        for piece in pieces_of(self.oracles, turn.turn_id, begins, count):
            yield piece
            await linger(simulation, "piece", 0.3, 2.0)
            if self.misbehaves and simulation.chance("stream breaks", 0.05):
                raise ToolBroke("half a stream")


class SimulatedAgent:
    """A plain agent, of one node."""

    def __init__(
        self,
        simulation: Simulation,
        oracles: Oracles,
        journal: SimulatedJournal,
        *,
        misbehaves: bool,
        pieces_max: int,
    ) -> None:
        self.simulation = simulation
        self.oracles = oracles
        self.misbehaves = misbehaves
        self._outside = _Outside(simulation, oracles, journal, misbehaves, pieces_max)

    async def run(self, turn: TurnContext) -> None:
        self.oracles.agent_begins(turn.conversation_id, turn.turn_id)
        try:
            await self._answer(turn)
        except ToolBroke:
            self.oracles.raised.add(turn.turn_id)
            raise

    async def _answer(self, turn: TurnContext) -> None:
        simulation = self.simulation
        self._outside.look(turn, turn.view)
        if self.misbehaves and simulation.chance("agent is a zombie", 0.15):
            await self._be_a_zombie(turn)
            return
        for _ in range(simulation.draw("agent steps", _STEPS_MAX)):
            await linger(simulation, "agent thinks", 0.4, 3.0)
            await self._step(turn)
            self._outside.look(turn, turn.view)
        await linger(simulation, "agent thinks", 0.4, 3.0)
        if self.misbehaves and simulation.chance("agent ends without a word", 0.05):
            return
        await self._say(turn, f"a({turn.message.content})")

    async def _step(self, turn: TurnContext) -> None:
        simulation = self.simulation
        kinds = ["say", "tools", "stream", "finish", "begin"]
        if self.misbehaves:
            kinds += ["raise", "hang", "look away", "hang"]
        match simulation.pick("agent step", kinds):
            case "say":
                await self._say(turn, f"hm {simulation.steps}")
            case "tools":
                count = 1 + simulation.draw("agent calls", _CALLS_MAX)
                calls = [ToolCall("act", {"n": n}) for n in range(count)]
                await turn.call_tools(calls, lambda action: self._act(turn, action))
            case "stream":
                logged = await turn.stream(self._outside.pieces(turn))
                self.oracles.saw_event(turn.conversation_id, logged, "an agent")
            case "finish":
                await turn.finish_step(TokenUsage(input_tokens=1))
            case "begin":
                self._outside.look(turn, await turn.begin_step())
            case "raise":
                raise ToolBroke("the agent raises")
            case "hang":
                await self.simulation.sleep(60.0)
                self.oracles.goes_on(turn.conversation_id, turn.turn_id, self._outside.journal)
            case _:
                with anyio.move_on_after(_PATIENCE_S):
                    await self._say(turn, "said while nobody waits for it")

    async def _act(self, turn: TurnContext, action: ActionEvent) -> str:
        return await self._outside.act(
            turn.conversation_id, action.tool_call_id, is_idempotent=False
        )

    async def _say(self, turn: TurnContext, text: str) -> None:
        logged = await turn.say(text)
        self.oracles.saw_event(turn.conversation_id, logged, "an agent")

    async def _be_a_zombie(self, turn: TurnContext) -> None:
        """Go on after the turn has ended: the agent's output must not land anywhere else."""
        self.simulation.mark("zombie agent")
        for n in range(4):
            try:
                await self.simulation.delay("zombie", 1.0, 4.0)
                await turn.say(f"zombie {turn.turn_id} {n}")
            except TurnkeeperError:
                self.simulation.mark("zombie refused")
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await self.simulation.sleep(_PATIENCE_S)
                    try:
                        await turn.say(f"zombie {turn.turn_id} cancelled")
                    except TurnkeeperError:
                        self.simulation.mark("zombie refused")
                raise


_outside: ContextVar[_Outside] = ContextVar("turnkeeper_simulated_outside")
"""The surroundings that the tools of the running turn act on."""


async def act(context: ToolContext, n: int = 0) -> str:
    """Act, once."""
    del n
    return await _outside.get().act(
        context.conversation_id, context.tool_call_id, is_idempotent=False
    )


@tool(idempotent=True, timeout_s=20.0)
async def look(context: ToolContext) -> str:
    """Look, as often as you like."""
    return await _outside.get().act(
        context.conversation_id, context.tool_call_id, is_idempotent=True
    )


# Made once: the schemas of tools cost more than a whole turn.
_TOOLS = Tools(act, look, calls_at_once_max=2)


class SimulatedToolAgent:
    """The production `ToolAgent` of one node, with a model for each turn."""

    is_resumable: ClassVar[bool] = True

    def __init__(
        self,
        simulation: Simulation,
        oracles: Oracles,
        journal: SimulatedJournal,
        *,
        misbehaves: bool,
        confirms: bool,
        pieces_max: int,
    ) -> None:
        self._outside = _Outside(simulation, oracles, journal, misbehaves, pieces_max)
        self._confirms = confirms

    async def run(self, turn: TurnContext) -> None:
        _outside.set(self._outside)
        self._outside.oracles.agent_begins(turn.conversation_id, turn.turn_id)
        agent: Agent = ToolAgent(
            _SimulatedModel(self._outside, turn),
            _TOOLS,
            confirm=["act"] if self._confirms else "never",
            max_iterations=8,
        )
        await agent.run(turn)


@dataclass(slots=True)
class _SimulatedModel:
    """A model that answers one turn, or does not."""

    outside: _Outside
    turn: TurnContext
    responses: int = field(default=0)

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        simulation, turn = self.outside.simulation, self.turn
        self.outside.look(turn, request.view)
        self.outside.oracles.asks_model(turn.conversation_id, turn.turn_id, request.view)
        await linger(simulation, "model", 0.5, 3.0)
        self.responses += 1
        if self.outside.misbehaves:
            self._fail()
        usage = TokenUsage(input_tokens=1)
        is_done = self.responses > _STEPS_MAX
        match simulation.pick("response", ("text", "calls", "calls", "empty")):
            case "calls" if not is_done:
                return ModelResponse(calls=self._calls(), usage=usage)
            case "empty" if self.outside.misbehaves:
                return ModelResponse(usage=usage)
            case _:
                said = ""
                try:
                    async with aclosing(self.outside.pieces(turn)) as pieces:
                        async for piece in pieces:
                            await write(piece)
                            said += piece
                except ToolBroke as error:
                    raise ModelUnavailable("simulated", str(error)) from error
                return ModelResponse(text=said, usage=usage)

    def _fail(self) -> None:
        simulation = self.outside.simulation
        if not simulation.chance("model fails", 0.2):
            return
        match simulation.pick("how", ("away", "away for long", "too long", "malformed", "error")):
            case "away":
                raise ModelUnavailable("simulated", "a 500")
            case "away for long":
                raise ModelUnavailable("simulated", "a 429", retry_after_s=20.0)
            case "too long":
                raise ContextOverflow("simulated", "too many tokens")
            case "malformed":
                raise MalformedHistory("simulated", "roles must alternate")
            case _:
                raise ModelError("simulated", "no such model")

    def _calls(self) -> Sequence[ToolCall]:
        simulation = self.outside.simulation
        calls = []
        for n in range(1 + simulation.draw("model calls", _CALLS_MAX)):
            match simulation.pick("call", ("act", "act", "look", "unknown", "malformed")):
                case "unknown":
                    calls.append(ToolCall("nobody", {}, f"same id {n % 2}"))
                case "malformed":
                    calls.append(ToolCall("act", {}, malformed_arguments='{"n": '))
                case name:
                    calls.append(ToolCall(name, {"n": n} if name == "act" else {}))
        return calls


@dataclass(frozen=True, slots=True)
class SummaryModel:
    """A model for summaries that is slow and fails now and then."""

    simulation: Simulation

    async def __call__(self, history: str) -> str:
        await self.simulation.delay("summary", 0.5, 5.0)
        if self.simulation.chance("summary fails", 0.15):
            raise ToolBroke("no summary")
        return f"summary of {len(history)} characters"


@dataclass(frozen=True, slots=True)
class CarelessCondenser:
    """Proposes any range of the view: the owner has to notice which proposals would tear it."""

    simulation: Simulation
    hangs: bool = False
    """Some of its calls never return, and some take no notice of being cancelled."""

    def need(self, view: View) -> Need | None:
        if view.unhandled_condensation_request:
            return "hard"
        return "soft" if len(view) > 5 else None  # noqa: PLR2004 - any small number

    async def propose(self, view: View, need: Need) -> Proposal | None:
        del need
        hangs = ("no", "no", "for good", "deaf") if self.hangs else ("no",)
        match self.simulation.pick("condenser hangs", hangs):
            case "for good":
                await anyio.sleep_forever()
            case "deaf":
                with anyio.CancelScope(shield=True):
                    await self.simulation.sleep(_DEAF_S)
            case _:
                await self.simulation.delay("condenser", 0.7, 3.0)
        start = self.simulation.draw("forget from", len(view))
        count = 1 + self.simulation.draw("forget so many", min(4, len(view) - start))
        ids = tuple(event.id for event in view[start : start + count])
        return Proposal(ids, self.simulation.pick("with a summary", (None, "a summary")))
