"""The commands about a journal: `show`, `export`, `import`, `verify`, `repair`, `vacuum`, `delete`.

A journal is the path of a file or the URL of a PostgreSQL database. Commands that only read take no
ownership, and work beside the process that writes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import Ports, TurnkeeperError

from ..errors import ConversationNotFound, CorruptLog
from ..journal import Deletion
from ..journals.files import Problem, check_event, check_folds, check_listing
from ..journals.files import repair as repair_file
from ..journals.files import verify as verify_file
from . import _journal_jobs as jobs
from ._display import print_list, printable
from ._exits import BROKEN, INTERRUPTED, UNUSABLE, AsJson, fail, print_json
from ._journal_jobs import is_url, progress
from ._naming import is_text
from ._show import (
    conversation_json,
    infos_json,
    print_event,
    print_infos,
    print_rejection,
    rejection_json,
)

__all__ = ["COMMANDS"]

_DAY_S = 86_400
_PASSWORD = re.compile("//[^/@]*@")

Db = Annotated[
    str, typer.Argument(metavar="DB", help="An SQLite file, or the URL of a PostgreSQL database.")
]
File = Annotated[str, typer.Argument(metavar="DB", help="An SQLite file.")]
Schema = Annotated[str, typer.Option(help="The schema of the journal in a PostgreSQL database.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def show(
    db: Db,
    conversation: Annotated[
        str | None, typer.Argument(metavar="CONVERSATION", help="Print this one as a chat.")
    ] = None,
    *,
    rejected: Annotated[
        bool, typer.Option(help="Print the events that admission refused instead.")
    ] = False,
    schema: Schema = "turnkeeper",
    as_json: AsJson = False,
) -> None:
    """List the conversations of a journal, or print one of them.

    Takes no ownership, so it also works while another process writes.
    """
    console = Console(highlight=False)
    with _told(db):
        if conversation is None:
            infos = anyio.run(jobs.list_all, db, schema)  # it also finds what an index hides
            rows = anyio.run(jobs.list_rows, db, schema)
            if as_json:
                print_json(infos_json(infos, rows))
            else:
                print_infos(console, infos, rows)
            return
        _refuse_odd([conversation], db)
        if rejected:
            rejections = anyio.run(jobs.rejections, db, schema, conversation)
            if as_json:
                print_json({"rejected": [rejection_json(one) for one in rejections]})
            for one in () if as_json else rejections:
                print_rejection(console, one)
            return
        log, unreadable = anyio.run(jobs.read, db, schema, conversation)
    if as_json and unreadable is None:
        print_json(conversation_json(conversation, log))
    elif not as_json:
        for logged in log:
            print_event(console, logged)
    if unreadable is not None:
        fail(BROKEN, unreadable)


def export(
    db: Db,
    conversations: Annotated[
        list[str] | None, typer.Argument(metavar="[CONVERSATION]…", show_default="all")
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write.", show_default="standard output"),
    ] = None,
    schema: Schema = "turnkeeper",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Write conversations as JSON Lines, each event byte for byte; also while they are in use.

    `import` takes them in again. A file is there whole or not at all.
    """
    names = list(dict.fromkeys(conversations or ()))
    with _told(db):
        _refuse_odd(names, db)
        if output is None:
            anyio.run(jobs.export, db, schema, names, sys.stdout.write)
            sys.stdout.flush()
            return
        if output.is_file():
            if not is_url(db) and Path(db).is_file() and output.samefile(db):
                fail(UNUSABLE, f"{output} is the journal itself; nothing was done")
            _confirm(f"{output} is there already, and will be replaced", yes=yes)
        count, events = anyio.run(jobs.export_to, db, schema, names, output)
    if as_json:
        print_json({"file": str(output), "conversations": count, "events": events})
    else:
        _say(f"{_many(count, 'conversation')}, {_many(events, 'event')}, written to {output}")


def import_(
    db: Db,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="Exports, or chats in the OpenAI format (JSON lists or JSON Lines).",
        ),
    ],
    *,
    keep_owners: Annotated[
        bool, typer.Option(help="Keep the users that the conversations of an export belong to.")
    ] = False,
    schema: Schema = "turnkeeper",
    as_json: AsJson = False,
) -> None:
    """Bring conversations into a journal, which is created if it does not exist.

    An export keeps its conversations' names. Run an interrupted import again, and it continues.
    Chats in the OpenAI format are named after their file and their position in it.

    Exit status: 0, all is imported; 2, some of it could not be used, and the rest is imported.
    """
    with _told(db):
        imported = anyio.run(partial(jobs.import_all, keep_owners=keep_owners), db, schema, files)
    if imported.problems:
        errors = Console(stderr=True, highlight=False)
        print_list(errors, "not imported:", imported.problems)
    if as_json:
        print_json(
            {
                "conversations": imported.conversations,
                "events": imported.events,
                "problems": imported.problems,
            }
        )
    else:
        _say(
            f"{_many(imported.conversations, 'conversation')} imported, "
            f"{_many(imported.events, 'new event')}"
        )
    if imported.problems:
        raise typer.Exit(UNUSABLE)


