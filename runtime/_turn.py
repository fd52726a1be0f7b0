"""The per-message path: one turn of one actor.

A turn takes what waits, in order, until nothing is left, the neighbours are due, the handler has
to wait for something, or it raises. It runs inside the actor's context, in its owner's task, and
never waits itself: `_cell.py` decides what follows from how it ended.
"""

from __future__ import annotations

from enum import Enum
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from ._messages import Ask, Delivery, Firing, Order
from .errors import Refused

if TYPE_CHECKING:
    from ._cell import Cell

__all__ = ["Outcome", "leave_trace", "run_batch", "run_turn"]

# Fairness. 512 messages a turn: a neighbour's ask takes 7.7 ms under a flood; 8: 0.16 ms.
_TURN: Final = range(16)
_TURN_S: Final = 0.001


class Outcome(Enum):
    """What a turn came to."""

    EMPTY = "no mail is left"
    SPENT = "it is the neighbours' turn"
    SUSPENDED = "the handler waits for something"
    UNATTENDED = "the handler waits for a one-shot cell, and needs no task for that"
    FAILED = "the handler raised"
    ORDERED = "the runtime wants something of the actor"


def run_turn(cell: Cell) -> Outcome:  # noqa: C901 - one path, on one screen, without calls
    """Handle what waits, one message after the other."""
    actor = cell.actor
    assert actor is not None, f"{cell.name} has a turn before it was started"
    receive = actor.receive
    mail = cell.mail  # the same lane for as long as the actor is not at rest
    now = cell.system.now
    began = ended = now()
    until = began + _TURN_S
    handled = 0
    try:
        for _ in _TURN:
            if cell.control:
                item = cell.control.popleft()
            elif mail:
                item = mail.popleft()
                # As in `admit`, which is a call too many for each message of a flood.
                if cell.waiting is not None and len(mail) <= cell.capacity // 2:
                    cell.admit()
            else:
                return Outcome.EMPTY

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
                return Outcome.ORDERED

            if trace is not None:
                enter_trace(cell, message, trace, is_ask=ask is not None)
            try:
                result = receive(message)
                if type(result) is CoroutineType:
                    # It belongs to one task from its start: a resident's own, or a worker's where
                    # this may be an asker's.
                    if cell.spec.is_resident or cell.is_inline:
                        return cell.suspend(result, began=ended)
                    try:
                        yielded = result.send(None)
                    except StopIteration as stop:
                        result = stop.value
                    else:
                        return cell.suspend(result, yielded, began=ended)
            except Refused as refusal:  # an answer, not a failure
                if ask is not None:
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
        return Outcome.SPENT
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: Cell.as_failure
        cell.error = error
        return Outcome.FAILED
    finally:
        if handled:
            cell.handled += handled
            stats = cell.traits.stats  # as `Stats.record` does, without the call
            stats.count += handled
            stats.recent.append(((ended - began) / handled, handled))


def run_batch(cell: Cell) -> Outcome:
    """Hand over what waits, at most `batch_max` messages at once."""
    actor = cell.actor
    assert actor is not None, f"{cell.name} has a turn before it was started"
    deliveries: list[Delivery[Any]] = []
    asks: list[Ask] = []
    trace: object = None
    while len(deliveries) < actor.batch_max and (item := cell.pop()) is not None:
        if isinstance(item, Order):
            if deliveries:  # this batch first: it was taken already
                cell.push_control(item, first=True)
                break
            cell.order = item
            return Outcome.ORDERED
        if isinstance(item, tuple):
            message, _, trace = item
            deliveries.append(Delivery(cell, message, None))
        elif isinstance(item, Ask):
            if not item.is_done:
                item.is_started = True
                asks.append(item)
                trace = item.trace
                deliveries.append(Delivery(cell, item.message, item))
        elif item.take():
            deliveries.append(Delivery(cell, item.message, None))
    if not deliveries:
        return Outcome.EMPTY

    cell.batch = asks
    if trace is not None:
        enter_trace(cell, deliveries[-1].message, trace, is_ask=bool(asks))
    coroutine = actor.receive_batch(deliveries)
    now = cell.system.now
    began = now()
    if cell.spec.is_resident:
        return cell.suspend(coroutine, began=began, count=len(deliveries))
    try:
        yielded = coroutine.send(None)
    except StopIteration:
        count = len(deliveries)
        cell.handled += count
        cell.traits.stats.record((now() - began) / count, count)
        leave_trace(cell, None)
        cell.answered(None)
        return Outcome.SPENT
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: Cell.as_failure
        cell.error = error
        return Outcome.FAILED
    return cell.suspend(coroutine, yielded, began=began, count=len(deliveries))


def enter_trace(cell: Cell, message: object, trace: object, *, is_ask: bool) -> None:
    if (tracing := cell.system.tracing) is not None and cell.actor is not None:
        tracing.enter(cell.actor, message, trace, is_ask=is_ask)


def leave_trace(cell: Cell, error: BaseException | None) -> None:
    """Inside the actor's context; `Cell.leave_trace` is for everybody else."""
    if (tracing := cell.system.tracing) is not None and cell.actor is not None:
        tracing.leave(cell.actor, error)
