"""The commands: `demo`, `replay`, `stress`, `simulate`, `serve`, …, and those about a journal.

Results go to standard output, everything else to standard error. Exit status: 0 if every promise
held; 1 if a promise was broken, the worker failed, or a log cannot be read; 2 if the arguments or a
part of the input cannot be used (the rest of the input has run), or the output cannot be written;
130 if stopped by Ctrl-C; 141 if the reader of the output has left, as `head` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol

import anyio
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from turnkeeper.runtime import Ports

from ..core.commands import OnOverlap
from ..errors import JournalRefused, JournalUnavailable
from ..journals.sqlite.journal import SQLiteJournal
from ..recordings.samples import read_samples
from ..recordings.transcripts import InputProblem, RecordedConversation, parse_recorded
from ..values.text import TEXT_LENGTH_MAX
from ._asking import told
from ._display import Display, many, print_list, print_report, printable
from ._exits import (
    BROKEN,
    INTERRUPTED,
    SEEDS,
    UNUSABLE,
    AsJson,
    Seed,
    fail,
    finite,
    how_stopped,
    interrupted_by_signals,
    print_json,
    temporary_folder,
    told_output,
)
from ._journal import COMMANDS
from ._journal_jobs import list_to_write, was_url
from ._naming import conversation_names
from ._protocol import Start
from ._replay import WORKER, Replay, WorkerLost
from ._report import Report, empty_report, make_report
from ._serve import inspect, serve, token
from ._simulate import simulate
from ._stress import stress
from ._torture import torture
from ._users import plan_kills, plan_users

__all__ = ["app"]

_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Try it": {
        "demo": "Play sample conversations, kill the worker, and count every event.",
        "replay": "Do the same with your own recorded conversations.",
        "stress": "Load your own machine and database with conversations.",
        "simulate": "Run conversations under simulated faults, and check every promise.",
        "torture": "Play unruly users of a chat server over HTTP, check its answers.",
    },
    "Serve an agent": {
        "serve": "Serve an agent over HTTP, until a signal.",
        "token": "Make a token for a client.",
    },
    "Read a journal": {
        "show": "List conversations, or print one, in full or up to a seq.",
        "inspect": "Show conversations in a browser.",
        "export": "Export conversations to a file.",
        "import": "Import conversations from files.",
    },
    "Maintain a journal": {
        "verify": "Check every record, and all data derived from the records.",
        "repair": "Repair a damaged file.",
        "reindex": "Rewrite the rows of lists that are stale.",
        "vacuum": "Return the space of deleted records to the disk.",
        "delete": "Delete conversations.",
    },
}
"""The commands as the help lists them, each with its line."""

_TAKE_JOURNALS = frozenset(_SECTIONS["Read a journal"]) | frozenset(_SECTIONS["Maintain a journal"])
_MEANT = {"int_parsing": "must be a whole number", "float_parsing": "must be a number"}
"""Pydantic's errors of values that typer reads, in the words of the command line."""


class _Formatter(Protocol):
    """The part of click's formatter that is used here; typer ships its own copy of click."""

    def section(self, name: str) -> AbstractContextManager[None]: ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None: ...


