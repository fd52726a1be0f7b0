"""The command `torture`: many unruly users of a server, who know it only through its HTTP API."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Self, TextIO

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from turnkeeper.runtime import Ports

from ._display import many, print_list, printable, times
from ._exits import (
    BROKEN,
    INTERRUPTED,
    SEEDS,
    UNUSABLE,
    AsJson,
    Seed,
    fail,
    finite,
    interrupted_by_signals,
    print_json,
)

if TYPE_CHECKING:
    from ..torture.checker import Verdict
    from ..torture.server import Server
    from ..torture.torture import Torture

__all__ = ["Display", "report_verdict", "torture"]

_SECONDS = 30.0
_MILESTONES = 4
_TOLD_ELSEWHERE = ("killed", "stopped", "frozen", "started")


class Protocols(StrEnum):
    """The protocols that users speak."""

    OWN = "own"
    AI_SDK = "ai-sdk"
    AG_UI = "ag-ui"
    ALL = "all"


_MEANT = {
    "lost": "acknowledged or shown, but missing",
    "doubled": "present more than once",
    "reordered": "out of order",
    "unanswered": "a turn without an end, or without an answer",
    "blind": "the model saw too little, or something taken back",
    "foreign": "present, but not sent here, or refused",
    "torn": "a stream without an end, or with the wrong pieces",
}


def torture(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="The server, or several servers of the same conversations. If the URL has a "
            "path, messages are posted to it.",
            show_default=False,
        ),
    ] = None,
    *,
    users: Annotated[int, typer.Option(metavar="N", min=1, help="The number of users.")] = 20,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1.0,
            callback=finite,
            help="How long they send.",
            show_default="30, or no limit with --messages",
        ),
    ] = None,
    messages: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many messages each user sends, at most."),
    ] = None,
    protocol: Annotated[
        Protocols, typer.Option(help="The protocol that the users speak.")
    ] = Protocols.OWN,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="A command that starts the server, which is killed and started again. With "
            "several URLs, one --server for each, in their order; they are killed, or told to "
            "stop, in turn.",
        ),
    ] = None,
    kill: Annotated[
        int | None,
        typer.Option(
            metavar="PID",
            min=1,
            max=2**31 - 1,  # no process has a higher number
            help="A server process to kill once; a supervisor must restart it.",
        ),
    ] = None,
    kills: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="How often to kill the server.", show_default="3 with --server"
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Bearer tokens for the users, one a line.",
        ),
    ] = None,
    seed: Seed = None,
    history: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE", help="Write the history of the run here."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Only check the --history of an earlier run.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Torture a chat server over HTTP, and check that it kept its promises.

    Users send while their agents answer, cut connections at any byte, retry, and reconnect with
    and without a cursor. With --server or --kill the server is killed too. Its agent must answer
    with the markers of all messages that its model saw, as examples/torture_me.py does.

    Exit status: 0, no promise was broken; 1, one was, or the server did not come back; 2, the
    arguments are invalid; 130, stopped by Ctrl-C.
    """
    if importlib.util.find_spec("h11") is None:
        fail(
            UNUSABLE,
            "`torture` needs the package h11, which is not installed; "
            "pip install 'turnkeeper[torture]'",
        )
    if check is not None:
        report_verdict(_checked(check), as_json=as_json, history=None)
    if not urls:
        fail(UNUSABLE, "there is nothing to torture; give the server's URL, or a file to --check")
    if server and kill is not None:
        fail(UNUSABLE, "--server and --kill do not go together; choose one")
    if kills and not server and kill is None:
        fail(UNUSABLE, "--kills needs the server: give its command as --server, or its --kill PID")
    if server and len(server) != len(urls):
        fail(
            UNUSABLE,
            f"{len(urls)} URLs and {len(server)} --server; give one --server for each URL, in "
            "their order",
        )
    ports = Ports()
    seed = ports.random.randrange(SEEDS) if seed is None else seed
    errors = Console(stderr=True, highlight=False)
    with interrupted_by_signals(), ExitStack() as stack:
        file = None
        if history is not None:
            file = stack.enter_context(_opened(history))
        display = Display(errors)
        made = _made(
            urls,
            ports,
            file,
            display.changed,
            users=users,
            seconds=seconds if seconds or messages else _SECONDS,
            messages=messages,
            protocol=protocol,
            servers=server or (),
            pid=kill,
            kills=kills,
            token_file=token_file,
            seed=seed,
        )
        errors.print(Text(f"{users:,} users of {printable(' '.join(urls))}, seed {seed}"))
        display.show(made)
        _run(made, display)
    from ..torture.checker import check as check_history  # noqa: PLC0415 - as above

    if made.unread:
        print_list(errors, "these conversations could not be read at the end:", made.unread)
    report_verdict(
        check_history(made.history.records),
        as_json=as_json,
        history=history,
        status=BROKEN if made.unread else 0,
    )


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        fail(UNUSABLE, f"{path} cannot be written: {error.strerror}")


