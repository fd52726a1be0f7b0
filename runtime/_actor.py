"""The actor, which applications write, and its context, through which it uses the runtime.

An actor's hooks and handlers run one at a time, in the task of its current runner, inside the
actor's own context variables. No other code may touch the actor: effects talk back through its
mailbox.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Generic, cast

from typing_extensions import TypeVar

from ._backend import OneShot, Unattended
from ._cell import Cell
from ._effects import Effect
from ._hooks import Hooks, Traits
from ._incarnation import Incarnation
from ._mailbox import MailboxSettings
from ._messages import Delivery
from ._ref import KeyedActors, Ref, Watching
from ._stats import Stats
from ._supervision import DEFAULT_SUPERVISION, Supervision, check_number
from ._supervisor import Supervisor
from ._timers import Timers
from .ports import Ports

__all__ = ["Actor", "ActorContext", "bind", "traits_of"]

# Any: an actor that does not name its messages is not checked for them.
M = TypeVar("M", default=Any)
N = TypeVar("N", default=Any)
T = TypeVar("T")


class Actor(Generic[M]):
    """The base class of actors. Write `receive`, as `def` or as `async def`, or `receive_batch`.

    If the actor is at rest, an ask runs a `def` in the asker's own stack, which saves two switches
    of tasks. A `def` that has to wait returns a coroutine, which then runs in a task of the
    runtime.

    The return value of `receive` is the reply. A `Refused` that it raises is an answer, too. Any
    other error is a failure: the supervisor decides about the actor, and the asker gets
    `ActorFailed`, or the error itself if it is one of the five kinds (`turnkeeper.runtime.errors`).
    """

    batch_max: ClassVar[int] = 1
    """The most messages that `receive_batch` is given at once. It is a fact of the class."""

    supervision: ClassVar[Supervision] = DEFAULT_SUPERVISION
    """How this actor supervises the children that it spawns."""

    # No slots: with some, no actor could have a second base that has some, or is an exception.
    _turnkeeper_life: Incarnation  # `bind` sets it, before `on_start`

    @property
    def context(self) -> ActorContext:
        """The actor's access to the runtime, from `on_start` on.

        Each use makes a new object. If it were stored, each idle actor would have one more object
        for the garbage collector to visit.
        """
        return ActorContext(self._turnkeeper_life)

    def receive(self, message: M) -> object:
        """Handle one message and return the reply.

        The docstring of `Actor` says which errors count as answers. A handler that still runs
        `stop_s` seconds after the actor was told to stop is cancelled.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither receive nor receive_batch")

    async def receive_batch(self, deliveries: Sequence[Delivery[M]]) -> None:
        """Handle several messages at once. Those left unanswered may be answered later.

        Any error is a failure, even `Refused`: to refuse one message, call its `Delivery.fail`.
        """
        raise NotImplementedError

    async def on_start(self) -> None:
        """Run before the first message. An error is a failed start."""

    async def on_stop(self) -> None:
        """Run after the last message, shielded from cancellation.

        After the runtime's `cleanup_s` seconds it is cancelled all the same. Starting an effect, a
        timer, a child or a watch here raises `ActorEnded`.
        """

    async def on_restart(self, error: BaseException) -> None:
        """Run on the actor that failed, before its successor is made. By default, run `on_stop`."""
        del error
        await self.on_stop()


