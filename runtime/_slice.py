"""The path of each message: one slice of one actor.

A slice takes messages, in order, until none is left, other actors are due, a handler has to wait,
or a handler raises. It runs inside the actor's context, in its runner's task, and never waits: it
returns an `Outcome`, and `Cell.step` decides what follows.
"""

from __future__ import annotations

import inspect
from enum import Enum
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from ._messages import Ask, Delivery, Firing, Order
from .errors import Refused

if TYPE_CHECKING:
    from ._cell import Cell
    from ._incarnation import Incarnation

__all__ = [
    "EMPTY",
    "FAILED",
    "ORDERED",
    "SPENT",
    "SUSPENDED",
    "UNATTENDED",
    "Outcome",
    "leave_trace",
    "run_batch",
    "run_slice",
]

# Fairness: a slice has 32 messages at most, or a millisecond. The more it has, the longer another
# actor waits under a flood: an ask took 7.7 ms with 512 messages, and 0.16 ms with 8. `tell` pauses
# after as many messages, so one flooding sender neither fills the mailbox nor waits for room.
_SLICE: Final = range(32)
_SLICE_S: Final = 0.001


# Types that cannot be awaited. Most replies are of these, and need no closer look.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, set})


def as_coroutine(result: object) -> object:
    """Return a coroutine that awaits the result if it can be awaited, else the result itself."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> object:
        return await result

    return wait()


class Outcome(Enum):
    """How a slice ended."""

    EMPTY = "no mail is left"
    SPENT = "other actors are due"
    SUSPENDED = "the handler waits for something"
    UNATTENDED = "the handler waits for a one-shot, and needs no task for that"
    FAILED = "the handler raised"
    ORDERED = "an order came"


# Named here for speed: each message needs some of them, and `Outcome.X` is a slow lookup.
EMPTY, SPENT, SUSPENDED, UNATTENDED, FAILED, ORDERED = Outcome


def run_slice(  # noqa: C901 - one path, on one screen, without calls
    cell: Cell, life: Incarnation
) -> Outcome:
    """Handle the messages that wait, one after the other. `life` is the cell's incarnation."""
    actor = life.actor
    assert actor is not None, f"{cell.name} has a slice before it was made"
    mail = cell.mail  # the same lane for as long as the actor is not at rest
    now = cell.system.now
    began = ended = now()
    until = began + _SLICE_S
    handled = 0
    try:
        receive = actor.receive
        for _ in _SLICE:
            if cell.control:
                item = cell.control.popleft()
            elif mail:
                item = mail.popleft()
                # As in `admit`: a call for each message would be too slow.
                if cell.waiting is not None and len(mail) <= cell.capacity // 2:
                    cell.admit()
            else:
                return EMPTY

            if type(item) is tuple:
                message, _, trace = item
                ask = None
            elif type(item) is Ask:
                if item.is_done:  # its asker has left, or its deadline has passed
                    continue
                item.is_started = True
                message = item.message
                trace = item.trace
                cell.current = ask = item
            elif type(item) is Firing:
                if not item.take():
                    continue
                message, trace = item.message, None
                ask = None
            else:
                assert isinstance(item, Order), f"{item} lay in the mailbox of {cell.name}"
                cell.order = item
                return ORDERED

            if trace is not None:
                enter_trace(cell, message, trace, is_ask=ask is not None)
            try:
                result = receive(message)
                if type(result) not in _PLAIN and (
                    type(result) is CoroutineType
                    or type(result := as_coroutine(result)) is CoroutineType
                ):
                    # A coroutine must start in the task that it may have to wait in. A resident has
                    # a task of its own; and an inline actor may be running in an asker's.
                    if cell.spec.is_resident or cell.is_inline:
                        return cell.suspend(result, began=ended)
                    try:
                        yielded = result.send(None)
                    except StopIteration as stop:
                        result = stop.value
                    else:
                        return cell.suspend(result, yielded, began=ended)
            except Refused as refusal:  # an answer, not a failure
                if ask is not None and cell.current is ask:
                    ask.fail(refusal)
                    cell.current = None
            else:
                # `defer` has cleared `current`: the answer comes later.
                if ask is not None and cell.current is ask:
                    ask.set(result)
                    cell.current = None
            if trace is not None:
                leave_trace(cell, None)

            handled += 1
            ended = now()
            if ended >= until:
                break
        return SPENT
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
        cell.error = error
        return FAILED
    finally:
        if handled:
            cell.handled += handled
            stats = cell.traits.stats  # as `Stats.record` does, without the call
            stats.count += handled
            stats.recent.append((ended - began, handled))


def run_batch(  # noqa: C901 - one path, on one screen, without calls
    cell: Cell, life: Incarnation
) -> Outcome:
    """Hand over the messages that wait, at most `batch_max` at once, as `run_slice` does."""
    actor = life.actor
    assert actor is not None, f"{cell.name} has a slice before it was made"
    mail = cell.mail  # the same lane for as long as the actor is not at rest
    count_max = cell.traits.batch_max
    taken: list[Delivery[Any]] = []
    trace: object = None
    is_ask = False
    while len(taken) < count_max:
        if cell.control:
            item = cell.control.popleft()
        elif mail:
            item = mail.popleft()
            if cell.waiting is not None:
                cell.admit()
        else:
            break

        if type(item) is Ask:
            if not item.is_done:
                item.is_started = is_ask = True
                trace = item.trace
                taken.append(Delivery(life, item.message, item))
        elif type(item) is tuple:
            message, _, trace = item
            taken.append(Delivery(life, message, None))
        elif type(item) is Firing:
            if item.take():
                taken.append(Delivery(life, item.message, None))
        else:
            assert isinstance(item, Order), f"{item} lay in the mailbox of {cell.name}"
            if taken:  # the batch that was taken goes first
                cell.push_control(item, first=True)
                break
            cell.order = item
            return ORDERED
    if not taken:
        return EMPTY

    # A thousand of these may wait at once. Python makes small tuples of those that were let go, and
    # so they lead to no collection of garbage.
    cell.batch = deliveries = tuple(taken)
    if trace is not None:
        enter_trace(cell, deliveries[-1].message, trace, is_ask=is_ask)
    now = cell.system.now
    began = now()
    try:
        coroutine = actor.receive_batch(deliveries)
        if cell.spec.is_resident:
            return cell.suspend(coroutine, began=began)
        try:
            yielded = coroutine.send(None)
        except StopIteration:
            count = len(deliveries)
            cell.handled += count
            cell.traits.stats.record(now() - began, count)
            leave_trace(cell, None)
            cell.settle_batch(deliveries)
            return SPENT
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
        cell.error = error
        return FAILED
    return cell.suspend(coroutine, yielded, began=began)


def enter_trace(cell: Cell, message: object, trace: object, *, is_ask: bool) -> None:
    """Tell the tracing that a handler begins. Runs inside the actor's context."""
    if (tracing := cell.system.tracing) is not None and (actor := cell.actor) is not None:
        tracing.enter(actor, message, trace, is_ask=is_ask)


def leave_trace(cell: Cell, error: BaseException | None) -> None:
    """Tell the tracing that a handler has ended. Runs inside the actor's context."""
    if (tracing := cell.system.tracing) is not None and (actor := cell.actor) is not None:
        tracing.leave(actor, error)