class _Commands(TyperGroup):
    """Lists the commands by their purpose, and tells if their output cannot be written."""

    # The types of click's arguments are in typer's own copy of click, which is private.

    def make_context(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401 - as said above
        """Read the arguments; `--help` and `--version` print here."""
        with told_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run the command."""
        with told_output():
            try:
                return super().invoke(ctx)
            except typer.TyperException as error:
                error.message = _in_our_words(error, ctx.invoked_subcommand)
                raise

    def format_commands(self, _ctx: object, formatter: _Formatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<8}", line) for name, line in commands.items()])


def _in_our_words(error: typer.TyperException, command: str | None) -> str:
    """Return what an error says of the arguments, without pydantic's words; say where DB goes."""
    said = error.message
    if isinstance(error.__cause__, ValidationError):
        found = error.__cause__.errors()[0]["type"]
        return _MEANT.get(found) or (
            said.removeprefix("Value error, ").replace("Input should be", "must be")
        )
    if said == "No such option: --db" and command in _TAKE_JOURNALS:
        return f"{said}; this command takes the journal as its argument: {command} DB"
    if said.startswith("Got unexpected extra argument") and command in ("demo", "serve", "stress"):
        return f"{said}; name the journal with --db"
    return said


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=_Commands,
    # Plain help without frames: at 80 columns, the words need their room.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - an option's callback
    if value:
        print(f"turnkeeper {version('turnkeeper')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Keep conversations between people and AI agents correct under concurrency."""


_DEMO_POLICIES: Sequence[OnOverlap] = ("queue", "interrupt", "steer", "rollback", "reject")
_DEMO_OVERLAP = 0.5
_DEMO_KILLS = 3
_DEMO_PACE_S = 0.05
# How long a view may get before it is condensed. Sample conversations are shorter than real ones.
_DEMO_VIEW_EVENTS_MAX = 24
_REPLAY_VIEW_EVENTS_MAX = 40


class Policy(StrEnum):
    """Says what happens to a message that comes while a turn runs."""

    QUEUE = "queue"
    INTERRUPT = "interrupt"
    STEER = "steer"
    ROLLBACK = "rollback"
    REJECT = "reject"


_ON_OVERLAP: Mapping[Policy, OnOverlap] = {
    Policy.QUEUE: "queue",
    Policy.INTERRUPT: "interrupt",
    Policy.STEER: "steer",
    Policy.ROLLBACK: "rollback",
    Policy.REJECT: "reject",
}


class _Part(NamedTuple):
    """One conversation to play."""

    name: str
    recorded: RecordedConversation
    on_overlap: OnOverlap


class _Plan(NamedTuple):
    """The settings of a replay."""

    overlap: float
    kills: int
    pace_s: float
    view_events_max: int
    seed: int | None
    as_json: bool


@app.command()
@interrupted_by_signals()
def demo(
    *,
    db: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Write the journal here, and keep it.",
            show_default="a temporary one",
        ),
    ] = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Play about fifty sample conversations, kill the worker, and account for every event.

    The users send messages while their agents answer, and each of the five policies has a fifth of
    the conversations. A turn that a kill cuts off ends as interrupted. Long conversations are
    condensed. No network is needed.
    """
    policies = cycle(_DEMO_POLICIES)
    parts = [
        _Part(f"{Path(file).stem}-{one.item}", one, next(policies))
        for file, content in read_samples().items()
        for one in parse_recorded(content, file).conversations
    ]
    plan = _Plan(_DEMO_OVERLAP, _DEMO_KILLS, _DEMO_PACE_S, _DEMO_VIEW_EVENTS_MAX, seed, as_json)
    if _names_taken(db):
        fail(UNUSABLE, f"{db} holds conversations already; name another file")
    if db is not None:
        _play(parts, db, plan, problems=(), is_kept=True)
    with temporary_folder() as folder:
        _play(parts, folder / "demo.db", plan, problems=(), is_kept=False)


@app.command()
@interrupted_by_signals()
def replay(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="JSON lists or JSON Lines of conversations in the OpenAI chat format; each is a "
            "list of messages, or an object that has them under `messages` or `traj`.",
        ),
    ],
    db: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="The journal to write; what it holds already stays as it is.",
            show_default="a temporary one",
        ),
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Play only the first N.", show_default="all"),
    ] = None,
    overlap: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Share of messages sent while the one before is still being answered.",
        ),
    ] = 0.0,
    policy: Annotated[
        Policy, typer.Option(help="What happens to a message that comes while a turn runs.")
    ] = Policy.QUEUE,
    kills: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often to kill the worker with SIGKILL.")
    ] = 0,
    pace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            callback=finite,
            help="How long each step of an agent takes.",
        ),
    ] = 0.0,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Play recorded conversations; each has one user, and an agent that answers as recorded.

    A conversation that cannot be used is reported by file, item and message; the others are played.

    Exit status: 0, every promise held; 1, one was broken, or the worker failed; 2, some of the
    input could not be used; 130, stopped by Ctrl-C.
    """
    found: list[tuple[int, RecordedConversation]] = []
    problems: list[InputProblem] = []
    for number, file in enumerate(files):
        name = printable(str(file))
        try:
            content = file.read_bytes()
        except OSError as error:
            problems.append(InputProblem(file=name, found=f"cannot be read: {error.strerror}"))
            continue
        parsed = parse_recorded(content, name)
        problems.extend(parsed.problems)
        for one in parsed.conversations:
            if (longest := max(len(each.content) for each in one.exchanges)) > TEXT_LENGTH_MAX:
                # An import takes it, but no user can send it.
                found_long = (
                    f"a user message of {longest:,} characters; {TEXT_LENGTH_MAX:,} may be sent"
                )
                problems.append(InputProblem(file=name, item=one.item, found=found_long))
            else:
                found.append((number, one))
    names = conversation_names(found[:conversations], files, _names_taken(db))
    parts = [
        _Part(name, one, _ON_OVERLAP[policy])
        for name, (_, one) in zip(names, found[:conversations], strict=True)
    ]
    plan = _Plan(overlap, kills, pace, _REPLAY_VIEW_EVENTS_MAX, seed, as_json)
    if db is not None:
        _play(parts, db, plan, problems=problems, is_kept=True)
    with temporary_folder() as folder:
        _play(parts, folder / "replay.db", plan, problems=problems, is_kept=False)


app.command()(stress)
app.command()(simulate)
app.command()(serve)
app.command()(inspect)
app.command()(token)
app.command()(torture)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


# --- playing -------------------------------------------------------------------------------------


def _play(
    parts: Sequence[_Part],
    db: Path,
    plan: _Plan,
    *,
    problems: Sequence[InputProblem],
    is_kept: bool,
) -> NoReturn:
    """Play the parts on a journal, audit it, print the report, and exit."""
    errors = Console(stderr=True, highlight=False)
    if problems:
        print_list(errors, "this cannot be used:", [str(problem) for problem in problems])
    if not parts:
        if plan.as_json:
            print_json(empty_report(problems).as_json())
        fail(UNUSABLE, "there is nothing to play")
    ports = Ports()
    seed = ports.random.randrange(SEEDS) if plan.seed is None else plan.seed
    ports.random.seed(seed)
    users = plan_users(parts, overlap=plan.overlap, random=ports.random)
    messages = sum(len(part.recorded.exchanges) for part in parts)
    display = Display(errors, messages)
    replay = Replay(
        start=Start(
            db=str(db),
            is_own_journal=not db.exists(),
            started_at=datetime.fromtimestamp(ports.now(), UTC),
            pace_s=plan.pace_s,
            view_events_max=plan.view_events_max,
            parts=tuple(user.part for user in users),
        ),
        users=users,
        planned_kills=plan_kills(plan.kills, users, ports.random),
        ports=ports,
        changed=display.changed,
        worker=WORKER,
    )
    stopped = None
    status = None
    played = f"{many(len(parts), 'conversation')}, {many(messages, 'chat message')}"
    errors.print(Text(f"{played}, seed {seed}"))
    with display:
        try:
            anyio.run(replay.play)
        except KeyboardInterrupt:
            stopped, status = how_stopped(), INTERRUPTED
        except WorkerLost as lost:
            stopped = str(lost)
    if stopped is not None:
        errors.print(Text(f"turnkeeper: {printable(stopped)}"), soft_wrap=True)
        if not replay.acknowledged and not replay.logged:
            fail(status or BROKEN, "nothing had been acknowledged")
    report = _audited(replay, db, seed, stopped, problems)
    if plan.as_json:
        print_json(report.as_json())
    else:
        print_report(Console(highlight=False), report)
    if is_kept and report.counts["events"] and errors.is_terminal:
        errors.print(Text(f"look inside with: turnkeeper show {quote(str(db))}"), soft_wrap=True)
    raise typer.Exit(report.exit_status if report.broken or status is None else status)


def _audited(
    replay: Replay, db: Path, seed: int, stopped: str | None, problems: Sequence[InputProblem]
) -> Report:
    async def audit() -> Report:
        async with SQLiteJournal(db, read_only=True) as journal:
            return await make_report(replay, journal, seed=seed, stopped=stopped, problems=problems)

    try:
        return anyio.run(audit)
    except (JournalRefused, JournalUnavailable) as error:
        fail(BROKEN, f"the acknowledged events cannot be checked: {error}")


def _names_taken(db: Path | None) -> frozenset[str]:
    """Return the names of the conversations that a journal holds already.

    Exits with a message if the journal cannot be written.
    """
    if db is not None and was_url(db):
        fail(UNUSABLE, "--db takes the path of a file, and not a URL; nothing was done")
    if db is not None and printable(str(db)) != str(db):
        fail(UNUSABLE, f"{printable(str(db))} cannot be the name of a journal")
    if db is not None and not db.parent.is_dir():
        fail(UNUSABLE, f"{db} cannot be written: there is no folder {db.parent}")
    if db is None or not db.exists():
        return frozenset()
    with told(str(db)):
        return frozenset(info.conversation_id for info in anyio.run(list_to_write, str(db)))
