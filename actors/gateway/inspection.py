"""Routes to inspect a log of any length: windows of it, its outline, differences.

The inspector's pages use these routes and the other public ones, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import anyio
from fastapi import APIRouter, Query
from starlette.responses import Response

from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.state import Folded
from ..events import Event, LoggedEvent
from ..journal import READ_BYTES
from ..owner.loading import in_slices
from .faults import PROBLEMS, OwnRoute
from .history import Damage, LogRows, decoded
from .names import SEQ_MAX
from .outline import OutlinedTurn
from .replies import long_reply
from .service import ConversationCaller, Reading
from .wire import Json, brief_json, event_json, logged_json

__all__ = ["inspection", "shown_json"]

inspection = APIRouter(
    prefix="/v1/conversations/{conversation_id}", route_class=OwnRoute, responses=PROBLEMS
)

Brief = Annotated[
    int | None, Query(ge=1, le=100_000, description="Cut longer texts to this many characters.")
]
Place = Annotated[int, Query(ge=0, le=SEQ_MAX)]
TURNS = 16
"""The turns of a slice: they take as long as `SLICE_EVENTS` events."""


@inspection.get("/log")
async def read_log(
    caller: Reading,
    *,
    after: Place = 0,
    limit: Annotated[int, Query(ge=1)] = 100,
    brief: Brief = None,
    kinds: Annotated[
        str, Query(description="Only these kinds, separated by commas.", max_length=1_000)
    ] = "",
) -> Response:
    """Return a window of the log by seq; a record that cannot be read has the reason in `damaged`.

    Pass `next` as `after` to get the next window; it is null at the end of the log. A window ends
    with the event with which its events have 4 MiB, unless `brief` cuts them.
    """
    journal = caller.service.conversations.journal
    head = (await journal.info(caller.conversation_id)).head
    limit = min(limit, caller.service.limits.page_max)
    wanted = frozenset(kinds.split(",")) if kinds else None
    upto = head if wanted is not None else min(head, after + limit)
    rows: list[Json] = []
    held = 0
    async for page in LogRows(journal, caller.conversation_id, after=after, upto=upto):
        for found in (page,) if isinstance(page, Damage) else page:
            if not isinstance(found, Damage) and wanted is not None and found.kind not in wanted:
                continue
            read = found if isinstance(found, Damage) else decoded(caller.conversation_id, found)
            rows.append(_row_json(caller, read, brief))
            after = found.seq
            if brief is None and not isinstance(found, Damage):
                held += len(found.payload)
            if len(rows) == limit or held >= READ_BYTES:
                break
            if len(rows) % SLICE_EVENTS == 0:
                await anyio.lowlevel.checkpoint()
        if len(rows) == limit or held >= READ_BYTES:
            break
    else:
        after = upto
    following = after if after < head else None
    return await long_reply({"head": head, "rows": iter(rows), "next": following})


def _row_json(caller: ConversationCaller, found: LoggedEvent | Damage, brief: int | None) -> Json:
    if isinstance(found, Damage):
        return {"seq": found.seq, "damaged": found.found}
    row = logged_json(found, caller.rename)
    return row if brief is None else {**row, "event": shown_json(caller, found.event, brief)}


@inspection.get("/outline")
async def read_outline(caller: Reading, after: Place = 0) -> Response:
    """Return the kinds of the events after a seq, and the turns that these events belong to.

    `log` has one letter for each event: `a` stands for the first of `kinds`.
    """
    outline = await caller.service.histories.outline(caller.conversation_id)
    turns: dict[str, Json] = {}
    upto = after
    while upto < outline.head:  # other requests may fold the log's next events into it meanwhile
        changed, upto = outline.changed_turns(upto), outline.head
        for count, turn in enumerate(changed, 1):
            turns[turn.turn_id] = _turn_json(turn)
            if count % TURNS == 0:
                await anyio.lowlevel.checkpoint()
    left = [left for left in outline.left if left[2] > after]
    damaged = [damage for damage in outline.damaged if damage[0] > after]
    return await long_reply(
        {
            "head": outline.head,
            "kinds": list(outline.kinds),
            "log": outline.letters(after),
            "turns": iter(turns.values()),
            "waiting": [asdict(message) for message in outline.waiting.values()],
            "left": iter(left),
            "damaged": iter(damaged),
        }
    )


@inspection.get("/bars")
async def read_bars(
    caller: Reading, first: Place = 1, last: Annotated[int, Query(ge=0, le=SEQ_MAX)] = SEQ_MAX
) -> Response:
    """Return the bars of the turns with events from a seq to another: what took time, and when."""
    outline = await caller.service.histories.outline(caller.conversation_id)
    turns = [turn for turn in outline.turns.values() if turn.seq <= last and turn.last_seq >= first]
    bars = {turn.turn_id: {"bars": map(asdict, turn.bars)} for turn in turns}
    return await long_reply({"head": outline.head, "turns": bars})


def _turn_json(turn: OutlinedTurn) -> Json:
    return {
        "turn_id": turn.turn_id,
        "seq": turn.seq,
        "end_seq": turn.end_seq,
        "last_seq": turn.last_seq,
        "from_ms": turn.from_ms,
        "to_ms": turn.to_ms,
        "outcome": turn.outcome,
        "detail": turn.detail,
        "cut_by": turn.cut_by,
        "messages": [asdict(message) for message in turn.messages],
        "steps": turn.steps,
        "calls": turn.calls,
    }


@inspection.get("/difference")
async def read_difference(
    caller: Reading,
    *,
    first: Place,
    last: Place,
    brief: Brief = None,
    limit: Annotated[int, Query(ge=1)] = 1_000,
) -> Response:
    """Return the events that entered the view between two seqs, and those that left it.

    An event that a condensation shortened or replaced is in both lists.
    """
    histories = caller.service.histories
    before = await histories.at(caller.conversation_id, first, parameter="first")
    after = await histories.at(caller.conversation_id, last, parameter="last")
    limit = min(limit, caller.service.limits.page_max)
    entered = await in_slices(_beyond(after, before))
    left = await in_slices(_beyond(before, after))
    return await long_reply(
        {
            "entered": (shown_json(caller, event, brief) for event in entered[:limit]),
            "left": (shown_json(caller, event, brief) for event in left[:limit]),
            "entered_count": len(entered),
            "left_count": len(left),
        }
    )


def _beyond(state: Folded, other: Folded) -> Slices[Sequence[Event]]:
    """Return the events of one view that are missing or different in the other."""
    known: dict[str, Event] = {}
    for count, event in enumerate(other.view, 1):
        known[event.id] = event
        if count % SLICE_EVENTS == 0:
            yield
    found: list[Event] = []
    for count, event in enumerate(state.view, 1):
        if known.get(event.id) != event:
            found.append(event)
        if count % SLICE_EVENTS == 0:
            yield
    return found


def shown_json(caller: ConversationCaller, event: Event, brief: int | None) -> Json:
    """Return an event of a view, with its long texts cut."""
    value = event_json(event, caller.rename)
    return value if brief is None else brief_json(value, brief)
