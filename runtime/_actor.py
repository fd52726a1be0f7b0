"""What a user writes and holds: the actor and its context.

An actor's hooks and handlers run one at a time, on whichever task owns it just then, inside the
actor's own context. Nothing but its owner may touch it: effects talk back through its mailbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from typing_extensions import TypeVar

from ._backend import OneShot, unattended
from ._effects import Effect
from ._mailbox import Mailbox
from ._messages import Delivery
from ._ref import Ref
from ._supervision import Supervision
from ._supervisor import Supervisor
from ._timers import Timers
from .ports import Ports

if TYPE_CHECKING:
    from ._cell import Cell

__all__ = ["Actor", "ActorContext"]

# Any: whoever does not say which messages an actor takes is not checked for it.
M = TypeVar("M", default=Any)
N = TypeVar("N", default=Any)
T = TypeVar("T")


class Actor(Generic[M]):
    """The base of all actors. Write `receive`, as `def` or as `async def`, or `receive_batch`.

    What `receive` returns is the reply. `Refused` raised by it is an answer; every other error
    is a failure: the asker gets it (as it is when it is one of the five kinds, else inside
    `ActorFailed`), and the supervisor decides what becomes of the actor.
    """

    batch_max: ClassVar[int] = 1
    """At most so many messages are handed to `receive_batch` at once."""

    supervision: ClassVar[Supervision] = Supervision()
    """How this actor supervises the children that it spawns."""

    context: ActorContext
    """Set by the runtime before `on_start`."""

    def receive(self, message: M) -> object:
        raise NotImplementedError(f"{type(self).__name__} has neither receive nor receive_batch")

    async def receive_batch(self, deliveries: Sequence[Delivery[M]]) -> None:
        """Take several messages at once. Whatever is left unanswered may be answered later."""
        raise NotImplementedError

    async def on_start(self) -> None:
        """Runs before the first message. An error is a failed start."""

    async def on_stop(self) -> None:
        """Runs after the last message, shielded from cancellation, within a bound."""

    async def on_restart(self, error: BaseException) -> None:
        """Runs on the actor that failed, before its successor is made. By default, `on_stop`."""
        del error
        await self.on_stop()


class ActorContext:
    """What an actor has of the runtime: itself, its children, effects and timers, the world."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    @property
    def name(self) -> str:
        return self._cell.name

    @property
    def key(self) -> str:
        """The actor's key in its region; empty outside of one."""
        return self._cell.key

    @property
    def ref(self) -> Ref[Any]:
        """The actor's own ref. Any, since the context does not know the actor's type.

        What the actor and its effects send here never waits for room and is never refused for it.
        """
        cell = self._cell
        return Ref(cell, cell.region, cell.key)

    @property
    def ports(self) -> Ports:
        return self._cell.system.ports

    @property
    def timers(self) -> Timers:
        """Messages to itself, later; gone with this incarnation."""
        return Timers(self._cell)

    def defer(self) -> Delivery[Any]:
        """Take charge of the answer to the message being handled: it is given later, by this.

        Until then the actor is not idle. Any, since the context does not know the actor's type.
        """
        cell = self._cell
        ask = cell.current
        if ask is None:
            return Delivery(cell, None, None)
        cell.current = None
        cell.defer(ask)
        return Delivery(cell, ask.message, ask)

    async def outcome(self, awaited: Awaitable[T]) -> T:
        """Await something in the middle of a handler; a `OneShot`, without holding a worker.

        A thousand actors that wait for one group commit then need no task each. What belongs to a
        task, a cancel scope or a task group, must not be open around this: the handler may go on
        in another one.
        """
        if isinstance(awaited, OneShot):
            return await unattended(awaited)
        return await awaited

    def start_effect(self, run: Callable[[], Awaitable[None]], *, name: str) -> Effect:
        """Run something beside the actor, in a task of its own, and return at once.

        An effect that raises fails the actor with that error. All effects are cancelled when the
        actor stops or restarts.
        """
        return Effect(self._cell, run, name)

    def spawn(
        self,
        factory: Callable[[], Actor[N]],
        *,
        name: str,
        mailbox: Mailbox | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
    ) -> Ref[N]:
        """Start a child; it stops before this actor does, and this actor's class supervises it."""
        return self._children().spawn(
            factory, name=name, mailbox=mailbox, supervision=supervision, resident=resident
        )

    def spawn_supervisor(self, name: str, supervision: Supervision) -> Supervisor:
        """Start a supervisor as a child, for actors that stand or fall together."""
        return self._children().spawn_supervisor(name, supervision)

    def watch(self, ref: Ref[Any]) -> None:
        """Get a `Terminated`, before other mail, when that actor stops for good."""
        ref.watch(self.ref)

    def unwatch(self, ref: Ref[Any]) -> None:
        ref.unwatch(self.ref)

    def stop(self) -> None:
        """Stop after the current message or batch. What still waits is handed back."""
        self._cell.request_stop("it stopped itself")

    def _children(self) -> Supervisor:
        cell = self._cell
        if cell.children is None:
            actor = cell.actor
            supervision = Supervision() if actor is None else type(actor).supervision
            cell.children = Supervisor(cell.system, cell.name, supervision, owner=cell)
        return cell.children
