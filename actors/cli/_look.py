"""The command `show`: lists a journal's conversations, or prints one: whole, in part, or as it was.

It takes no ownership, and works beside the process that writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import anyio
import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import TurnkeeperError

from ..core.steps import Step, step_of
from ..events import ActionEvent, AgentMessageEvent, LoggedEvent
from . import _journal_jobs as jobs
from ._asking import SCHEMA, Db, Schema, Yes, confirm, refuse_no_folder, refuse_odd, say, told
from ._display import many, printable
from ._exits import BROKEN, UNUSABLE, AsJson, fail, print_json
from ._show import (
    conversation_json,
    infos_json,
    is_about,
    print_chat,
    print_infos,
    print_rejection,
    print_step,
    rejection_json,
    said_by,
    step_json,
    view_json,
)
from ._timeline import timeline

__all__ = ["show"]

_COMPLETED_MAX = 200


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of conversations for a shell's completion; on an error, return none."""
    db = ctx.params.get("db")
    if not isinstance(db, str) or jobs.is_url(db):
        return []
    try:
        infos = anyio.run(jobs.list_all, db, "")
    except (TurnkeeperError, OSError):
        return []
    names = [info.conversation_id for info in infos]
    return [name for name in names if name.startswith(incomplete)][:_COMPLETED_MAX]


class _Choice(NamedTuple):
    """The part of a log that is asked for."""

    at: int | None
    match: str | None
    limit: int | None
    tail: int | None

    def of(self, log: Sequence[LoggedEvent]) -> Sequence[LoggedEvent]:
        """Return the events of this part."""
        found = log[: self.at]
        if self.match is not None:
            word = self.match.casefold()
            found = [
                logged
                for logged in found
                if word in "\n".join(said_by(logged.event, is_whole=True)[1:]).casefold()
            ]
        if self.tail is not None:
            return found[max(0, len(found) - self.tail) :]
        return found[: self.limit]


def show(
    db: Db,
    conversation: Annotated[
        str | None,
        typer.Argument(
            metavar="CONVERSATION", help="Print this one as a chat.", autocompletion=_complete
        ),
    ] = None,
    *,
    match: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="List only conversations with this in their name, title, user or labels; of a "
            "chat, print only events with this in their text. Case does not matter.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Only the first N conversations, or events."),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the last N events.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            metavar="SEQ", min=1, help="Print the chat as it was at this seq, the first column."
        ),
    ] = None,
    view: Annotated[
        bool, typer.Option("--view", help="Print the view, which the model sees, not the log.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Print the Nth model call: the view that the model was given, and its answer.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Write a page with the chat and a timeline of its turns; it loads no other file.",
        ),
    ] = None,
    rejected: Annotated[
        bool,
        typer.Option("--rejected", help="Print the events that admission refused, not the log."),
    ] = False,
    schema: Schema = SCHEMA,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """List the conversations of a journal, or print one of them.

    It only reads, and also works while another process writes.
    """
    choice = _Choice(at, match, limit, tail)
    if conversation is None:
        if at or tail or step or html or view or rejected:
            fail(
                UNUSABLE,
                "the list of conversations takes only --match, --limit and --json; for the others, "
                "name a conversation",
            )
        _list(db, schema, choice, as_json=as_json)
        return
    _refuse_together(
        {"--rejected": rejected, "--view": view, "--step": step, "--html": html},
        {"--limit": limit, "--tail": tail},
        {"--at": at, "--step": step, "--rejected": rejected},
    )
    with told(db, schema):
        refuse_odd([conversation], db)
        if rejected:
            _show_rejected(db, schema, conversation, choice, as_json=as_json)
            return
        log, unreadable = anyio.run(jobs.read, db, schema, conversation)
        if at is not None and at > len(log) and unreadable is None:
            fail(UNUSABLE, f"--at is {at}; the log has {many(len(log), 'event')}")
        if step is not None:
            _show_step(db, schema, conversation, log, step, as_json=as_json)
        elif view:
            seq = at or len(log)
            seen = _view(db, schema, conversation, log, seq)
            seen = choice._replace(at=None).of(seen)
            _show_view(conversation, seq, seen, log, as_json=as_json)
        elif html is not None:
            if html.exists():
                confirm(f"{html} is there already, and will be replaced", yes=yes)
            refuse_no_folder(html)
            jobs.write_whole(html, timeline(conversation, choice.of(log)))
            say(f"written to {html}")
        elif not as_json:
            _print_found(choice.of(log), log)
        elif unreadable is None:
            print_json(conversation_json(conversation, choice.of(log)))
    if unreadable is not None:
        fail(BROKEN, unreadable)


