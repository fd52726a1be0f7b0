"""The commands about a journal, from `export` to `delete`; `show` is in `_look.py`.

A journal is the path of a file or the URL of a PostgreSQL database. Commands that only read take no
ownership, and work beside the process that writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import Ports, TurnkeeperError

from ..errors import JournalRefused
from ..events import LoggedEvent
from ..journal import Deletion
from ..journals.files import Problem, check_event, check_folds, check_listing
from ..journals.files import repair as repair_file
from ..journals.files import verify as verify_file
from ..journals.sqlite.schema import real_path, refuse_bad_log, refuse_stranger
from ..recordings.exporting import openai_line, openhands_files
from . import _journal_jobs as jobs
from ._asking import (
    SCHEMA,
    Db,
    Schema,
    Yes,
    confirm,
    refuse_missing,
    refuse_no_folder,
    refuse_odd,
    refuse_url,
    say,
    told,
    without_password,
)
from ._display import many, print_list, printable
from ._exits import (
    BROKEN,
    INTERRUPTED,
    UNUSABLE,
    AsJson,
    fail,
    finite,
    for_programs,
    how_stopped,
    interrupted_by_signals,
    print_json,
)
from ._journal_jobs import is_url, progress
from ._look import show

__all__ = ["COMMANDS"]

_DAY_S = 86_400


class Source(StrEnum):
    """A program that conversations come from."""

    OPENAI_AGENTS = "openai-agents"
    OPENHANDS = "openhands"
    HERMES = "hermes"
    OPENAI = "openai"


class Target(StrEnum):
    """A format of another program that conversations are written in."""

    OPENAI = "openai"
    OPENHANDS = "openhands"


File = Annotated[str, typer.Argument(metavar="DB", help="A SQLite file.")]


def export(
    db: Db,
    conversations: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONVERSATION", help="Write only these.", show_default="all"),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write.",
            show_default="standard output",
        ),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option(
            "--to",
            help="Write the chats in the format of another program, which cannot hold every event: "
            "`openai`, JSON Lines of chats; `openhands`, a folder of event files for each "
            "conversation, in the folder --output.",
            show_default="turnkeeper's own",
        ),
    ] = None,
    schema: Schema = SCHEMA,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Write conversations as JSON Lines, each event byte for byte as it is stored.

    `import` reads such a file. It also works while another process writes the journal. If an export
    fails, it leaves no file.
    """
    names = list(dict.fromkeys(conversations or ()))
    if output is None and sys.stdout is None:
        fail(UNUSABLE, "standard output is closed; name a file with --output")
    with told(db, schema):
        refuse_odd(names, db)
        if target is Target.OPENHANDS:
            _export_folders(db, schema, names, output, as_json=as_json)
            return
        if target is Target.OPENAI:
            chats: list[str] = []
            counts = anyio.run(
                jobs.export_chats,
                db,
                schema,
                names,
                lambda name, log: chats.append(openai_line(name, log)),
            )
            if output is None:
                for_programs()
                sys.stdout.writelines(chats)
                return
            _check_output(db, output, yes=yes)
            jobs.write_whole(output, "".join(chats))
            _say_written(output, counts, as_json=as_json)
            return
        if output is None:
            for_programs()
            anyio.run(jobs.export, db, schema, names, sys.stdout.write)
            sys.stdout.flush()
            return
        _check_output(db, output, yes=yes)
        counts = anyio.run(jobs.export_to, db, schema, names, output)
    _say_written(output, counts, as_json=as_json)


def _check_output(db: str, output: Path, *, yes: bool) -> None:
    if output.is_dir():
        fail(UNUSABLE, f"{output} is a folder; name a file with --output")
    if output.is_file():
        if not is_url(db) and Path(db).is_file() and output.samefile(db):
            fail(UNUSABLE, f"{output} is the journal itself; nothing was done")
        confirm(f"{output} is there already, and will be replaced", yes=yes)
    refuse_no_folder(output)


def _say_written(output: Path, counts: tuple[int, int], *, as_json: bool) -> None:
    count, events = counts
    if as_json:
        print_json({"file": str(output), "conversations": count, "events": events})
    else:
        say(f"{many(count, 'conversation')}, {many(events, 'event')}, written to {output}")


