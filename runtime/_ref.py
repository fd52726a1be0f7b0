"""Refs: how an actor is reached.

Owns the way of a message into a mailbox: the short way, when there is room or the actor is at
rest, and the long way, for everything else. Neither has an await between looking and acting. A
ref stays valid over restarts and passivation; once the actor has stopped for good it says so, with
the message inside the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, cast

from typing_extensions import TypeVar

from ._cell import Cell, Phase, current_cell, in_effect
from ._mailbox import Waiter
from ._messages import Ask, Message, Tell
from ._reports import Terminated
from ._turn import Outcome, run_turn
from .errors import AskCycle, MailboxFull

if TYPE_CHECKING:
    from ._region import Region

__all__ = ["Ref"]

# Any: whoever does not say which messages an actor takes is not checked for it.
M_contra = TypeVar("M_contra", contravariant=True, default=Any)
R = TypeVar("R")


class Ref(Generic[M_contra]):
    """What others hold of an actor. Equal refs reach the same actor."""

    __slots__ = ("_cell", "_key", "_region")

    def __init__(self, cell: Cell, region: Region[Any] | None = None, key: str = "") -> None:
        self._cell = cell
        self._region = region
        self._key = key

    @property
    def name(self) -> str:
        """Its path in the tree of actors."""
        return self._cell.name if self._region is None else f"{self._region.name}/{self._key}"

    def __repr__(self) -> str:
        return f"Ref({self.name!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            return NotImplemented
        if self._region is not None:
            return self._region is other._region and self._key == other._key
        return self._cell is other._cell and other._region is None

    def __hash__(self) -> int:
        return hash(self.name)

    # --- sending ---------------------------------------------------------------------------------

    async def tell(self, message: M_contra, *, control: bool = False) -> None:
        """Send a message that nobody waits for.

        Waits for room when the mailbox is full and its overflow is `wait`; raises `MailboxFull`
        when it is `reject`. A `control` message goes before all others and never waits for room;
        so does, in its turn, what the actor and its effects tell the actor itself. To an actor
        that has stopped it becomes a dead letter.
        """
        cell = self._cell
        system = cell.system
        tracing = system.tracing
        item = (message, system.now(), None if tracing is None else tracing.sent())
        # The short way. Cells that are closed or full for any reason fail both tests.
        if not control:
            if cell.is_parked:
                cell.wake_for(item)
                return
            if cell.waiting is None and len(cell.mail) < cell.capacity:
                cell.mail.append(item)
                return
        waiter = self._send(item, control=control, may_wait=True)
        if waiter is not None:
            try:
                await waiter.wait()
            except BaseException:
                self._cell.leave(waiter)
                raise

    def tell_nowait(self, message: M_contra, *, control: bool = False) -> None:
        """As `tell`, but never waits: where that would wait, this raises `MailboxFull`.

        For handlers that are no coroutines, and for callbacks in the loop.
        """
        system = self._cell.system
        tracing = system.tracing
        item = (message, system.now(), None if tracing is None else tracing.sent())
        self._send(item, control=control, may_wait=False)

    async def ask(
        self, message: Message[R], *, timeout: float | None = None, control: bool = False
    ) -> R:
        """Send a message and wait for its answer; the time for both is `timeout` seconds.

        Raises what the handler raised, if that is one of the five kinds of error, and otherwise
        `ActorFailed`; `NotDelivered` when the actor stopped before it had begun;
        `NotStartedInTime` or `NotAnsweredInTime` past the deadline; `MailboxFull`; and `AskCycle`
        when the actor waits, through whomever, for the very asker.
        """
        cell = self._cell
        system = cell.system
        tracing = system.tracing
        trace = None if tracing is None else tracing.sent()
        ask = Ask(message, cell.name, system.now(), trace)
        asker = current_cell.get(None)
        if asker is not None:
            asker = self._note_wait(asker, ask)
            cell = self._cell  # it may have been activated for that
        try:
            # The short way. Cells that are closed or full for any reason fail both tests.
            if control:
                self._send(ask, control=True, may_wait=True)
            elif cell.is_parked:
                if not cell.is_inline:
                    cell.wake_for(ask)
                else:
                    cell.unpark()
                    cell.mail.append(ask)
                    self._handle_here(cell)
                    if ask.is_done and system.is_inline_due():
                        await system.checkpoint()
            elif cell.waiting is None and len(cell.mail) < cell.capacity:
                cell.mail.append(ask)
            else:
                self._send(ask, control=False, may_wait=True)
            if not ask.is_done:
                if timeout is not None:
                    system.clock.arm(ask, timeout)
                await system.park(ask)
        except BaseException:
            ask.abandon()
            self._leave(ask)
            raise
        finally:
            if asker is not None:
                self._forget_wait(asker, ask)
        if ask.error is not None:
            self._leave(ask)
            raise ask.error
        return cast("R", ask.value)

    def _leave(self, ask: Ask) -> None:
        """It may have expired while it still waited for room."""
        if self._cell.waiting is not None:
            self._cell.leave(ask)

    def _note_wait(self, asker: Cell, ask: Ask) -> Cell | None:
        """Write down who waits for whom; an effect's actor does not wait for what it asks."""
        if in_effect.get():
            return None
        target = self._resolve()
        self._refuse_cycle(asker, target)
        if asker.asking is None:
            asker.asking = {}
        asker.asking[ask] = target
        return asker

    @staticmethod
    def _forget_wait(asker: Cell, ask: Ask) -> None:
        if asker.asking is not None:
            asker.asking.pop(ask, None)

    def _handle_here(self, cell: Cell) -> None:
        """The actor rests, and its handler is a `def`: it runs in the asker's own stack."""
        assert cell.context is not None, f"{cell.name} was started without a context"
        try:
            outcome = cell.context.run(run_turn, cell)
        except BaseException:
            cell.submit()
            raise
        if outcome is Outcome.EMPTY:
            cell.rest()
            return
        if outcome is not Outcome.SPENT:
            cell.outcome = outcome
        cell.submit()

    # --- the long way ----------------------------------------------------------------------------

    def _resolve(self) -> Cell:
        """The cell that mail goes to now; an idle key of a region gets a new one."""
        if self._region is not None and self._cell.phase is Phase.ENDED:
            self._cell = self._region.activate(self._key)
        return self._cell

    def _send(self, item: Ask | Tell, *, control: bool, may_wait: bool) -> Waiter | None:
        """Take the message in, refuse it, or say whom to wait for."""
        cell = self._resolve()
        system = cell.system
        sender = current_cell.get(None)
        if isinstance(item, Ask):
            item.actor = cell.name
        if cell.phase in (Phase.STOPPING, Phase.ENDED):
            self._hand_back(item, cell, "it has stopped")
            return None
        if cell.phase is Phase.REFUSING:
            self._hand_back(item, cell, "it failed too often", cell.error)
            return None
        if system.is_closing and sender is None:
            self._hand_back(item, cell, "the runtime is shutting down")
            return None
        if control or sender is cell or cell.at_rest or system.is_closing:
            cell.put(item, control=control)
            return None
        if cell.waiting is None and len(cell.mail) < cell.capacity:
            cell.mail.append(item)
            return None
        overflow = cell.spec.mailbox.overflow
        if overflow == "drop_oldest":
            self._drop_oldest(cell)
            cell.mail.append(item)
            return None
        if overflow == "reject" or not may_wait:
            raise MailboxFull(cell.name, cell.capacity)
        waiter = item if isinstance(item, Ask) else Waiter(item)
        cell.wait_for_room(waiter)
        return waiter if isinstance(waiter, Waiter) else None

    def _hand_back(
        self, item: Ask | Tell, cell: Cell, reason: str, error: BaseException | None = None
    ) -> None:
        if not isinstance(item, Ask):
            cell.system.dead_letters.add(item[0], cell.name, reason)
        elif error is not None:
            item.fail(error)
        else:
            item.return_to_sender(reason)

    def _drop_oldest(self, cell: Cell) -> None:
        oldest = cell.mail.popleft()
        reason = "it was the oldest, and the mailbox was full"
        if isinstance(oldest, Ask):
            oldest.return_to_sender(reason)
        elif isinstance(oldest, tuple):
            cell.system.dead_letters.add(oldest[0], cell.name, reason)

    @staticmethod
    def _refuse_cycle(asker: Cell, target: Cell) -> None:
        """Raise when `target` waits, through whomever, for `asker`."""
        trail: list[tuple[Cell, tuple[str, ...]]] = [(target, (asker.name, target.name))]
        seen: set[Cell] = set()
        while trail:
            cell, path = trail.pop()
            if cell is asker:
                raise AskCycle(path)
            if cell not in seen:
                seen.add(cell)
                trail.extend((each, (*path, each.name)) for each in (cell.asking or {}).values())

    # --- stopping and watching ------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop the actor after its current message, hand its mail back, and wait for its end.

        The next message to a key of a region activates it anew.
        """
        if self._region is not None:
            await self._region.stop_actor(self._key)
        else:
            await self._cell.stop("it was told to")

    def watch(self, watcher: Ref[Terminated]) -> None:
        """Send `watcher` a `Terminated`, before its other mail, once this actor has stopped.

        A restart is no death, and neither is passivation. Watching one that is dead already
        brings the notice at once.
        """
        if self._region is not None:
            self._region.watch(self._key, watcher)
        elif self._cell.phase is Phase.ENDED:
            watcher.notify(Terminated(self, None))
        else:
            if self._cell.watchers is None:
                self._cell.watchers = {}
            self._cell.watchers[watcher] = None

    def unwatch(self, watcher: Ref[Terminated]) -> None:
        """Take `watch` back."""
        if self._region is not None:
            self._region.unwatch(self._key, watcher)
        elif self._cell.watchers is not None:
            self._cell.watchers.pop(watcher, None)

    def notify(self, notice: Terminated) -> None:
        """Deliver a notice before all other mail; a watcher that has stopped needs none."""
        cell = self._resolve()
        if cell.phase not in (Phase.STOPPING, Phase.ENDED, Phase.REFUSING):
            cell.put((notice, cell.system.now(), None), control=True)
