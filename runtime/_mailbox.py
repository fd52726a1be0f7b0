"""The mailbox: the messages that wait for one actor, their order, and the senders without room.

Owns two lanes and the senders that wait for room. Invariants, all kept without an await:

1. Control goes first; within a lane, first in, first out, waiting senders included.
2. Waiting senders are admitted in order, and none overtakes: while one waits, all wait.
3. While a sender waits, the mail lane is at least half full: code that takes mail below that
   admits waiting senders at once.
4. The runner pops an item itself, once it runs. No item is handed to a task that might be
   cancelled before it wakes, so none is lost on the way.

Senders append and the runner pops, all in one loop, so there is no lock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from ._backend import OneShot
from ._messages import Ask, Item, Order, Tell
from ._supervision import check_number

__all__ = [
    "DEFAULT_MAILBOX",
    "NO_MAIL",
    "SPARE_LANES_MAX",
    "Mailbox",
    "MailboxSettings",
    "Overflow",
    "Waiter",
]

Overflow: TypeAlias = Literal["wait", "reject", "drop_oldest"]


@dataclass(frozen=True, slots=True)
class MailboxSettings:
    """The capacity of an actor's mailbox, and its treatment of senders once it is full.

    `wait`: the sender waits for room. `reject`: it gets `MailboxFull`. `drop_oldest`: the oldest
    message becomes a dead letter; only for messages that may be lost, such as telemetry.
    """

    capacity: int = 1024
    overflow: Overflow = "wait"

    def __post_init__(self) -> None:
        check_number("capacity", self.capacity, "1 or more", least=1)
        if self.overflow not in get_args(Overflow):
            raise ValueError(
                f"overflow is {self.overflow!r}; it takes one of {', '.join(get_args(Overflow))}"
            )


DEFAULT_MAILBOX: Final = MailboxSettings()


class Waiter(OneShot[None]):
    """A tell that waits for room. An ask needs no waiter: its asker waits for the ask itself."""

    __slots__ = ("item",)

    def __init__(self, item: Tell) -> None:
        super().__init__()
        self.item = item


class _NoMail(deque[Item]):
    def append(self, item: Item, /) -> None:
        raise AssertionError(f"{item} would be lost: it was sent to an idle lane")


# An empty deque takes 600 bytes and almost every actor is idle, so idle lanes share this one.
NO_MAIL: Final[deque[Item]] = _NoMail()

SPARE_LANES_MAX: Final = 1024
"""The empty lanes that a runtime keeps for the actors that get mail next."""


class Mailbox:
    """The two lanes of one actor, and the senders that wait for room in the mail lane."""

    __slots__ = ("capacity", "control", "mail", "waiting")

    capacity: int  # of the mail lane; nothing bounds control
    control: deque[Item]
    mail: deque[Item]
    waiting: OrderedDict[Ask | Waiter, None] | None  # ordered, and each can leave at once

    def push_control(self, item: Item, *, first: bool = False) -> None:
        if self.control is NO_MAIL:
            self.control = deque()
        if first:
            self.control.appendleft(item)
        else:
            self.control.append(item)

    def wait_for_room(self, sender: Ask | Waiter) -> None:
        """Queue a sender behind those that wait already."""
        if self.waiting is None:
            self.waiting = OrderedDict()
        self.waiting[sender] = None

    def leave(self, sender: Ask | Waiter) -> None:
        """Remove a waiting sender that has gone away, and its message.

        The message may have been admitted just before, and the sender, which was not woken yet,
        will never know. Then it is taken out of the mail, unless it has been handled already.
        """
        sender.is_done = True
        if self.waiting and sender in self.waiting:
            del self.waiting[sender]
            if not self.waiting:
                self.waiting = None
        elif isinstance(sender, Waiter):
            for index, item in enumerate(self.mail):
                if item is sender.item:
                    del self.mail[index]
                    self.admit()
                    break

    def admit(self) -> None:
        """Admit, in order, as many waiting senders as there is room for.

        Only once half of the mail has gone: waking a sender for each message that is handled
        would cost a switch of tasks per message.
        """
        if len(self.mail) > self.capacity // 2:
            return
        waiting = self.waiting
        while waiting and len(self.mail) < self.capacity:
            sender, _ = waiting.popitem(last=False)
            if isinstance(sender, Waiter):
                self.mail.append(sender.item)
                sender.set(None)
            elif not sender.is_done:
                self.mail.append(sender)
        if not waiting:
            self.waiting = None

    def drain(self) -> Iterator[Item]:
        """Remove and yield all items in order, and wake the tells that waited for room."""
        while self.control or self.mail or self.waiting:
            if self.control:
                yield self.control.popleft()
            elif self.mail:
                yield self.mail.popleft()
            else:
                assert self.waiting is not None
                sender, _ = self.waiting.popitem(last=False)
                if isinstance(sender, Waiter):
                    sender.set(None)
                    yield sender.item
                else:
                    yield sender
        self.waiting = None

    @property
    def depth(self) -> int:
        """How many messages wait."""
        control = tuple(self.control)  # a copy: an exporter of metrics may ask from its thread
        return len(self.mail) + sum(not isinstance(item, Order) for item in control)
