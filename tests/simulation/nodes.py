"""Three gateways' nodes in the simulated world: commands hop over a network that fails.

Each node of the conversation world runs the production `gateway.Node` too. Only its HTTP client is
replaced: what it would send over a connection goes over a simulated network, to the ASGI
application of the other node. So a client may ask any node, and all the invariants of the
conversation world hold as if it had asked the owner. These are looked at besides:

- N1: a command takes one hop: what was forwarded is not forwarded again.
- N2: one call of a client is carried out by one owner, and a request that arrives twice, once.
- N3: what a node says did not happen elsewhere did not, and does not later.
- N4: every command that is forwarded ends within the bounds of its client.

The network delays, loses before and after the other node has the request, delivers once more much
later, and is cut between two nodes in one direction or in both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import anyio
from starlette.types import Message

from turnkeeper.actors import Conversations, gateway
from turnkeeper.actors.core.commands import FromOutside
from turnkeeper.actors.events import LoggedEvent
from turnkeeper.actors.gateway.node_client import CONNECT_S, Broken, Unreachable
from turnkeeper.actors.owner.nodes import FORWARDED_MAX, NotReached
from turnkeeper.actors.simulation import ConversationWorld, Options
from turnkeeper.actors.simulation._disk import linger
from turnkeeper.actors.simulation._oracles import ShownAnswer
from turnkeeper.actors.simulation._world import Lost, _Run, _Server
from turnkeeper.runtime import OutcomeUnknown, OwnershipLost, Refused, Unavailable
from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import Node, NodeCrashed, Simulation

__all__ = ["MARKS", "NodesWorld", "PiecesWorld"]

R = TypeVar("R")
T = TypeVar("T")

ANSWER_S = 5.0
SILENCE_S = 3.0
SLACK_S = 0.5
LISTENERS = 4
KEYS = gateway.NodeKeys(["k" * 32])
LIMITS = gateway.NodeLimits(answer_s=ANSWER_S, silence_s=SILENCE_S, heartbeat_s=1.0, retry_s=0.5)

MARKS = frozenset(
    {
        "forwarded",
        "forwarded twice",
        "lost before it was there",
        "lost on its way back",
        "replayed",
        "cut, one way",
        "cut, both ways",
        "not reached",
        "outcome unknown over the hop",
        "piece over the hop",
        "relay broken",
        "drained, messages queue",
        "takeover",
        "turn completed",
    }
)
"""The interesting places: a long campaign that does not reach each proves less than it says."""

_is_forwarded: ContextVar[bool] = ContextVar("is_forwarded", default=False)
"""True in a task that carries out what another node has forwarded."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of a client, and what became of the command that was forwarded for it."""

    command: object
    forwards: int = 0
    carried_out_by: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Said:
    """A request as it goes over the network."""

    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(eq=False, slots=True)
class Request:
    """One forwarded command on its way."""

    call: Call
    is_carried_out: bool = False
    is_told_as_not_happened: bool = False


_request: ContextVar[Request | None] = ContextVar("request", default=None)


class WatchedNode(gateway.Node):
    """The production node, with an eye on what it says of what it asks."""

    simulation: Simulation
    calls: dict[int, Call]
    """Each call of this process, by the identity of its command: a second forward has the same."""
    is_bounded = True
    """Its node stands still in no run."""

    async def ask(self, address: str, conversation_id: str, command: FromOutside[R]) -> R:
        simulation = self.simulation
        if _is_forwarded.get():
            simulation.broken("N1", f"{type(command).__name__} to {conversation_id} hops again")
        # It is kept, so that no other one has its identity.
        call = self.calls.setdefault(id(command), Call(command))
        call.forwards += 1
        simulation.mark("forwarded" if call.forwards == 1 else "forwarded twice")
        request = Request(call)
        token = _request.set(request)
        began_at = simulation.now()
        try:
            return await super().ask(address, conversation_id, command)
        except NotReached:
            simulation.mark("not reached")
            request.is_told_as_not_happened = True
            if request.is_carried_out:
                simulation.broken("N3", f"{type(command).__name__} to {conversation_id}")
            raise
        except OutcomeUnknown:
            simulation.mark("outcome unknown over the hop")
            raise
        finally:
            _request.reset(token)
            took_s = simulation.now() - began_at
            if self.is_bounded and took_s > CONNECT_S + ANSWER_S + SLACK_S:
                simulation.broken("N4", f"{type(command).__name__} took {took_s:.1f} s")