def verify(db: Db, *, schema: Schema = "turnkeeper", as_json: AsJson = False) -> None:
    """Check all of a journal: checksums, chains, ids, events, and that snapshots are the folds.

    Runs beside the processes that use the journal, and changes nothing.

    Exit status: 0, all is as it was written; 1, it is not; 2, it cannot be opened at all.
    """
    with _told(db), progress("conversations") as on_progress:
        if is_url(db):
            report = anyio.run(jobs.verify_logs, db, schema, on_progress)
        else:
            report = verify_file(
                db,
                check_snapshot=check_folds,
                check_record=check_event,
                check_listing=check_listing,
                on_progress=on_progress,
            )
    if as_json:
        print_json(
            {
                "conversations": report.conversations,
                "events": report.records,
                "problems": [
                    {"conversation": one.conversation_id, "seq": one.seq, "found": one.found}
                    for one in report.problems
                ],
                "stale": report.stale,
            }
        )
    else:
        _say(f"{_many(report.conversations, 'conversation')}, {_many(report.records, 'event')}")
        console = Console(highlight=False)
        if report.problems:
            title = f"NOT as written, {_many(len(report.problems), 'time')}:"
            print_list(console, title, [_problem_line(one) for one in report.problems])
            if not is_url(db):
                _say(f"repair it with: turnkeeper repair {db}")
        else:
            console.print(Text("everything is as it was written", style="green"))
        if report.stale:
            _say(
                f"lists show {_many(len(report.stale), 'conversation')} as of earlier; bring them "
                f"up to date with: turnkeeper reindex {_PASSWORD.sub('//', db)}"
            )
    if report.problems:
        raise typer.Exit(BROKEN)


def reindex(db: Db, *, schema: Schema = "turnkeeper", as_json: AsJson = False) -> None:
    """Compute again what lists show of conversations whose logs have gone on since.

    Runs beside the processes that use a database; needs a file to itself. The next owner of a
    conversation does the same for it.

    Exit status: 0, all are up to date; 1, some logs cannot be read.
    """
    with _told(db):
        anyio.run(jobs.list_all, db, schema)  # raises if it is no journal, and creates nothing
        written, unreadable = anyio.run(jobs.reindex, db, schema)
    if as_json:
        print_json({"written": written, "unreadable": unreadable})
    else:
        _say(f"{_many(written, 'conversation')} brought up to date")
    if unreadable:
        if not as_json:
            names = [printable(name) for name in unreadable]
            print_list(Console(stderr=True, highlight=False), "cannot be read:", names)
        raise typer.Exit(BROKEN)


def repair(db: File, *, as_json: AsJson = False, yes: Yes = False) -> None:
    """Repair a damaged journal file: keep every whole record, set the rest aside.

    Needs the file to itself. Builds a new file beside the old one, which stays as a backup. After
    a kill, run it again.
    """
    _refuse_url(db)
    with _told(db):
        if Path(db).exists():
            _confirm(f"a new file will take the place of {db}, which stays as a backup", yes=yes)
        with progress("records") as on_progress:
            done = repair_file(db, on_progress=on_progress)
    if as_json:
        print_json(
            {"repaired": False}
            if done is None
            else {
                "repaired": True,
                "conversations": done.conversations,
                "events": done.records,
                "cut": [
                    {
                        "conversation": loss.conversation_id,
                        "ends_at": loss.head,
                        "set_aside": loss.set_aside,
                    }
                    for loss in done.losses
                ],
                "set_aside": done.set_aside,
                "backup": str(done.backup),
                "aside": str(done.aside),
            }
        )
        return
    if done is None:
        _say("nothing to repair: everything is as it was written")
        return
    _say(f"{_many(done.conversations, 'conversation')} and {_many(done.records, 'event')} are kept")
    if done.losses:
        lines = [
            f"{loss.conversation_id}: ends at seq {loss.head} now, {loss.set_aside} set aside"
            for loss in done.losses
        ]
        print_list(Console(highlight=False), "cut at the first damaged record:", lines)
    _say(f"the file as it was: {done.backup}")
    _say(f"set aside ({_many(done.set_aside, 'row')}): {done.aside}")


def vacuum(db: File, *, as_json: AsJson = False) -> None:
    """Return the space of deleted records to the disk. Needs the file to itself."""
    _refuse_url(db)
    with _told(db):
        anyio.run(jobs.list_all, db, "")  # raises if it is no journal, and creates nothing
        freed = anyio.run(jobs.vacuum, db)
    if as_json:
        print_json({"bytes": freed})
    else:
        _say(f"{freed:,} bytes freed")


