"""The command `stress`: many conversations under load and kills, on a user's own machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import Ports, TurnkeeperError

from ._asking import refuse_parameters, told
from ._crowd import Crowd
from ._display import many, printable
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
    is_given,
    print_json,
    temporary_folder,
)
from ._journal_jobs import list_to_write
from ._protocol import StartStress
from ._replay import WorkerLost
from ._stress_display import StressDisplay, print_stress_report
from ._stress_nodes import USERS, stress_nodes
from ._stress_report import StressReport, can_draw, make_stress_report, page_of
from ._stress_run import STRESS_WORKER, Stress, plan_kills_at
from .stress_worker import is_postgres, open_journal

__all__ = ["stress"]

# The longest pause of the agent, which makes one before each step and one in it: turns overlap.
_PACE_S = 0.1
_VIEW_EVENTS_MAX = 40
_OF_ONE = ("conversations", "senders", "overlap", "rate", "db", "report")
"""The options that cannot be used with several machines."""


class Backend(StrEnum):
    """The event loop that the worker runs on."""

    ASYNCIO = "asyncio"
    TRIO = "trio"


@interrupted_by_signals()
def stress(
    context: typer.Context,
    *,
    conversations: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many conversations to write to.")
    ] = 1_000,
    senders: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many senders each conversation has.")
    ] = 2,
    overlap: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Share of messages that go to a conversation whose turn is running.",
        ),
    ] = 0.3,
    rate: Annotated[
        float,
        typer.Option(
            metavar="N", min=0.01, callback=finite, help="Chat messages a second, in total."
        ),
    ] = 100.0,
    duration: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1.0, callback=finite, help="How long to send."),
    ] = 30.0,
    kills: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often to kill the worker with SIGKILL.")
    ] = 3,
    db: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|URL",
            help="The journal to write: a SQLite file, or a PostgreSQL URL; what it holds "
            "already stays as it is.",
            show_default="a temporary file",
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="With --postgres: play this many machines on one database. They are killed, "
            "stopped past their lease, restarted in turn, and cut off from each other and from "
            "the database.",
        ),
    ] = 1,
    postgres: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="With --nodes: the database; a new schema is created in it."
        ),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="With --nodes: a command that restarts the database, such as `pg_ctl restart -m "
            "immediate -D …`; it is run once.",
        ),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="PYTHON",
            help="With --nodes: the Python of an environment with another version of turnkeeper; "
            "the last machine runs it.",
        ),
    ] = None,
    backend: Annotated[Backend, typer.Option(help="The worker's event loop.")] = Backend.ASYNCIO,
    seed: Seed = None,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE.html", help="Write a page with plots."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Load many conversations, kill their process again and again, account for every message.

    The agents are scripted and call no model. Each conversation has one overlap policy: queue,
    interrupt, steer, rollback or reject. A message that was not acknowledged is sent again. At the
    end every log is compared with the acknowledgements.

    With --nodes, users speak to several machines over HTTP, as in `turnkeeper torture`, while
    eleven kinds of failure happen: machines are killed --kills times, and each other kind happens
    once.

    Exit status: 0, every promise held; 1, one was broken, or the worker failed; 2, the arguments
    are invalid; 130, stopped by Ctrl-C.
    """
    if (nodes > 1) is not (postgres is not None):
        fail(UNUSABLE, "--nodes 2 or more and --postgres go together; give both")
    given = [name for name in _OF_ONE if is_given(context, name)]
    if postgres is None and (restart is not None or beside is not None):
        fail(UNUSABLE, "--restart and --beside are for several machines; give --nodes too")
    if postgres is not None and given:
        fail(
            UNUSABLE,
            f"--{given[0]} is for one machine: with --nodes, {USERS} users write as fast as they "
            "are answered, into --postgres",
        )
    if postgres is not None:
        stress_nodes(
            nodes,
            postgres,
            duration=duration,
            kills=kills,
            backend=backend.value,
            seed=seed,
            as_json=as_json,
            restart=restart,
            beside=beside,
        )
    _check_usable(db, backend, report)
    ports = Ports()
    seed = ports.random.randrange(SEEDS) if seed is None else seed
    ports.random.seed(seed)
    started_at = datetime.fromtimestamp(ports.now(), UTC)
    # Unique to this run, even if other runs use the same journal.
    run = f"stress-{started_at:%Y%m%dT%H%M%S}-{seed}"
    options = {
        "conversations asked for": conversations,
        "senders": senders,
        "overlap": overlap,
        "rate": rate,
        "duration": duration,
        "kills asked for": kills,
        "backend": backend.value,
        "journal": "PostgreSQL" if db is not None and is_postgres(db) else "SQLite",
    }
    errors = Console(stderr=True, highlight=False)
    errors.print(Text(f"{many(conversations, 'conversation')} for {duration:g} s, seed {seed}"))
    with ExitStack() as stack:
        is_kept = db is not None
        if db is None:
            db = str(stack.enter_context(temporary_folder()) / "stress.db")
        crowd = Crowd(
            [f"{run}-{n}" for n in range(conversations)],
            senders=senders,
            overlap=overlap,
            rate=rate,
            duration_s=duration,
            random=ports.random,
        )
        display = stack.enter_context(StressDisplay(errors, duration))
        running = Stress(
            start=StartStress(
                db=db,
                is_own_journal=not is_postgres(db) and not Path(db).exists(),
                seed=seed,
                pace_s=_PACE_S,
                view_events_max=_VIEW_EVENTS_MAX,
            ),
            crowd=crowd,
            planned_kills=plan_kills_at(kills, duration, ports.random),
            ports=ports,
            changed=display.changed,
            worker=(*STRESS_WORKER, backend.value),
        )
        made, status = _run(running, display, errors, options)
    if report is not None:
        report.write_text(page_of(made), encoding="utf-8")
        errors.print(Text(f"the page is {report}"), soft_wrap=True)
    if as_json:
        print_json(made.as_json())
    else:
        print_stress_report(Console(highlight=False), made)
    if is_kept and not is_postgres(db) and made.account.counts["events"]:
        errors.print(Text(f"look inside with: turnkeeper show {quote(str(db))}"), soft_wrap=True)
    raise typer.Exit(made.account.exit_status if made.account.broken or not status else status)