def _refuse_together(*groups: dict[str, object]) -> None:
    for group in groups:
        given = [option for option, value in group.items() if value]
        if len(given) > 1:
            fail(UNUSABLE, f"{' and '.join(given)} do not go together")


def _list(db: str, schema: str, choice: _Choice, *, as_json: bool) -> None:
    with told(db, schema):
        infos = anyio.run(jobs.list_all, db, schema)  # also finds what an index hides
        rows = anyio.run(jobs.list_rows, db, schema)
        listed = {row.conversation_id: row for row in rows}
        word = choice.match
        if word is not None:
            infos = [one for one in infos if is_about(one, listed.get(one.conversation_id), word)]
        infos = infos[: choice.limit]
        if as_json:
            print_json(infos_json(infos, rows))
        elif infos:
            print_infos(Console(highlight=False), infos, rows)
        else:
            say("no conversations" if word is None else "no such conversations")


def _show_rejected(
    db: str, schema: str, conversation: str, choice: _Choice, *, as_json: bool
) -> None:
    rejections = anyio.run(jobs.rejections, db, schema, conversation)
    if choice.tail is not None:
        rejections = rejections[max(0, len(rejections) - choice.tail) :]
    rejections = rejections[: choice.limit]
    if as_json:
        print_json({"rejected": [rejection_json(one) for one in rejections]})
        return
    for one in rejections:
        print_rejection(Console(highlight=False), one)
    if not rejections:
        say(f"admission refused no event of {printable(conversation)}")


def _print_found(events: Sequence[LoggedEvent], log: Sequence[LoggedEvent]) -> None:
    """Print events of a log as a chat; say so if there are none."""
    print_chat(Console(highlight=False), events, log)
    if not events:
        say("no such events")


def _view(
    db: str, schema: str, conversation: str, log: Sequence[LoggedEvent], seq: int
) -> Sequence[LoggedEvent]:
    """Return the view at a seq, each event with its seq; 0 for an event that is not in the log."""
    places = {event.id: place for place, event in log}
    events = anyio.run(jobs.read_view, db, schema, conversation, seq)
    return [LoggedEvent(places.get(event.id, 0), event) for event in events]


def _show_view(
    conversation: str,
    seq: int,
    seen: Sequence[LoggedEvent],
    log: Sequence[LoggedEvent],
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json(view_json(conversation, seq, seen))
    else:
        _print_found(seen, log)


def _show_step(
    db: str,
    schema: str,
    conversation: str,
    log: Sequence[LoggedEvent],
    number: int,
    *,
    as_json: bool,
) -> None:
    steps = [step for step in map(step_of, log) if step is not None]
    if number > len(steps):
        fail(UNUSABLE, f"--step is {number}; the log has {many(len(steps), 'model call')}")
    step = steps[number - 1]
    if step.view_seq is None:
        fail(
            UNUSABLE,
            f"step {number} does not say which view its model saw; docs/steps.md says which do",
        )
    seen = _view(db, schema, conversation, log, step.view_seq)
    answer = _answer(log, step, step.view_seq)
    if as_json:
        made = conversation_json(conversation, answer)["events"]
        facts = {**step_json(number, step), "answer": made}
        print_json({**view_json(conversation, step.view_seq, seen), **facts})
        return
    console = Console(highlight=False)
    print_step(console, number, len(steps), step)
    print_chat(console, seen, log)
    if answer:
        console.print(Text("answered", style="bold"))
        print_chat(console, answer, log)


def _answer(log: Sequence[LoggedEvent], step: Step, view_seq: int) -> Sequence[LoggedEvent]:
    """Return the events that hold the answer of a step."""
    return [
        logged
        for logged in log[view_seq : step.seq]
        if isinstance(logged.event, AgentMessageEvent | ActionEvent)
        and logged.event.turn_id == step.turn_id
    ]
