"""The mailbox: what waits for one actor, in which order, and who waits for room.

Owns two lanes and the senders that wait for room. Invariants, all kept without an await:

1. Control goes first; within a lane, first in, first out, waiting senders included.
2. Whoever waits is admitted in order, and nobody overtakes: while one waits, all wait.
3. While a sender waits, the mail lane is at least half full: whatever makes that untrue admits
   those who wait.
4. The owner pops an item itself, after it runs. Nothing is ever handed to a task that might be
   cancelled before it wakes, so nothing can be lost on the way.

Senders append, the owner pops; all of it in one loop, so there is no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ._backend import OneShot
from ._messages import Ask, Item, Tell

__all__ = ["NO_MAIL", "MailQueue", "Mailbox", "Overflow", "Waiter"]

Overflow: TypeAlias = Literal["wait", "reject", "drop_oldest"]


@dataclass(frozen=True, slots=True)
class Mailbox:
    """How many messages may wait for an actor, and what a sender meets when they do.

    `wait`: the sender waits for room. `reject`: it gets `MailboxFull`. `drop_oldest`: the oldest
    message becomes a dead letter; only for what may be lost, such as telemetry.
    """

    capacity: int = 1024
    overflow: Overflow = "wait"

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"a mailbox holds at least one message, not {self.capacity}")


class Waiter(OneShot[None]):
    """A tell that waits for room. An ask needs none: its asker waits on the ask itself."""

    __slots__ = ("item",)

    def __init__(self, item: Tell) -> None:
        super().__init__()
        self.item = item


class _NoMail(deque[Item]):
    def append(self, item: Item, /) -> None:
        raise AssertionError(f"{item} would be lost: it was sent to an idle lane")


# An empty deque takes 600 bytes, and almost every actor is idle: idle lanes share this one.
NO_MAIL: Final[deque[Item]] = _NoMail()


class MailQueue:
    """The two lanes of one actor, and the senders that wait for room in the second."""

    __slots__ = ("capacity", "control", "mail", "waiting")

    capacity: int  # of the mail lane; nothing bounds control
    control: deque[Item]
    mail: deque[Item]
    waiting: deque[Ask | Waiter] | None

    def push_control(self, item: Item, *, first: bool = False) -> None:
        if self.control is NO_MAIL:
            self.control = deque()
        if first:
            self.control.appendleft(item)
        else:
            self.control.append(item)

    def wait_for_room(self, sender: Ask | Waiter) -> None:
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(sender)

    def leave(self, sender: Ask | Waiter) -> None:
        """A sender that waited is gone; it leaves no trace.

        Its message may have been admitted while its own wake-up was on the way. Then nobody is
        told that it was accepted, so it is taken back, unless it has been handled already.
        """
        sender.is_done = True
        if self.waiting and sender in self.waiting:
            self.waiting.remove(sender)
            if not self.waiting:
                self.waiting = None
        elif isinstance(sender, Waiter):
            for index, item in enumerate(self.mail):
                if item is sender.item:
                    del self.mail[index]
                    self.admit()
                    break

    def admit(self) -> None:
        """Let in, in order, as many waiting senders as there is room for.

        Only once half of the mail has gone: a sender that is woken for each message that goes
        costs a switch of tasks per message.
        """
        if len(self.mail) > self.capacity // 2:
            return
        waiting = self.waiting
        while waiting and len(self.mail) < self.capacity:
            sender = waiting.popleft()
            if isinstance(sender, Waiter):
                self.mail.append(sender.item)
                sender.set(None)
            elif not sender.is_done:
                self.mail.append(sender)
        if not waiting:
            self.waiting = None

    def pop(self) -> Item | None:
        """The next item, or None."""
        if self.control:
            return self.control.popleft()
        if self.mail:
            item = self.mail.popleft()
            if self.waiting is not None:
                self.admit()
            return item
        return None

    def drain(self) -> Iterator[Item]:
        """Everything that waits, in order; senders that waited for room are let go."""
        while self.control or self.mail or self.waiting:
            if self.control:
                yield self.control.popleft()
            elif self.mail:
                yield self.mail.popleft()
            else:
                assert self.waiting is not None
                sender = self.waiting.popleft()
                if isinstance(sender, Waiter):
                    sender.set(None)
                    yield sender.item
                else:
                    yield sender
        self.waiting = None

    @property
    def depth(self) -> int:
        return len(self.mail) + len(self.control)