def _check_usable(db: str | None, backend: Backend, report: Path | None) -> None:
    """Exit with a message, before anything runs, if the arguments cannot be used."""
    if report is not None and not can_draw():
        fail(UNUSABLE, "--report needs its extra: pip install 'turnkeeper[report]'")
    if report is not None and not report.parent.is_dir():
        fail(UNUSABLE, f"{report} cannot be written: there is no folder {report.parent}")
    if backend is Backend.TRIO and find_spec("trio") is None:
        fail(UNUSABLE, "--backend trio needs trio: pip install trio")
    if db is None:
        return
    refuse_parameters(db)
    if is_postgres(db):
        if find_spec("psycopg") is None:
            fail(
                UNUSABLE, "a PostgreSQL journal needs its extra: pip install 'turnkeeper[postgres]'"
            )
    elif printable(db) != db:
        fail(UNUSABLE, f"{printable(db)} cannot be the name of a journal")
    elif not Path(db).parent.is_dir():
        fail(UNUSABLE, f"{db} cannot be written: there is no folder {Path(db).parent}")
    elif Path(db).exists() and not Path(db).is_file():
        fail(UNUSABLE, f"{db} cannot be written: it is not a regular file")
    elif Path(db).exists():
        with told(db):
            anyio.run(list_to_write, db)  # raises if it is no journal, or cannot be written


def _run(
    stress: Stress, display: StressDisplay, errors: Console, options: Mapping[str, object]
) -> tuple[StressReport, int]:
    """Run it, audit its journal, and report why it stopped if it did."""
    stopped, status = None, 0
    try:
        anyio.run(stress.run)
    except KeyboardInterrupt:
        stopped, status = how_stopped(), INTERRUPTED
    except WorkerLost as lost:
        stopped, status = str(lost), BROKEN
    if stopped is not None:
        errors.print(Text(f"turnkeeper: {printable(stopped)}"), soft_wrap=True)
        if not stress.crowd.acknowledged:
            fail(status, "nothing had been acknowledged")

    async def audit() -> StressReport:
        async with open_journal(stress.start.db, read_only=True) as journal:
            return await make_stress_report(
                stress, journal, options=options, stopped=stopped, checked=display.checked
            )

    try:
        return anyio.run(audit), status
    except TurnkeeperError as error:
        fail(BROKEN, f"the acknowledged events cannot be checked: {error}")