@dataclass(eq=False, slots=True)
class Machine:
    """One incarnation of a node, as the others reach it."""

    node: Node
    gateway: gateway.Node


class Network:
    """Carries requests between the nodes' listeners."""

    def __init__(self, simulation: Simulation, *, loss: float, replays: float, slow: float) -> None:
        self.simulation = simulation
        self.machines: dict[str, Machine] = {}
        self.is_healed = False
        self._loss = loss
        self._replays = replays
        self.slow = slow
        """How often a request takes so long that its owner may be another one by then."""
        self._cut: dict[tuple[str, str], None] = {}

    def cut(self, source: str, target: str) -> None:
        """Lose everything from one node to another."""
        self._cut[source, target] = None
        self.simulation.note(f"cut from {source} to {target}")

    def join(self) -> None:
        """End all cuts."""
        if self._cut:
            self._cut.clear()
            self.simulation.note("no cut any more")

    def heal(self) -> None:
        """Fail no more."""
        self.is_healed = True
        self.join()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def loses(self, what: str) -> bool:
        return not self.is_healed and self.simulation.chance(f"wire loses {what}", self._loss)

    def replays(self) -> bool:
        return not self.is_healed and self.simulation.chance("wire replays", self._replays)

    async def connect(self, source: str, address: str) -> str:
        """Return the name of the node at an address. Raises `Unreachable`."""
        target = urlsplit(address).hostname or ""
        await linger(self.simulation, "connect")
        if self.is_cut(source, target) or self.is_cut(target, source):
            await self.simulation.sleep(CONNECT_S)
            raise Unreachable
        if self._machine(target) is None:
            raise Unreachable
        return target

    def _machine(self, name: str) -> Machine | None:
        machine = self.machines.get(name)
        return machine if machine is not None and machine.node.is_alive else None

    async def serve(
        self,
        target: str,
        said: Said,
        send: Callable[[Message], Awaitable[None]],
        closed: anyio.Event,
    ) -> None:
        """Have the node of this name answer a request. Raises `NodeCrashed` if there is none."""
        machine = self._machine(target)
        if machine is None:
            raise NodeCrashed(target)
        scope = {
            "type": "http",
            "method": "POST",
            "path": said.path,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in said.headers],
        }
        is_given = False

        async def receive() -> Message:
            nonlocal is_given
            if not is_given:
                is_given = True
                return {"type": "http.request", "body": said.body, "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}

        async def answer() -> None:
            _is_forwarded.set(True)
            await machine.gateway(scope, receive, send)

        await machine.node.call(answer)


class Client:
    """What a node has in place of `NodeClient`: the same errors, at the same places."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    async def post(
        self, address: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, bytes]:
        network = self._network
        peer = await network.connect(self._node.name, address)
        answer: OneShot[tuple[int, bytes]] = OneShot()
        request = _request.get()
        assert request is not None, "a command outside of a node's own way"
        carry = partial(self._carry, peer, Said(target, headers, body), request)
        network.simulation.start_soon(carry, answer)
        with anyio.move_on_after(ANSWER_S):
            return await answer.wait()
        raise Broken("no answer came in time")

    async def _carry(
        self,
        peer: str,
        said: Said,
        request: Request,
        answer: OneShot[tuple[int, bytes]],
    ) -> None:
        network, simulation, source = self._network, self._network.simulation, self._node.name
        await linger(simulation, "wire there")
        await linger(simulation, "wire there, slow", self._network.slow, ANSWER_S)
        if network.loses("a request"):
            simulation.mark("lost before it was there")
            answer.fail(Broken("reset"))
            return
        if network.is_cut(source, peer):
            return  # its client hears nothing, and gives up
        try:
            status, told = await self._answered(peer, said)
        except NodeCrashed:
            answer.fail(Broken("reset"))
            return
        if network.replays():
            simulation.start_soon(self._replay, peer, said)
        if status == 200 and b'"error"' not in told[:10]:
            self._carried_out(request, peer)
        await linger(simulation, "wire back")
        if network.is_cut(peer, source):
            return
        if network.loses("an answer"):
            simulation.mark("lost on its way back")
            answer.fail(Broken("reset"))
        else:
            answer.set((status, told))

    def _carried_out(self, request: Request, peer: str) -> None:
        simulation = self._network.simulation
        request.is_carried_out = True
        call = request.call
        call.carried_out_by.append(peer)
        if len(call.carried_out_by) > 1:
            simulation.broken("N2", f"one call was carried out by {call.carried_out_by}")
        if call.forwards > FORWARDED_MAX:
            simulation.broken("N1", f"one call was forwarded {call.forwards} times")
        if request.is_told_as_not_happened:
            simulation.broken("N3", f"carried out at {peer} after it was told as not happened")

    async def _replay(self, peer: str, said: Said) -> None:
        """Deliver a request once more, to the same name; a later process may have it by then."""
        simulation = self._network.simulation
        await simulation.sleep(simulation.pick("replayed after", (0.01, 0.5, 5.0, 40.0)))
        try:
            status, _ = await self._answered(peer, said)
        except NodeCrashed:
            return
        simulation.mark("replayed")
        if status not in (401, 404, 409):
            simulation.broken("N2", f"a request that was delivered again had status {status}")

    async def _answered(self, peer: str, said: Said) -> tuple[int, bytes]:
        status, told = 0, bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                told.extend(message.get("body", b""))

        await self._network.serve(peer, said, send, anyio.Event())
        return status, bytes(told)

    @asynccontextmanager
    async def lines(
        self,
        address: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        silence_s: float,
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        peer = await self._network.connect(self._node.name, address)
        stream = Stream(self._network, self._node, peer)
        carry = partial(stream.carry, Said(target, headers, body))
        self._network.simulation.start_soon(carry)
        try:
            status = await stream.take(silence_s)
            assert isinstance(status, int), status
            async with aclosing(stream.lines(silence_s)) as lines:
                yield status, lines
        finally:
            stream.closed.set()

    async def aclose(self) -> None: ...


class Stream:
    """One stream of lines: in order, until it is broken, or stands still for ever."""

    def __init__(self, network: Network, reader: Node, peer: str) -> None:
        self.closed = anyio.Event()
        self._network = network
        self._reader = reader
        self._peer = peer
        self._items: list[int | bytes | None] = []
        self._is_dead = self._is_broken = False
        self._arrived = anyio.Event()

    async def carry(self, said: Said) -> None:
        """Have the other node answer; runs in the world."""
        network = self._network
        await linger(network.simulation, "wire there")
        if network.is_cut(self._reader.name, self._peer):
            return
        try:
            await network.serve(self._peer, said, self._send, self.closed)
        except NodeCrashed:
            self._break()

    async def _send(self, message: Message) -> None:
        """Take a part of the answer; runs in the node that answers."""
        network = self._network
        if not self._reader.is_alive:
            self.closed.set()
        if self.closed.is_set():
            return
        await linger(network.simulation, "wire back")
        if self._is_dead or network.is_cut(self._peer, self._reader.name):
            self._is_dead = True  # what is lost in a connection is not followed by what comes later
            return
        if network.loses("a line"):
            self._break()
        elif message["type"] == "http.response.start":
            self._put(message["status"])
        elif message.get("body"):
            self._put(message["body"])
        elif not message.get("more_body"):
            self._put(None)

    def _break(self) -> None:
        self._network.simulation.mark("relay broken")
        self._is_broken = True
        self._put(None)

    def _put(self, item: int | bytes | None) -> None:
        self._items.append(item)
        self._arrived.set()

    async def take(self, silence_s: float) -> int | bytes | None:
        """Return the next part; None at the end. Raises `Broken`."""
        with anyio.move_on_after(silence_s):
            while not self._items:
                self._arrived = anyio.Event()
                await self._arrived.wait()
        if not self._items:
            raise Broken("nothing came")
        item = self._items.pop(0)
        if item is None and self._is_broken:
            raise Broken("reset")
        return item

    async def lines(self, silence_s: float) -> AsyncGenerator[bytes]:
        received = b""
        while True:
            line, end, rest = received.partition(b"\n")
            if end:
                received = rest
                if b'"piece"' in line:
                    self._network.simulation.mark("piece over the hop")
                yield line
                continue
            item = await self.take(silence_s)
            if item is None:
                return
            assert isinstance(item, bytes), item
            received += item


class NodesRun(_Run):
    """A run of the conversation world in which the nodes ask each other."""

    def __init__(self, simulation: Simulation, options: Options) -> None:
        super().__init__(simulation, options, None, struck_s=None)
        # Pieces may be lost between nodes: the event comes, and replaces them.
        self.oracles.is_calm = False
        self.has_cuts = simulation.chance("has cuts", 0.7)
        self.network = Network(
            simulation,
            loss=simulation.pick("wire loss", (0.0, 0.02, 0.1)),
            replays=simulation.pick("wire replay", (0.0, 0.1)),
            slow=simulation.pick("wire slow", (0.0, 0.1, 0.3)),
        )

    @asynccontextmanager
    async def _joined(self, server: _Server, conversations: Conversations) -> AsyncIterator[None]:
        node = server.node
        address = gateway.node_address(f"http://{node.name}:1", ports=node.ports)
        server.journal._address = address
        joined = WatchedNode(
            conversations, address=address, keys=KEYS, limits=LIMITS, ports=node.ports
        )
        joined.simulation, joined.calls = self.simulation, {}
        joined.is_bounded = not self.options.freezes
        joined._client = Client(self.network, node)  # type: ignore[assignment]
        async with joined:
            self.network.machines[node.name] = machine = Machine(node, joined)
            try:
                yield
            finally:
                if self.network.machines.get(node.name) is machine:
                    del self.network.machines[node.name]

    def _node_for(self, conversation_id: str, attempt: int) -> str:
        place = attempt + self.simulation.draw("which node", len(self.names))
        return self.names[place % len(self.names)]

    async def _request(
        self, name: str, serve: Callable[[_Server, Conversations], Awaitable[T]], limit_s: float
    ) -> T:
        try:
            return await super()._request(name, serve, limit_s)
        except Lost:
            is_send = isinstance(serve, partial) and serve.func == self._send
            may_stand = self.options.freezes or self.options.journal_faults
            if is_send and not may_stand and limit_s > 2 * FORWARDED_MAX * (CONNECT_S + ANSWER_S):
                self.simulation.broken("N4", f"no answer from {name} in {limit_s:g} s")
            raise

    async def _strike_nodes(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(super()._strike_nodes)
            group.start_soon(self._cut_again_and_again)

    async def _cut_again_and_again(self) -> None:
        simulation = self.simulation
        pairs = [(a, b) for a in self.names for b in self.names if a != b]
        while self.has_cuts:
            await simulation.sleep(0.2 + 0.2 * simulation.draw("next cut", 50))
            if self.is_healed:
                return
            source, target = simulation.pick("cut which", pairs)
            self.network.cut(source, target)
            if simulation.chance("cut both ways", 0.5):
                simulation.mark("cut, both ways")
                self.network.cut(target, source)
            else:
                simulation.mark("cut, one way")
            await simulation.sleep(simulation.pick("cut for", (1.0, 0.2, 8.0, 20.0)))
            self.network.join()

    def _heal(self) -> None:
        self.network.heal()
        super()._heal()


class PiecesRun(NodesRun):
    """A run with readers who come in the middle of an answer at any node, and go again."""

    async def _strike_nodes(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(super()._strike_nodes)
            for _ in range(LISTENERS):
                group.start_soon(self._listen)

    async def _listen(self) -> None:
        simulation = self.simulation
        while not self.is_healed:
            name = simulation.pick("listens to", self.conversation_ids)
            stay_s = simulation.pick("listens for", (0.3, 1.0, 0.1, 3.0))
            hear = partial(self._hear, name, stay_s)
            with suppress(Refused, OwnershipLost, Unavailable, OutcomeUnknown, Lost):
                await self._request(simulation.pick("listens at", self.names), hear, stay_s + 1)
            await simulation.sleep(simulation.pick("is away for", (0.1, 0.5)))

    async def _hear(
        self, name: str, stay_s: float, _: _Server, conversations: Conversations
    ) -> None:
        """Read along for a while: the first piece has all that was said of an answer so far."""
        oracles = self.oracles
        shown = ShownAnswer(is_calm=False)
        with anyio.move_on_after(stay_s):
            async for item in conversations[name].follow(after=oracles.head(name)):
                if isinstance(item, LoggedEvent):
                    if (found := shown.see(item.event)) is not None:
                        oracles.broken("C3", found)
                    continue
                self.simulation.mark("piece heard")
                if (found := shown.add(item)) is not None:
                    oracles.broken("C2", found)
                if shown.text not in oracles.streamed.get(item.turn_id, set()):
                    oracles.broken("C2", f"{shown.text!r} of turn {item.turn_id}")


class PiecesWorld(ConversationWorld):
    """A small world of long answers, and of many who read along over a network that fails."""

    async def __call__(self, simulation: Simulation) -> None:
        run = PiecesRun(simulation, OF_PIECES)
        try:
            await run.play()
        finally:
            self.journal_calls = run.disk.calls
            self.places = run.oracles.places


OF_PIECES = Options(
    nodes=2,
    clients=1,
    messages=3,
    agent="tool",
    pieces_max=40,
    subscribers=0,
    extras=("follow",),
    is_busy=True,
)


class NodesWorld(ConversationWorld):
    """Three nodes of one journal, with drains, crashes, freezes and a network that fails."""

    async def __call__(self, simulation: Simulation) -> None:
        options = self._given or drawn(simulation)
        simulation.note(f"{options}")
        run = NodesRun(simulation, options)
        try:
            await run.play()
        finally:
            self.journal_calls = run.disk.calls
            self.places = run.oracles.places


Unfinished = Literal["end", "resume"]


def drawn(simulation: Simulation) -> Options:
    """Draw the options of a run."""
    chance, pick = simulation.chance, simulation.pick
    unfinished: Sequence[Unfinished] = ("end", "resume")
    return Options(
        nodes=3,
        clients=pick("clients", (2, 3)),
        conversations=pick("conversations", (1, 1, 2)),
        messages=pick("messages", (3, 2, 4)),
        has_locks=chance("has locks", 0.1),
        has_small_limits=chance("has small limits", 0.4),
        journal_faults={"slow": 0.05, "unheard": 0.03} if chance("has journal faults", 0.2) else {},
        crashes=chance("has crashes", 0.4),
        freezes=chance("has freezes", 0.3),
        impatient=chance("has impatient clients", 0.4),
        resends=chance("has resends", 0.4),
        off_clocks=chance("has clocks that are off", 0.15),
        takes_over=chance("has forced takeovers", 0.1),
        idle_s=pick("idle", (300.0, 1.0, 5.0)),
        extras=pick(
            "extras",
            (
                ("follow", "pause", "cancel"),
                ("follow",),
                ("follow", "fork", "retract", "read"),
                ("interrupt", "undo", "look", "delete"),
            ),
        ),
        is_busy=chance("is busy", 0.6),
        agent=pick("agent", ("plain", "tool")),
        confirms=chance("confirms", 0.3),
        unfinished=pick("unfinished", unfinished),
        strikes_at_writes=pick("strikes at writes", (0.0, 0.0, 0.1)),
        subscribers=2,
        drains=chance("has drains", 0.6),
    )
