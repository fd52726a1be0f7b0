"""The display of a stress run: its progress, on standard error, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ._display import many, print_report
from ._stress_report import StressReport, quantiles_ms
from ._stress_run import Stress

__all__ = ["StressDisplay", "print_stress_report"]

_LATEST = 5
"""The number of samples over which current rates are computed."""
_REDRAW_S = 0.25
_LINES_ELSEWHERE = 10
_LINE_S_MIN = 1.0


class StressDisplay:
    """A table that is kept up to date on a terminal; elsewhere, a plain line at intervals."""

    def __init__(self, console: Console, duration_s: float) -> None:
        self._console = console
        self._duration_s = duration_s
        self._kills = self._restarts = 0
        self._checked = 0
        self._next_line = 0.0
        self._next_draw = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def changed(self, stress: Stress) -> None:
        """Show the progress."""
        if stress.kills > self._kills:
            self._kills = stress.kills
            of = len(stress.planned_kills)
            self._say(
                f"{stress.seconds:,.0f} s: worker killed (SIGKILL, {stress.kills} of {of}), "
                f"{many(stress.crowd.open, 'turn')} open"
            )
        for outage in stress.outages[self._restarts :]:
            if outage.until is not None:
                self._restarts += 1
                self._say(f"{stress.seconds:,.0f} s: ready again")
        if self._console.is_terminal:
            if stress.seconds >= self._next_draw:
                self._next_draw = stress.seconds + _REDRAW_S
                self._live.update(self._table(stress), refresh=True)
        elif stress.seconds >= self._next_line:
            every_s = max(_LINE_S_MIN, self._duration_s / _LINES_ELSEWHERE)
            self._next_line = stress.seconds + every_s
            if len(stress.samples) > 1:  # before, there is no rate
                self._say(self._line(stress))

    def checked(self) -> None:
        """Note that one more conversation was compared with its receipts."""
        self._checked += 1
        if self._console.is_terminal and self._checked % 100 == 0:
            self._live.update(Text(f"checking: {self._checked:,} conversations"), refresh=True)

    def _line(self, stress: Stress) -> str:
        messages_per_s, _, latency_ms = _now(stress)
        return (
            f"{stress.seconds:,.0f} s: {stress.crowd.acknowledged:,} chat messages, "
            f"{messages_per_s:,.0f}/s, p50 {latency_ms['p50']:,.1f} ms, "
            f"p99 {latency_ms['p99']:,.1f} ms"
        )

    def _table(self, stress: Stress) -> Table:
        crowd = stress.crowd
        messages_per_s, events_per_s, latency_ms = _now(stress)
        sample = stress.samples[-1] if stress.samples else None
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_row("time", f"{stress.seconds:,.0f} of {self._duration_s:,.0f} s")
        table.add_row(
            "chat messages",
            f"{crowd.acknowledged:,} acknowledged, {messages_per_s:,.0f}/s; {crowd.open:,} open",
        )
        table.add_row("events", f"{crowd.logged:,} reported to agents, {events_per_s:,.0f}/s")
        shown = ", ".join(f"{name} {ms:,.1f}" for name, ms in latency_ms.items())
        table.add_row("latency, ms", shown)
        if sample is not None:
            waiting = f"{sample.waiting:,} waiting, at most {sample.waiting_max:,} in one"
            table.add_row("mailboxes", waiting)
            table.add_row("memory", f"{stress.memory_max / 1e6:,.0f} MB")
        table.add_row("kills", f"{stress.kills} of {len(stress.planned_kills)}")
        return table

    def _say(self, line: str) -> None:
        self._console.print(Text(line))


def _now(stress: Stress) -> tuple[float, float, dict[str, float]]:
    """Return the recent chat messages and events a second, and the latencies."""
    latest: Sequence[object] = stress.samples[-_LATEST:]
    if len(latest) < 2:  # noqa: PLR2004 - a difference takes two
        return 0.0, 0.0, dict(quantiles_ms(()))
    first, last = stress.samples[-len(latest)], stress.samples[-1]
    seconds = last.at - first.at
    latencies = stress.crowd.latencies[first.answered : last.answered]
    return (
        (last.acknowledged - first.acknowledged) / seconds,
        (last.logged - first.logged) / seconds,
        dict(quantiles_ms(latencies)),
    )


def print_stress_report(console: Console, report: StressReport) -> None:
    """Print the numbers, and then the verdict."""
    latency = ", ".join(f"{name} {ms:,.1f}" for name, ms in report.latency_ms.items())
    console.print(Text(f"latency in ms: {latency}"), soft_wrap=True)
    if report.recovery_s:
        seconds = ", ".join(f"{seconds:.2f}" for seconds in report.recovery_s)
        console.print(Text(f"seconds from a kill until ready: {seconds}"), soft_wrap=True)
    late = ", ".join(f"{name} {ms:,.1f}" for name, ms in report.late_ms.items())
    console.print(Text(f"event loop late, in ms: {late}"), soft_wrap=True)
    if report.unserved:
        errors = ", ".join(f"{name} {count:,}" for name, count in report.unserved.items())
        console.print(Text(f"sent again after: {errors}"), soft_wrap=True)
    console.print(Text(f"memory of the worker: {report.memory_max / 1e6:,.0f} MB at most"))
    print_report(console, report.account)
