"""Plays a replay: starts the worker, exchanges reports and orders, kills it, starts it again.

The users live here, in a process that is not killed, so they hold the same acknowledgements as real
clients would. A report counts from the moment it is read. The pipe of a killed worker is read to
its end, since the worker had sent everything in it.

A replay runs in one task. If the task is cancelled, as by Ctrl-C, it tells the worker to stop, and
kills it if it has not stopped after `STOP_GRACE_S`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import IO

import anyio
from anyio.abc import Process

from turnkeeper.runtime import Ports

from ._protocol import (
    Failed,
    GetViews,
    Order,
    Ready,
    Report,
    Start,
    Unserved,
    Views,
    Vitals,
    reports,
)
from ._users import Kill, User

__all__ = ["SILENCE_S_MAX", "STOP_GRACE_S", "WORKER", "Replay", "Worker", "WorkerLost", "started"]

WORKER: Sequence[str] = (sys.executable, "-P", "-m", "turnkeeper.actors.cli.worker")

STOP_GRACE_S = 10.0
SILENCE_S_MAX = 120.0
"""A worker that reports nothing for this long, plus its pace, is lost: it hangs."""
_ERROR_LINES_MAX = 5


class WorkerLost(Exception):
    """The worker could not start, failed, or ended without having been killed."""


@dataclass(slots=True)
class Replay:
    """One replay, during and after. Only `play` changes it."""

    start: Start
    users: Sequence[User]
    planned_kills: Sequence[Kill]
    ports: Ports
    changed: Callable[[Replay], None]
    """Called after every report."""
    worker: Sequence[str] = WORKER
    kills: int = 0
    restarts: int = 0
    seconds: float = 0.0
    acknowledged: int = 0
    """The number of chat messages acknowledged to users so far."""
    logged: int = 0
    """The number of events acknowledged to agents so far."""
    _by_name: dict[str, User] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)
    _lines: int = 0
    _began: float | None = None
    """The time of the first worker's first report; its start does not count as playing."""

    async def play(self) -> None:
        """Play to the end, over all kills. Raises `WorkerLost`."""
        self._by_name = {user.part.conversation: user for user in self.users}
        self._busy = set(self._by_name)
        kills = deque(self.planned_kills)
        while True:
            async with started(self.worker) as worker:
                has_told_all = False
                with anyio.move_on_after(self._silence_s) as hearing:
                    await worker.order(self.start, *self._begin())
                    has_told_all = await self._follow(worker, kills, hearing)
                if hearing.cancelled_caught:
                    raise WorkerLost(f"the worker has said nothing for {self._silence_s:g} s")
            if not worker.is_killed:
                if not has_told_all or worker.status != 0:
                    raise WorkerLost(worker.describe_end())
                return
            kills.popleft()
            self.kills += 1
            self._lines = 0
            self.changed(self)

    @property
    def _silence_s(self) -> float:
        return SILENCE_S_MAX + self.start.pace_s

    async def _follow(self, worker: Worker, kills: deque[Kill], hearing: anyio.CancelScope) -> bool:
        """Serve one worker until it has reported its views (True), or its reports end.

        Each report puts off the end of `hearing`.
        """
        async with aclosing(worker.reports()) as heard:
            async for report in heard:
                hearing.deadline = anyio.current_time() + self._silence_s
                orders = self._note(report)
                now = self.ports.monotonic()
                self._began = now if self._began is None else self._began
                self.seconds = now - self._began
                self.changed(self)
                if worker.is_killed:
                    continue
                if self._is_due(kills):
                    worker.kill()
                elif isinstance(report, Views):
                    return True
                else:
                    await worker.order(*orders)
        return False

    def _begin(self) -> Sequence[Order]:
        """Return the first orders of a new worker."""
        orders: list[Order] = [
            order for user in self.users for order in user.orders_for_new_worker()
        ]
        return orders if self._busy else [*orders, self._get_views()]

    def _note(self, report: Report) -> Sequence[Order]:
        """Take in a report; return the orders that follow if the worker still lives."""
        match report:
            case Ready():
                self.restarts = self.kills
                return ()
            case Failed():
                raise WorkerLost(f"the worker failed: {report.error}: {report.why}")
            case Views():
                for name, ids in report.event_ids.items():
                    self._by_name[name].receipts.view_ids = ids
                return ()
            case Vitals() | Unserved():
                raise WorkerLost(f"the worker reports {report.kind}, which no replay asks for")
            case _:
                pass
        user = self._by_name[report.conversation]
        acknowledged, logged = len(user.receipts.messages), len(user.receipts.events)
        orders = user.note(report)
        self.acknowledged += len(user.receipts.messages) - acknowledged
        self.logged += len(user.receipts.events) - logged
        if user.is_done and user.part.conversation in self._busy:
            self._busy.remove(user.part.conversation)
            if not self._busy:
                return [*orders, self._get_views()]
        return orders

    def _get_views(self) -> Order:
        return GetViews(conversations=tuple(self._by_name))

    def _is_due(self, kills: deque[Kill]) -> bool:
        """True if the next kill is due; at the end of the replay it always is."""
        if not kills or (self._busy and self.acknowledged < kills[0].acknowledged):
            return False
        self._lines += 1
        return not self._busy or self._lines > kills[0].lines


class Worker:
    """A worker process, seen from the command line."""

    def __init__(self, process: Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        self._last_words: Sequence[str] = ()
        self._is_overdue = False
        self._ordering = anyio.Lock()
        self.is_killed = False

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def order(self, *orders: Order) -> None:
        """Send orders. A live worker always reads them, so this never waits for its reports.

        If the worker has ended, this does nothing: the end of its reports shows that.
        """
        assert self._process.stdin is not None
        if not orders:
            return
        lines = b"".join(order.model_dump_json().encode() + b"\n" for order in orders)
        try:
            # In order, even if several tasks give orders.
            async with self._ordering:
                await self._process.stdin.send(lines)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # its reports end too, and their reader says why

    async def reports(self) -> AsyncGenerator[Report, None]:
        """Yield each whole line that it writes; a line that a kill cut off counts as not sent."""
        assert self._process.stdout is not None
        rest = b""
        async for chunk in self._process.stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield reports.validate_json(line)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self.is_killed = True

    async def stop(self) -> None:
        """Tell it to stop by ending its input, wait, and kill it if it does not stop."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with anyio.move_on_after(STOP_GRACE_S, shield=True):
            await self._process.stdin.aclose()
            async for _ in self._process.stdout:
                pass  # read its output and drop it, so that it never waits for room to write
            await self._process.wait()
        if self._process.returncode is None:
            self._is_overdue = True
            self._process.kill()
        with anyio.CancelScope(shield=True):
            await self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        self._last_words = lines[-_ERROR_LINES_MAX:]

    def describe_end(self) -> str:
        """Describe how it ended, with the last lines of its standard error."""
        what = f"the worker ended by itself with status {self.status}"
        if self._is_overdue:
            what = f"the worker did not stop within {STOP_GRACE_S:g} s, and was killed"
        return "\n  ".join([what, *self._last_words])


@asynccontextmanager
async def started(command: Sequence[str]) -> AsyncIterator[Worker]:
    """Start a worker in a session of its own, so that Ctrl-C reaches it only through us."""
    with ExitStack() as stack:
        try:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = await anyio.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:
            # In Python 3.11 asyncio waits for it with a thread, and there may be none left; the
            # worker then ends by itself, since its input has ended.
            raise WorkerLost(f"the worker cannot be started: {error}") from error
        async with process:
            worker = Worker(process, errors)
            try:
                yield worker
            finally:
                await worker.stop()
