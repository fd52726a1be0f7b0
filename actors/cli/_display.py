"""The display of a replay: its progress, on standard error, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ._replay import Replay
from ._report import Report

__all__ = ["Display", "many", "print_list", "print_report", "times"]

LISTED_MAX = 20
_MILESTONES = 4


class Display:
    """Progress: a line that is kept up to date on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, messages: int) -> None:
        self._console = console
        self._messages = messages
        self._kills = self._restarts = self._milestone = 0
        self._progress = Progress(
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} chat messages"),
            BarColumn(bar_width=14),
            TextColumn("{task.fields[rate]:,.0f} events/s, restarts: {task.fields[restarts]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=messages, rate=0, restarts=0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def changed(self, replay: Replay) -> None:
        """Show the progress."""
        at = f"after {replay.acknowledged:,} of {self._messages:,} chat messages"
        if replay.kills > self._kills:
            self._kills = replay.kills
            kills = len(replay.planned_kills)
            self._say(f"worker killed (SIGKILL, {replay.kills} of {kills}) {at}")
        if replay.restarts > self._restarts:
            self._restarts = replay.restarts
            self._say("worker started again, and has recovered the unfinished turns")
        if not self._console.is_terminal:
            milestone = _MILESTONES * replay.acknowledged // self._messages
            if milestone > self._milestone:
                self._milestone = milestone
                self._say(f"{at[len('after ') :]} acknowledged")
        self._progress.update(
            self._task,
            completed=replay.acknowledged,
            rate=replay.logged / replay.seconds if replay.seconds else 0,
            restarts=replay.restarts,
        )

    def _say(self, line: str) -> None:
        self._console.print(Text(line))


def times(count: int) -> str:
    """Return how often something happened, in words."""
    return "once" if count == 1 else f"{count:,} times"


def many(count: int, noun: str) -> str:
    """Return a number of things: "1 turn", "2 turns"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print a title, and under it at most `LISTED_MAX` lines."""
    console.print(Text(title), soft_wrap=True)
    for line in lines[:LISTED_MAX]:
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)
    if len(lines) > LISTED_MAX:
        console.print(Text(f"  … and {len(lines) - LISTED_MAX:,} more"))


def print_report(console: Console, report: Report) -> None:
    """Print the table and the verdict."""
    columns = {**report.by_policy, "all": report.counts}
    if len(report.by_policy) == 1:
        del columns["all"]
    table = Table(box=None, pad_edge=False, show_header=len(columns) > 1)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for label, name, is_breach in _ROWS:
        cells = [
            Text(f"{counts[name]:,}", style=_style(counts[name]) if is_breach else "")
            for counts in columns.values()
        ]
        table.add_row(label, *cells)
    console.print(table)
    console.print(
        Text(
            f"{report.counts['events']:,} events in {report.seconds:.1f} s, "
            f"{report.events_per_second:,.0f} a second; worker killed {times(report.kills)}; "
            f"seed {report.seed}"
        ),
        soft_wrap=True,
    )
    if report.broken:
        print_list(console, f"NOT as promised, {times(len(report.broken))}:", report.broken)
    elif report.stopped is None:
        console.print(Text("Everything acknowledged is there, once and in order.", style="green"))
    else:
        found = "Stopped before the end. Everything acknowledged until then is there."
        console.print(Text(found, style="yellow"))


def _style(breaches: int) -> str:
    return "bold red" if breaches else "green"


_ROWS = (
    ("conversations", "conversations", False),
    ("chat messages sent", "sent", False),
    ("… before the previous answer", "overlapped", False),
    ("… refused, and sent later", "rejected", False),
    ("turns", "turns", False),
    ("… interrupted", "interrupted", False),
    ("… rolled back", "rolled_back", False),
    ("… joined by a further message", "joined", False),
    ("condensations", "condensations", False),
    ("events acknowledged", "acknowledged", False),
    ("… found", "found", False),
    ("… lost", "lost", True),
    ("… doubled", "duplicated", True),
    ("… out of order", "out_of_order", True),
    ("views compared with a rebuild", "views_checked", False),
    ("… different", "views_diverged", True),
    ("tool calls", "calls", False),
    ("… with exactly one result", "calls_answered_once", False),
)


def printable(text: str) -> str:
    """Return text that is safe for a terminal: control characters are made visible."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