def delete(
    db: Db,
    conversations: Annotated[
        list[str] | None, typer.Argument(metavar="[CONVERSATION]…", show_default=False)
    ] = None,
    *,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0.0,
            help="Delete all conversations without a new record for this many days.",
            show_default=False,
        ),
    ] = None,
    schema: Schema = "turnkeeper",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Delete conversations, by name or by age; records that forks need stay, and are reported.

    In a file, the others are overwritten. A process that has the file open deletes with
    `Conversations.delete` instead.

    Exit status: 0, all are deleted; 2, some could not be.
    """
    if not conversations and older_than is None:
        fail(UNUSABLE, "nothing to delete: name conversations, or use --older-than")
    with _told(db):
        names = list(dict.fromkeys(conversations or ()))
        _refuse_odd(names, db)
        infos = {one.conversation_id: one for one in anyio.run(jobs.list_all, db, schema)}
        if older_than is not None:
            before = Ports().now() - older_than * _DAY_S
            names = [
                name
                for name in names or infos
                if name not in infos or infos[name].updated_at < before
            ]
        _refuse_missing([name for name in names if name not in infos], db)
        if names:
            events = sum(infos[name].head for name in names)
            scope = f"{_many(len(names), 'conversation')} with {_many(events, 'event')}"
            _confirm(f"{scope} will be deleted for good", yes=yes)
        done, problems = anyio.run(jobs.delete_all, db, schema, [infos[name] for name in names])
    if as_json:
        print_json(
            {
                "deleted": [
                    {
                        "conversation": name,
                        "kept": one.kept,
                        "forks": list(one.forks),
                        "is_erased": one.is_erased,
                    }
                    for name, one in done.items()
                ],
                "problems": problems,
            }
        )
    else:
        _print_deleted(done, is_file=not is_url(db))
    if problems:
        print_list(Console(stderr=True, highlight=False), "not deleted:", problems)
        raise typer.Exit(UNUSABLE)


COMMANDS: Mapping[str, Callable[..., None]] = {
    "show": show,
    "export": export,
    "import": import_,
    "verify": verify,
    "reindex": reindex,
    "repair": repair,
    "vacuum": vacuum,
    "delete": delete,
}


# --- questions and answers ------------------------------------------------------------------------


@contextmanager
def _told(db: str) -> Iterator[None]:
    """Turn errors into one line on standard error and an exit status."""
    try:
        yield
    except ConversationNotFound as error:
        _refuse_missing([error.conversation_id], db)
    except CorruptLog as error:
        fail(BROKEN, str(error))
    except TurnkeeperError as error:
        fail(UNUSABLE, " ".join(str(error).split()))
    except BrokenPipeError:
        _forget_output()  # the reader of the pipe has left
        raise typer.Exit(BROKEN) from None
    except OSError as error:
        _forget_output()
        fail(UNUSABLE, f"{error.filename or 'output'}: {error.strerror}; the rest was not written")
    except KeyboardInterrupt:
        fail(INTERRUPTED, "stopped by Ctrl-C")


def _forget_output() -> None:
    """Discard buffered output, so that Python does not try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse_url(db: str) -> None:
    if is_url(db):
        fail(UNUSABLE, "this command is for files; use the server's own tools for a database")


def _refuse_odd(names: Sequence[str], db: str) -> None:
    _refuse_missing([name for name in names if not is_text(name)], db)


def _refuse_missing(names: Sequence[str], db: str) -> None:
    if names:
        place = _PASSWORD.sub("//", db)
        listed = ", ".join(printable(name) for name in names)
        fail(
            UNUSABLE,
            f"there is no conversation {listed} in {place}; `turnkeeper show {place}` lists the "
            "existing ones",
        )


def _confirm(consequence: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        fail(UNUSABLE, f"{consequence}; nothing was done; pass --yes to do it")
    if not typer.confirm(f"{consequence}. Go on?", err=True):
        fail(UNUSABLE, "nothing was done")


def _print_deleted(deleted: Mapping[str, Deletion], *, is_file: bool) -> None:
    for name, deletion in deleted.items():
        if deletion.kept:
            forks = ", ".join(printable(fork) for fork in deletion.forks)
            _say(f"{printable(name)}: {_many(deletion.kept, 'event')} stay for {forks}")
        if is_file and not deletion.is_erased:
            _say(f"{printable(name)}: a reader keeps its text in the write-ahead log; vacuum later")
    _say(f"{_many(len(deleted), 'conversation')} deleted")


def _problem_line(problem: Problem) -> str:
    place = "the file" if problem.conversation_id is None else problem.conversation_id
    return f"{place}{f', seq {problem.seq}' if problem.seq else ''}: {problem.found}"


def _say(line: str) -> None:
    Console(highlight=False).print(Text(line), soft_wrap=True)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