def _export_folders(
    db: str, schema: str, names: Sequence[str], output: Path | None, *, as_json: bool
) -> None:
    """Write a folder for each conversation, into a new or an empty one."""
    if output is None:
        fail(UNUSABLE, "--to openhands writes folders; name one with --output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        fail(UNUSABLE, f"{output} is there already, and not an empty folder; nothing was done")
    files: dict[str, str] = {}

    def take(name: str, log: Sequence[LoggedEvent]) -> None:
        files.update(openhands_files(name, log))

    counts = anyio.run(jobs.export_chats, db, schema, names, take)
    for place, content in files.items():
        file = output / place
        file.parent.mkdir(parents=True, exist_ok=True)
        jobs.write_whole(file, content)
    _say_written(output, counts, as_json=as_json)


def import_(
    db: Db,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Exports, or chats in the OpenAI format (JSON lists or JSON Lines); with --from, "
            "databases and folders of that program.",
        ),
    ],
    *,
    source: Annotated[
        Source | None,
        typer.Option(
            "--from",
            help="The program that wrote the files.",
            show_default="by each file's first line",
        ),
    ] = None,
    keep_users: Annotated[
        bool,
        typer.Option(
            "--keep-users", help="Keep the users that the conversations of an export belong to."
        ),
    ] = False,
    schema: Schema = SCHEMA,
    as_json: AsJson = False,
) -> None:
    """Bring conversations into a journal, which is created if it does not exist.

    Conversations keep their names; a chat without one is named after its file and its position
    there. If an import is interrupted, run it again: it continues.

    If an event of an export cannot be read, it is imported as it is, and named: it may be damaged
    in the journal that was exported.

    Exit status: 0, everything is imported; 1, everything is imported, and events of it cannot be
    read; 2, some of it could not be used, and the rest is imported.
    """
    with told(db, schema):
        if jobs.is_other_file(db):
            found = f"{db} is no journal: the first argument is the journal to import into"
            fail(UNUSABLE, printable(f"{found}; nothing was done"))
        run = partial(jobs.import_all, keep_users=keep_users, source=source and source.value)
        imported = jobs.ImportResult()
        try:
            anyio.run(run, db, schema, files, imported)
        except TurnkeeperError:
            if imported.events or imported.problems:
                _print_imported(imported, as_json=as_json)
            raise
        except KeyboardInterrupt:
            fail(
                INTERRUPTED,
                f"{how_stopped()}; what had been imported stays; run it again, and it continues",
            )
    _print_imported(imported, as_json=as_json)
    if imported.problems:
        raise typer.Exit(UNUSABLE)
    if imported.unreadable:
        raise typer.Exit(BROKEN)


