"""What runs in the turns of the simulated world: an agent that misbehaves, its tools, its model.

What an agent does is drawn; the boring one answers at once. It may think, say several things,
stream, call tools side by side, raise, hang, end without a word, swallow its cancellation for a
while, and go on after its turn has ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio

from turnkeeper.runtime import TurnkeeperError
from turnkeeper.runtime.testing import Simulation

from ..agents import ToolCall, TurnContext
from ..events import ActionEvent, TokenUsage
from ._disk import SimulatedJournal
from ._oracles import Oracles

__all__ = ["SimulatedAgent", "summarize"]

_STEPS_MAX = 4
_PIECES_MAX = 5
_CALLS_MAX = 3


class ToolBroke(Exception):
    """A simulated tool, model or condenser fails."""


@dataclass(frozen=True, slots=True)
class SimulatedAgent:
    """The agent of one node."""

    simulation: Simulation
    oracles: Oracles
    journal: SimulatedJournal
    misbehaves: bool

    async def run(self, turn: TurnContext) -> None:
        simulation = self.simulation
        self._look(turn)
        if self.misbehaves and simulation.chance("agent is a zombie", 0.05):
            await self._be_a_zombie(turn)
            return
        for _ in range(simulation.draw("agent steps", _STEPS_MAX)):
            await simulation.delay("agent thinks", 0.4, 3.0)
            await self._step(turn)
            self._look(turn)
        await simulation.delay("agent thinks", 0.4, 3.0)
        if self.misbehaves and simulation.chance("agent ends without a word", 0.05):
            return
        await self._say(turn, f"a({turn.message.content})")

    def _look(self, turn: TurnContext) -> None:
        self.oracles.saw_view(turn.conversation_id, turn.view, f"turn {turn.turn_id}", floor=0)

    async def _step(self, turn: TurnContext) -> None:
        simulation = self.simulation
        kinds = ["say", "tools", "stream", "finish"]
        if self.misbehaves:
            kinds += ["raise", "hang", "look away"]
        match simulation.pick("agent step", kinds):
            case "say":
                await self._say(turn, f"hm {simulation.steps}")
            case "tools":
                count = 1 + simulation.draw("agent calls", _CALLS_MAX)
                calls = [ToolCall("act", {"n": n}) for n in range(count)]
                await turn.call_tools(calls, lambda action: self._tool(turn, action))
            case "stream":
                logged = await turn.stream(self._pieces(turn))
                self.oracles.saw_event(turn.conversation_id, logged, "an agent")
            case "finish":
                await turn.finish_step(TokenUsage(input_tokens=1))
            case "raise":
                raise ToolBroke("the agent raises")
            case "hang":
                await anyio.sleep(60.0)
            case _:
                with anyio.move_on_after(0.5):
                    await self._say(turn, "said while nobody waits for it")

    async def _say(self, turn: TurnContext, text: str) -> None:
        logged = await turn.say(text)
        self.oracles.saw_event(turn.conversation_id, logged, "an agent")

    async def _pieces(self, turn: TurnContext) -> AsyncIterator[str]:
        simulation = self.simulation
        said = ""
        streamed = self.oracles.streamed.setdefault(turn.turn_id, set())
        for n in range(1 + simulation.draw("pieces", _PIECES_MAX)):
            piece = f"p{n}."
            said += piece
            streamed.add(said)
            yield piece
            await simulation.delay("piece", 0.3, 2.0)
            if self.misbehaves and simulation.chance("stream breaks", 0.05):
                raise ToolBroke("half a stream")

    async def _tool(self, turn: TurnContext, action: ActionEvent) -> str:
        """Acts on the outside world."""
        simulation, ledger = self.simulation, self.oracles.tools
        call_id = action.tool_call_id
        self.journal.node.check_alive()
        self.oracles.starts_tool(turn.conversation_id, call_id, self.journal)
        await simulation.delay("tool", 0.5, 5.0)
        if self.misbehaves:
            if simulation.chance("tool raises", 0.1):
                raise ToolBroke("the tool raises")
            if simulation.chance("tool hangs", 0.05):
                await anyio.sleep(30.0)
            if simulation.chance("tool swallows its cancellation", 0.05):
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(2.0)
        text = f"done {call_id[-6:]}" + "!" * (40_000 * simulation.draw("tool is wordy", 2))
        ledger.returned[call_id] = text
        return text

    async def _be_a_zombie(self, turn: TurnContext) -> None:
        """Go on where it should have ended: what it says must not land anywhere else."""
        self.simulation.mark("zombie agent")
        for n in range(4):
            try:
                await self.simulation.delay("zombie", 1.0, 4.0)
                await turn.say(f"zombie {turn.turn_id} {n}")
            except TurnkeeperError:
                self.simulation.mark("zombie refused")
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.5)
                    try:
                        await turn.say(f"zombie {turn.turn_id} cancelled")
                    except TurnkeeperError:
                        self.simulation.mark("zombie refused")
                raise


def summarize(simulation: Simulation) -> SummaryModel:
    """A model that writes summaries, slowly, and fails now and then."""
    return SummaryModel(simulation)


@dataclass(frozen=True, slots=True)
class SummaryModel:
    """Asked for a summary; see `summarize`."""

    simulation: Simulation

    async def __call__(self, history: str) -> str:
        await self.simulation.delay("summary", 0.5, 5.0)
        if self.simulation.chance("summary fails", 0.15):
            raise ToolBroke("no summary")
        return f"summary of {len(history)} characters"