def _made(
    urls: Sequence[str],
    ports: Ports,
    file: TextIO | None,
    changed: Callable[[], None],
    *,
    users: int,
    seconds: float | None,
    messages: int | None,
    protocol: Protocols,
    servers: Sequence[str],
    pid: int | None,
    kills: int | None,
    token_file: Path | None,
    seed: int,
) -> Torture:
    from ..torture.exchanges import Site, Sites  # noqa: PLC0415 - an extra
    from ..torture.history import Protocol  # noqa: PLC0415 - with it
    from ..torture.server import GivenServer, OwnServer, OwnServers  # noqa: PLC0415 - with it
    from ..torture.torture import Plan, Torture  # noqa: PLC0415 - with it

    try:
        site = Site(urls[0]) if len(urls) == 1 else Sites(urls)
    except ValueError as error:
        fail(UNUSABLE, str(error))
    spoken: dict[Protocols, tuple[Protocol, ...]] = {
        Protocols.OWN: ("own",),
        Protocols.AI_SDK: ("ai-sdk",),
        Protocols.AG_UI: ("ag-ui",),
        Protocols.ALL: ("own", "ai-sdk", "ag-ui"),
    }
    tokens: list[str | None] = [None]
    if token_file is not None:
        lines = token_file.read_text(encoding="utf-8").splitlines()
        if any(len(line.split()) > 1 for line in lines):
            fail(
                UNUSABLE,
                f"{token_file} does not have one token on each line; write the tokens that "
                "`turnkeeper token` printed into a file; the file for `serve` has their hashes",
            )
        tokens = [line.strip() for line in lines if line.strip()] or [None]
    disturbed: Server | None = None
    if servers and isinstance(site, Sites):
        disturbed = OwnServers(site, ports, [shlex.split(each) for each in servers])
    elif servers:
        disturbed = OwnServer(site, ports, shlex.split(servers[0]))
    elif pid is not None:
        try:
            os.kill(pid, 0)
        except OSError as error:
            fail(UNUSABLE, f"--kill {pid}: {error.strerror}; give the process of the server")
        disturbed = GivenServer(site, ports, pid)
    if kills is None:
        kills = 3 if servers else int(pid is not None)
    plan = Plan(
        seed=seed,
        users=users,
        seconds=seconds,
        messages=messages,
        protocols=spoken[protocol],
        kills=kills,
        tokens=tokens,
        # A path is the route of another protocol, which may be the server's only route.
        has_log=protocol in (Protocols.OWN, Protocols.ALL) or not site.path,
    )
    return Torture(plan, site, server=disturbed, file=file, ports=ports, changed=changed)


def _run(made: Torture, display: Display) -> None:
    from ..torture.server import ServerLost  # noqa: PLC0415 - an extra

    try:
        with display:
            anyio.run(made.run)
    except KeyboardInterrupt:
        fail(INTERRUPTED, "stopped: the history is not whole, so it is not checked")
    except ServerLost as lost:
        status = BROKEN if made.history.counts["acknowledged"] else UNUSABLE
        fail(status, printable(str(lost)))


def _checked(path: Path) -> Verdict:
    from ..torture.checker import check  # noqa: PLC0415 - loads pydantic's models
    from ..torture.history import HistoryUnreadable, parse_history  # noqa: PLC0415 - with it

    try:
        with path.open(encoding="utf-8") as lines:
            return check(parse_history(lines))
    except (HistoryUnreadable, UnicodeDecodeError) as error:
        fail(UNUSABLE, f"{path} cannot be checked: {error}")