class ActorContext:
    """An actor's access to the runtime: its ref, its children, effects and timers, the ports.

    It belongs to one incarnation. Once that has begun to end, starting an effect, a timer, a child
    or a watch raises `ActorEnded`.
    """

    __slots__ = ("_life",)

    def __init__(self, life: Incarnation) -> None:
        self._life = life

    @property
    def name(self) -> str:
        """The actor's path in the tree of actors."""
        return self._life.name

    @property
    def key(self) -> str:
        """The actor's key in its region; empty outside of one."""
        return _cell_of(self._life).key

    @property
    def ref(self) -> Ref[Any]:
        """The actor's own ref. Any, because the context does not know the actor's type.

        Messages that the actor and its effects send here never wait for room, and are never
        refused for lack of it.
        """
        return _ref_to(_cell_of(self._life))

    @property
    def is_at_rest(self) -> bool:
        """True if the actor handles nothing and has no mail: a message sent now is handled next.

        False once this incarnation has ended, and while the runtime is closing.
        """
        cell = _cell_of(self._life)
        return cell.is_parked and cell.life is self._life

    @property
    def ports(self) -> Ports:
        """The ports of the runtime."""
        return self._life.system.ports

    @property
    def timers(self) -> Timers:
        """Send messages to the actor itself later; the timers end with this incarnation."""
        return Timers(self._life)

    def defer(self) -> Delivery[Any]:
        """Take over the answer to the message being handled, to give it later.

        Until then the actor is not idle. Any, because the context does not know the actor's type.
        """
        life = self._life
        cell = _cell_of(life)
        ask = cell.current if cell.life is life else None
        if ask is None:
            return Delivery(life, None, None)
        cell.current = None
        life.defer(ask)
        return Delivery(life, ask.message, ask)

    def wait_for(self, awaited: Awaitable[T]) -> Awaitable[T]:
        """Return `awaited` for a handler to await; a `OneShot` then keeps no worker.

        So a thousand actors that wait for one group commit need no task each. The handler may
        continue in another task: nothing that belongs to a task, such as a cancel scope or a task
        group, may be open around the wait.
        """
        return Unattended(awaited) if isinstance(awaited, OneShot) else awaited

    def start_effect(self, run: Callable[[], Awaitable[None]], *, name: str) -> Effect:
        """Run `run()` beside the actor, in a task of its own; return at once.

        `name` stands for it in reports and in the tree of actors. An effect that raises fails the
        actor with that error. All effects are cancelled when the actor stops or restarts. Raises
        `ActorEnded` once the actor has begun to end.
        """
        return self._life.start_effect(run, name)

    def spawn(
        self,
        factory: Callable[[], Actor[N]],
        *,
        name: str,
        mailbox: MailboxSettings | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
    ) -> Ref[N]:
        """Start a child; it stops before this actor does.

        `factory`, `mailbox` and `resident` are as for `Runtime.spawn`. This actor's class attribute
        `supervision` decides about the child's failures; `supervision` here, if given, decides
        first. Raises `ActorEnded` once the actor has begun to end.
        """
        return self._children(name).spawn(
            factory, name=name, mailbox=mailbox, supervision=supervision, resident=resident
        )

    def spawn_supervisor(self, name: str, supervision: Supervision) -> Supervisor:
        """Start a supervisor as a child; `supervision` says what restarts or stops together.

        Raises `ActorEnded` once the actor has begun to end, and `ValueError` if a child of this
        name is there already.
        """
        return self._children(name).spawn_supervisor(name, supervision)

    def watch(self, ref: Ref[Any]) -> None:
        """Have this actor get a `Terminated`, before other mail, when `ref`'s actor stops for good.

        The watch ends with this incarnation: watch again in `on_start`. Raises `ActorEnded` once
        this actor has begun to end.
        """
        life = self._life
        life.check_open(f"watch {ref.name}")
        watching = Watching(ref, self.ref)
        if not ref.has_ended:
            if life.watches is None:
                life.watches = {}
            life.watches[ref] = watching

    def unwatch(self, ref: Ref[Any]) -> None:
        """Undo `watch`."""
        watching = (self._life.watches or {}).pop(ref, None)
        if watching is not None:
            watching.take_back()

    def stop(self) -> None:
        """Stop the actor after its current message or batch; return at once.

        Messages that still wait are handed back to their senders.
        """
        if self._life.is_open:
            _cell_of(self._life).request_stop("it stopped itself")

    def _children(self, name: str) -> Supervisor:
        life = self._life
        life.check_open(f"start {name!r} below it")
        if life.children is None:
            actor = life.actor
            supervision = actor.supervision if isinstance(actor, Actor) else DEFAULT_SUPERVISION
            system = _cell_of(life).system
            life.children = Supervisor(system, life.name, supervision, above=life)
        assert isinstance(life.children, Supervisor)
        return life.children


def _cell_of(life: Incarnation) -> Cell:
    assert isinstance(life.place, Cell), f"{life.name} lives in no cell"
    return life.place


def _ref_to(cell: Cell) -> Ref[Any]:
    # A region is the only kind of directory, and it is the `KeyedActors` of a ref, too.
    return Ref(cell, cast("KeyedActors | None", cell.directory), cell.key)


def bind(actor: Hooks, life: Incarnation) -> None:
    """Give an actor its incarnation, to which its context belongs."""
    assert isinstance(actor, Actor), f"{life.name} is made by a factory that returns no Actor"
    actor._turnkeeper_life = life  # noqa: SLF001 - of this module


def traits_of(kind: type[Hooks]) -> Traits:
    """Return the facts about an actor class."""
    is_batching = kind.receive_batch is not Actor.receive_batch
    if is_batching:
        check_number(f"{kind.__name__}.batch_max", kind.batch_max, "1 or more", least=1)
    has_on_stop = kind.on_stop is not Actor.on_stop
    has_on_restart = kind.on_restart is not Actor.on_restart
    return Traits(
        is_batching=is_batching,
        batch_max=kind.batch_max,
        is_inline=not is_batching and not inspect.iscoroutinefunction(kind.receive),
        has_on_start=kind.on_start is not Actor.on_start,
        has_last_hook=has_on_stop or has_on_restart,
        stats=Stats(),
    )