def verify(db: Db, *, schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Check every record of a journal, and all data derived from the records.

    It checks each record's checksum, its link to the record before it, its ids and its event, and
    that snapshots agree with the log. It runs beside the processes that use the journal, and
    changes nothing.

    Exit status: 0, everything is as it was written; 1, something is damaged; 2, the journal cannot
    be opened.
    """
    with told(db, schema), progress("conversations") as on_progress:
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
        say(f"{many(report.conversations, 'conversation')}, {many(report.records, 'event')}")
        console = Console(highlight=False)
        if report.problems:
            title = f"NOT as written, {many(len(report.problems), 'time')}:"
            print_list(console, title, [_problem_line(one) for one in report.problems])
            if not is_url(db):
                say("if it, or the -wal beside it, was replaced, put both back as they were;")
                say(f"else repair it with: turnkeeper repair {quote(db)}")
        else:
            console.print(Text("everything is as it was written", style="green"))
        if report.stale:
            say(
                f"lists show an old state of {many(len(report.stale), 'conversation')}; update "
                f"them with: turnkeeper reindex {quote(without_password(db))}"
            )
    if report.problems:
        raise typer.Exit(BROKEN)


def reindex(db: Db, *, schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Rewrite the rows of lists that are stale.

    A row is stale if the log has grown since the row was written. The next owner of the
    conversation would rewrite it too. A SQLite file must not be open for writing elsewhere; a
    database may be in use.

    Exit status: 0, all rows are up to date; 1, some logs cannot be read.
    """
    with told(db, schema):
        anyio.run(jobs.list_all, db, schema)  # raises if it is no journal, and creates nothing
        written, unreadable = anyio.run(jobs.reindex, db, schema)
    if as_json:
        print_json({"written": written, "unreadable": unreadable})
    else:
        say(f"{many(written, 'conversation')} brought up to date")
    if unreadable:
        if not as_json:
            names = [printable(name) for name in unreadable]
            print_list(Console(stderr=True, highlight=False), "cannot be read:", names)
        raise typer.Exit(BROKEN)


def repair(db: File, *, as_json: AsJson = False, yes: Yes = False) -> None:
    """Repair a damaged journal file: keep every whole record, set the rest aside.

    No other process may have the file open. The command builds a new file, which replaces the old
    one; the old one stays as a backup. If the command is killed, run it again.
    """
    refuse_url(db)
    done = None
    with told(db):
        refuse_stranger(real_path(db))  # before the user is asked to have the file replaced
        if yes or not _is_whole(db):
            if Path(db).exists():
                consequence = f"a new file will take the place of {db}, which is kept as a backup"
                confirm(consequence, yes=yes)
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
        say("nothing to repair: everything is as it was written")
        return
    say(f"{many(done.conversations, 'conversation')} and {many(done.records, 'event')} are kept")
    if done.losses:
        lines = [
            f"{loss.conversation_id}: ends at seq {loss.head} now, {loss.set_aside} set aside"
            for loss in done.losses
        ]
        print_list(Console(highlight=False), "cut at the first damaged record:", lines)
    say(f"the file as it was: {done.backup}")
    say(f"set aside ({many(done.set_aside, 'row')}): {done.aside}")
    if done.conversations:
        say(f"lists show an old state; update them with: turnkeeper reindex {quote(db)}")


def vacuum(db: File, *, as_json: AsJson = False) -> None:
    """Return the space of deleted records to the disk.

    No other process may have the file open.
    """
    refuse_url(db)
    with told(db):
        anyio.run(jobs.list_all, db, "")  # raises if it is no journal, and creates nothing
        freed = anyio.run(jobs.vacuum, db)
    if as_json:
        print_json({"bytes": freed})
    else:
        say(f"{freed:,} bytes freed")


@interrupted_by_signals()
def delete(
    db: Db,
    conversations: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONVERSATION", help="Delete these.", show_default=False),
    ] = None,
    *,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0.0,
            callback=finite,
            help="Delete only conversations without a new record for this many days; without "
            "names, all of those.",
            show_default=False,
        ),
    ] = None,
    schema: Schema = SCHEMA,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Delete conversations, by name or by age.

    Records that forks need stay, and are reported. In a file, deleted records are overwritten. A
    file must not be open for writing elsewhere: the process that has it open deletes with
    `Conversations.delete`.

    Exit status: 0, all are deleted; 2, some could not be.
    """
    if not conversations and older_than is None:
        fail(UNUSABLE, "nothing to delete; name conversations, or use --older-than")
    with told(db, schema):
        names = list(dict.fromkeys(conversations or ()))
        refuse_odd(names, db)
        infos = {one.conversation_id: one for one in anyio.run(jobs.list_all, db, schema)}
        if older_than is not None:
            before = Ports().now() - older_than * _DAY_S
            names = [
                name
                for name in names or infos
                if name not in infos or infos[name].updated_at < before
            ]
        refuse_missing([name for name in names if name not in infos], db)
        if names:
            events = sum(infos[name].head for name in names)
            scope = f"{many(len(names), 'conversation')} with {many(events, 'event')}"
            confirm(f"{scope} will be deleted for good", yes=yes)
        result = jobs.DeleteResult()
        try:
            anyio.run(jobs.delete_all, db, schema, [infos[name] for name in names], result)
        except (TurnkeeperError, KeyboardInterrupt):
            if result.in_work is not None:
                result.problems.append(
                    f"{result.in_work}: it may be deleted; `turnkeeper show` lists what is left"
                )
            if result.deleted or result.problems:
                _print_deleted(result, is_file=not is_url(db), as_json=as_json)
            raise
    _print_deleted(result, is_file=not is_url(db), as_json=as_json)
    if result.problems:
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


# --- output --------------------------------------------------------------------------------------


def _print_imported(imported: jobs.ImportResult, *, as_json: bool) -> None:
    if imported.problems:
        errors = Console(stderr=True, highlight=False)
        print_list(errors, "not imported:", imported.problems)
    if imported.left_out:
        print_list(Console(stderr=True, highlight=False), "left out:", imported.left_out)
    if imported.unreadable:
        errors = Console(stderr=True, highlight=False)
        print_list(errors, "imported, and cannot be read:", imported.unreadable)
    if as_json:
        print_json(
            {
                "conversations": imported.conversations,
                "events": imported.events,
                "problems": imported.problems,
                "left_out": imported.left_out,
                "unreadable": imported.unreadable,
            }
        )
    else:
        say(
            f"{many(imported.conversations, 'conversation')} imported, "
            f"{many(imported.events, 'new event')}"
        )


def _print_deleted(result: jobs.DeleteResult, *, is_file: bool, as_json: bool) -> None:
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
                    for name, one in result.deleted.items()
                ],
                "problems": result.problems,
            }
        )
    else:
        _say_deleted(result.deleted, is_file=is_file)
    if result.problems:
        title = "not deleted:" if result.in_work is None else "not deleted, or perhaps not:"
        print_list(Console(stderr=True, highlight=False), title, result.problems)


def _say_deleted(deleted: Mapping[str, Deletion], *, is_file: bool) -> None:
    for name, deletion in deleted.items():
        if deletion.kept:
            forks = ", ".join(printable(fork) for fork in deletion.forks)
            say(
                f"{printable(name)}: {many(deletion.kept, 'event')} stay, as these forks begin "
                f"with them: {forks}"
            )
        if is_file and not deletion.is_erased:
            say(
                f"{printable(name)}: some of its text may still be in the file, its search index "
                "or its write-ahead log; run `turnkeeper vacuum` when no other program reads it"
            )
    say(f"{many(len(deleted), 'conversation')} deleted")


def _is_whole(db: str) -> bool:
    """True if a repair would find nothing to do; False, too, if the file cannot be opened."""
    path = real_path(db)  # the write-ahead log lies beside the file, not beside a link to it
    with suppress(JournalRefused), progress("conversations") as on_progress:
        refuse_bad_log(path)
        return not verify_file(path, on_progress=on_progress).problems
    return False


def _problem_line(problem: Problem) -> str:
    place = "the file" if problem.conversation_id is None else problem.conversation_id
    return f"{place}{f', seq {problem.seq}' if problem.seq else ''}: {problem.found}"