class Display:
    """Progress: a line that is kept up to date on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._made: Torture | None = None
        self._kills = self._disturbed = self._milestone = 0
        self._progress = Progress(
            TextColumn("{task.fields[known]:,} messages"),
            BarColumn(bar_width=14),
            TextColumn("{task.fields[events]:,} events, {task.fields[cuts]:,} cut off"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=1.0, known=0, events=0, cuts=0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self, made: Torture) -> None:
        """Show the progress of this run from now on."""
        self._made = made

    def changed(self) -> None:
        """Show what has happened."""
        made = self._made
        if made is None:
            return
        counts = made.history.counts
        known = many(counts["acknowledged"], "acknowledgement")
        if counts["killed"] > self._kills:
            self._kills = counts["killed"]
            self._say(f"server killed ({self._kills} of {made.plan.kills}), {known}")
        disturbed = counts["disturbed"] - counts["started"]
        if disturbed > self._disturbed:
            self._disturbed = disturbed
            if made.history.disturbance not in _TOLD_ELSEWHERE:
                self._say(f"{made.history.disturbance} ({disturbed} of {made.plan.kills}), {known}")
        milestone = int(_MILESTONES * made.progress)
        if not self._console.is_terminal and milestone > self._milestone:
            self._milestone = milestone
            self._say(known)
        self._progress.update(
            self._task,
            completed=made.progress,
            known=counts["acknowledged"],
            events=counts["seen"] + counts["piece"],
            cuts=counts["unknown"] + counts["cut"],
        )

    def _say(self, line: str) -> None:
        self._console.print(Text(line))


def report_verdict(
    verdict: Verdict, *, as_json: bool, history: Path | None, status: int = 0
) -> NoReturn:
    """Print the verdict, and exit with it; with the status if nothing was found."""
    totals = verdict.totals
    if not totals.get("acknowledged"):
        refused = "; ".join(f"{why}: {count}" for why, count in verdict.refusals.items())
        fail(UNUSABLE, f"nothing was acknowledged ({printable(refused) or 'no answer at all'})")
    if as_json:
        print_json(
            {
                "is_sound": verdict.is_sound,
                "counts": verdict.counts,
                "totals": totals,
                "findings": [asdict(finding) for finding in verdict.findings],
            }
        )
        raise typer.Exit(status if verdict.is_sound else BROKEN)
    console = Console(highlight=False)
    rows = [(label, totals.get(name, 0), "", "") for label, name in _ROWS]
    rows += [
        (f"… {fault}", count, "bold red" if count else "green", _MEANT[fault])
        for fault, count in verdict.counts.items()
    ]
    _print_rows(console, rows)
    if verdict.is_sound:
        console.print(Text("Nothing was found.", style="green"))
        raise typer.Exit(status)
    lines = [
        f"{finding.fault}: conversation {finding.room}, {finding.subject}: {finding.detail}"
        for finding in verdict.findings
    ]
    print_list(console, f"FOUND, {times(len(lines))}:", lines)
    if history is not None:
        console.print(Text(f"the history is in {history}"), soft_wrap=True)
    raise typer.Exit(BROKEN)


def _print_rows(console: Console, rows: Sequence[tuple[str, int, str, str]]) -> None:
    """Print labels, counts in a style, and meanings; no line ends with blanks."""
    label_width = max(len(label) for label, *_ in rows)
    count_width = max(len(f"{count:,}") for _, count, *_ in rows)
    indent = label_width + count_width + 4
    for label, count, style, meaning in rows:
        first, *more = Text(meaning).wrap(console, max(20, console.width - indent)) or [Text()]
        shown = Text(f"{label:<{label_width}}  ").append(f"{count:>{count_width},}", style)
        for line in (shown.append("  ").append(first), *(Text(" " * indent) + one for one in more)):
            line.rstrip()
            console.print(line, soft_wrap=True)


_ROWS = (
    ("conversations", "rooms"),
    ("messages", "messages"),
    ("… attempts to send them", "sent"),
    ("… attempts refused", "refused"),
    ("… attempts of unknown outcome", "unknown"),
    ("… acknowledged", "known"),
    ("answers that users saw", "answered"),
    ("streams and pages", "opened"),
    ("… events in them", "seen"),
    ("… pieces of answers in them", "piece"),
    ("kills of the server", "kills"),
    ("stops of a server among several", "stops"),
    ("other disturbances", "disturbances"),
)
