"""Primitives below actors, for authors of journals, tools and adapters.

1. It owns nothing: each name is one function or class that works alike on asyncio and trio.
2. `OneShot` passes one answer to one waiting task. A `Bell`, from `make_bell`, wakes one again
   and again. `parking` returns the function by which tasks wait for one-shots without looking up
   the loop each time. `thread_caller` brings a call from a thread into the loop, and `home_check`
   tells if a call is made in it.
   `ClockHold` keeps a trio test's clock from jumping while a thread works.
   `clear_stray_cancellation` tells a library's native cancellation from a real one, and
   `is_interruption` tells what must be raised again from a failure.
   `persist` waits again after such a cancellation, and `to_its_end` after any, which it then
   raises. `running_task` tells tasks apart.
   `pausing` returns the cheapest checkpoint of the running loop, and `task_group` opens its
   cheapest group of tasks.
   `closing_scopes` leaves the cancel scopes that other code has left open.
   `Lateness` counts how late the loop runs what is due.
   `leaves` yields the errors inside a group.
   `Logger` logs records with fields.
3. It does not promise to be pleasant: applications need actors, effects and `ports.blocking`.
4. All of it belongs to the loop that runs it, except the functions that `thread_caller` and
   `home_check` return, `ThreadCalls.call` and `ThreadOneShot.wait`.
5. Nothing here survives a crash.
"""

from ._backend import (
    Bell,
    ClockHold,
    OneShot,
    Park,
    clear_stray_cancellation,
    closing_scopes,
    home_check,
    is_interruption,
    make_bell,
    parking,
    pausing,
    persist,
    running_task,
    task_group,
    thread_caller,
    to_its_end,
)
from ._lateness import LATE_BOUNDS_S, Lateness
from ._logger import Logger
from ._portal import NoAnswer, ThreadCalls, ThreadOneShot
from ._supervision import leaves

__all__ = [
    "LATE_BOUNDS_S",
    "Bell",
    "ClockHold",
    "Lateness",
    "Logger",
    "NoAnswer",
    "OneShot",
    "Park",
    "ThreadCalls",
    "ThreadOneShot",
    "clear_stray_cancellation",
    "closing_scopes",
    "home_check",
    "is_interruption",
    "leaves",
    "make_bell",
    "parking",
    "pausing",
    "persist",
    "running_task",
    "task_group",
    "thread_caller",
    "to_its_end",
]
