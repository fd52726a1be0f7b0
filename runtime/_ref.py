"""Refs: how an actor is reached.

Owns the way of a message into a mailbox: the short way if the actor is at rest or has room, the
long way (`_send`) in every other case. Neither has an await between looking and acting. A ref
stays valid over restarts and passivation. Once the actor has stopped for good, an ask raises
`NotDelivered`, with the message inside the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final, Generic, Protocol, cast

from typing_extensions import TypeVar

from ._asking import Party, current_actor, forget_wait, in_effect, note_wait
from ._cell import WAITS_FOR_ASKER, Cell
from ._lifecycle import ENDED, MAIL, Mail
from ._mailbox import Waiter
from ._messages import Ask, Firing, Message, Tell
from ._slice import EMPTY, SPENT, run_slice
from ._supervision import check_kind
from .errors import MailboxFull, NotDelivered

__all__ = ["KeyedActors", "Ref", "Terminated", "Watching"]

# Any: an actor that does not name its messages is not checked for them.
M_contra = TypeVar("M_contra", contravariant=True, default=Any)
R = TypeVar("R")

_PURGE_MIN: Final = 16
_TELLS_MAX: Final = 32


class KeyedActors(Protocol):
    """The region of a ref, as the ref sees it."""

    name: str

    def activate(self, key: str) -> Cell: ...

    async def stop_actor(self, key: str) -> None: ...

    def refusal(self, key: str) -> BaseException | None: ...

    def watch(self, key: str, watcher: Ref[Terminated], target: Ref[Any]) -> None: ...

    def unwatch(self, key: str, watcher: Ref[Terminated]) -> None: ...


class Ref(Generic[M_contra]):
    """The address of an actor. Equal refs reach the same actor."""

    __slots__ = ("_cell", "_key", "_region")

    def __init__(self, cell: Cell, region: KeyedActors | None = None, key: str = "") -> None:
        self._cell = cell
        self._region = region
        self._key = key

    @property
    def name(self) -> str:
        """The actor's path in the tree of actors."""
        if self._region is None:
            return self._cell.name
        return self._region.name + "/" + self._key  # a format of a key may be another text

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
        """Send a message, without an answer.

        If the mailbox is full, wait for room if its overflow is `wait`, and raise `MailboxFull`
        if it is `reject`. A `control` message goes before all others and never waits for room;
        messages that the actor and its effects tell the actor itself never wait for room either.
        If the actor has stopped, the message becomes a dead letter. After 32 tells that did not
        wait, the next one lets other tasks run first; if it is cancelled there, nothing was sent. A
        tell that is cancelled while it waits for room may have been sent just before. Raises
        `RuntimeError` in another event loop than the runtime's.
        """
        cell = self._cell
        system = cell.system
        pool = system.pool
        pool.tells += 1
        if pool.tells > _TELLS_MAX:
            pool.tells = 0
            # Before the message is sent: a tell that is cancelled here has sent nothing.
            await system.pause()
            cell = self._cell
        if (sent_at := pool.told_at) is None:
            sent_at = system.now()
            if pool.dispatcher is not None:
                pool.told_at = sent_at
        tracing = system.tracing
        item = (message, sent_at, None if tracing is None else tracing.sent())
        # The short way. Cells that are closed or full for any reason fail both tests.
        if not control:
            if cell.is_parked:
                if system.mark() != system.home:
                    system.check_home(cell.name)  # it raises, and is a call too many otherwise
                cell.wake_for(item)
                return
            mail = cell.mail
            if cell.waiting is None and len(mail) < cell.capacity:
                # The mark of a loop costs a tenth of a tell. Of this thread's loops only one runs,
                # and a busy actor handles its mail once its own does.
                if get_ident() != system.home_thread:
                    system.check_home(cell.name)
                mail.append(item)
                return
        waiter = self._send(item, control=control, may_wait=True)
        if waiter is not None:
            try:
                await waiter.wait()
            except BaseException:
                self._cell.leave(waiter)
                raise

    def tell_nowait(self, message: M_contra, *, control: bool = False) -> None:
        """Send as `tell` does, but raise `MailboxFull` if that would wait.

        For handlers that are not coroutines, and for callbacks in the loop. `control` is as for
        `tell`.
        """
        system = self._cell.system
        tracing = system.tracing
        item = (message, system.now(), None if tracing is None else tracing.sent())
        self._send(item, control=control, may_wait=False)

    async def ask(
        self, message: Message[R], *, timeout: float | None = None, control: bool = False
    ) -> R:
        """Send a message and return its answer.

        `timeout`: the seconds for delivery and answer together. A `control` message goes before
        all others, as with `tell`. If the asker is cancelled before the actor has begun with the
        message, the message is skipped; after that it is handled, and its answer dropped.

        Raises the handler's error if it is one of the five kinds, else `ActorFailed`. Raises
        `NotStartedInTime` or `NotAnsweredInTime` past the deadline; `NotDelivered` if the actor
        stopped before it began with the message, or if it is ending and the asker is an actor below
        it, whose end it waits for; `MailboxFull`; and `AskCycle` if the actor waits, through
        however many others, for the asker.
        """
        cell = self._cell
        system = cell.system
        if system.mark() != system.home:
            system.check_home(cell.name)  # as in `tell`
        # Before the message is sent. The sum raises `TypeError` for anything but a number.
        if timeout is not None and math.isnan(timeout + 0.0):
            raise ValueError("timeout must be a number of seconds, got nan")
        if cell.is_inline and system.note_inline_ask():
            await system.pause()  # before the message is sent, as in `tell`
            cell = self._cell
        tracing = system.tracing
        trace = None if tracing is None else tracing.sent()
        ask = Ask(message, cell.name, system.now(), trace)
        asker = current_actor.get(None)
        if asker is not None:
            asker = self._note_wait(asker, ask)
            cell = self._cell  # noting the wait may have activated another
        try:
            park = system.park
            # The short way. Cells that are closed or full for any reason fail both tests.
            if control:
                self._send(ask, control=control, may_wait=True)
            elif cell.is_parked:
                if not cell.is_inline:
                    cell.wake_for(ask)
                    if not cell.traits.is_batching:  # batches mostly wait for something
                        park = system.park_behind
                else:
                    cell.unpark()
                    cell.mail.append(ask)
                    self._handle_here(cell)
            elif cell.waiting is None and len(cell.mail) < cell.capacity:
                cell.mail.append(ask)
            else:
                self._send(ask, control=False, may_wait=True)
            if not ask.is_done:
                if timeout is not None:
                    system.clock.arm(ask, timeout)
                await park(ask)
        except BaseException:
            ask.abandon()
            self._leave(ask)
            raise
        finally:
            if asker is not None:
                forget_wait(asker, ask)
        if (error := ask.error) is not None:
            self._leave(ask)
            # The error's traceback holds this frame, and that of the handler's slice, which may
            # hold the ask; neither the frame nor the ask must hold the error as well.
            ask.error = None
            try:
                raise error
            finally:
                del ask, error
        answer: R = ask.value
        return answer

    def _leave(self, ask: Ask) -> None:
        """Withdraw an ask that may still wait for room: it has expired, or its asker leaves."""
        if self._cell.waiting is not None:
            self._cell.leave(ask)

    def _note_wait(self, asker: Party, ask: Ask) -> Party | None:
        """Note that the asker's handler waits, and return the asker.

        Return None if the handler does not wait: an effect asks, or a task that the handler has
        started and does not wait for.
        """
        if in_effect.get() or asker.at_rest:
            return None
        home = asker.system  # it may be another runtime's, in another thread
        if home.home != self._cell.system.home or not home.is_in_worker():
            return None
        target = self._resolve()
        if target.ending is not None and asker.is_below(target):
            raise NotDelivered(ask.message, target.name, WAITS_FOR_ASKER)
        note_wait(asker, ask, target)
        return asker

    def _handle_here(self, cell: Cell) -> None:
        """Run the handler, which is a `def`, in the asker's own stack: the actor is at rest."""
        life = cell.life
        assert life is not None, f"{cell.name} was started without an incarnation"
        try:
            outcome = life.context.run(run_slice, cell, life)
        except BaseException:
            cell.submit()
            raise
        if outcome is EMPTY:
            cell.rest()
            return
        if outcome is not SPENT:
            cell.outcome = outcome
        cell.submit()

    # --- the long way ----------------------------------------------------------------------------

    def _resolve(self) -> Cell:
        """Return the cell that mail goes to now; an inactive key of a region is activated."""
        if self._region is not None and self._cell.phase is ENDED:
            self._cell = self._region.activate(self._key)
        return self._cell

    def _send(self, item: Ask | Tell, *, control: bool, may_wait: bool) -> Waiter | None:
        """Queue or refuse the message, or return the waiter of a tell that has to wait for room."""
        if control:  # the short way takes what counts as false for False
            check_kind("control", control, bool)
        cell = self._resolve()
        system = cell.system
        system.check_home(cell.name)
        sender = current_actor.get(None)
        if isinstance(item, Ask):
            item.actor = cell.name
        treatment = MAIL[cell.phase]
        if treatment is Mail.RETURNED:
            refusal = None if self._region is None else self._region.refusal(self._key)
            self._hand_back(item, cell, "it has stopped", refusal)
            return None
        if treatment is Mail.REFUSED:
            self._hand_back(item, cell, "it failed too often", cell.refusal())
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
        elif isinstance(oldest, Firing) and oldest.take():  # its timer can fire again
            cell.system.dead_letters.add(oldest.message, cell.name, reason)

    # --- stopping and watching ------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop the actor after its current message, hand its mail back, and wait for its end.

        The next message to a key of a region activates it anew. If this call is cancelled, the
        actor stops all the same.
        """
        if self._region is not None:
            await self._region.stop_actor(self._key)
        else:
            await self._cell.stop("it was told to")

    def watch(self, watcher: Ref[Terminated]) -> None:
        """Send `watcher` a `Terminated`, before its other mail, once this actor has stopped.

        A restart or a passivation of this actor is not a stop. If it has stopped already, the
        notice comes at once. The watch ends when the watcher stops, unless the watcher belongs to a
        region: then it is activated for the notice. An actor watches another only once: if the
        watcher's own `context.watch` of this actor ends, so does this watch.

        Raises `RuntimeError` in another event loop than that of the watcher's runtime, and than
        that of this actor's runtime, unless the actor has stopped already.
        """
        watcher.check_home()
        if self._region is not None:
            self._region.watch(self._key, watcher, self)
        elif self._cell.phase is ENDED:
            watcher.notify_end(self, None)
        else:
            self.check_home()
            if self._cell.watchers is None:
                self._cell.watchers = {}
            add_watcher(self._cell.watchers, watcher, self)

    def unwatch(self, watcher: Ref[Terminated]) -> None:
        """Take `watch` back."""
        if self._region is not None:
            self._region.unwatch(self._key, watcher)
        elif self._cell.watchers is not None:
            self._cell.watchers.pop(watcher, None)

    def notify_end(self, target: object, error: BaseException | None) -> None:
        """Send this actor a `Terminated` about `target`, unless it has stopped itself."""
        if self.has_ended:
            return
        cell = self._resolve()
        if MAIL[cell.phase] is Mail.TAKEN:
            if cell.life is not None:
                cell.life.forget_watch(target)
            notice = Terminated(cast("Ref[Any]", target), error)
            cell.put((notice, cell.system.now(), None), control=True)

    @property
    def is_at_home(self) -> bool:
        """True in its runtime's loop; in any other, nothing here may be called."""
        return self._cell.system.is_at_home

    def check_home(self) -> None:
        """Raise `RuntimeError` in another event loop than its runtime's."""
        self._cell.system.check_home(self.name)

    @property
    def has_ended(self) -> bool:
        """True once the actor has stopped for good; an actor with a key can always come back."""
        return self._region is None and self._cell.phase is ENDED


@dataclass(frozen=True, slots=True)
class Terminated:
    """The message that a watcher gets when the actor has stopped for good."""

    ref: Ref[Any]
    error: BaseException | None


class Watching:
    """A watch that an actor's incarnation has placed, and takes back when it ends."""

    __slots__ = ("_target", "_watcher")

    def __init__(self, target: Ref[Any], watcher: Ref[Any]) -> None:
        self._target = target
        self._watcher = watcher
        target.watch(watcher)

    def take_back(self) -> None:
        self._target.unwatch(self._watcher)


def add_watcher(watchers: dict[Any, object], watcher: Ref[Any], target: Ref[Any]) -> None:
    """Add a watcher. Watchers that have ended are dropped whenever the table has doubled."""
    count = len(watchers)
    if count >= _PURGE_MIN and count & (count - 1) == 0:  # at each power of two
        for each in [each for each in watchers if each.has_ended]:
            del watchers[each]
    watchers[watcher] = target
