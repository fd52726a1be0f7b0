"""turnkeeper's own API: messages, events, time travel, and the routes for operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal, LiteralString, TypeAlias

import anyio
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from turnkeeper.runtime import ActorState, Tree, TurnkeeperError

from ..conversations.conversation import Conversation
from ..conversations.turn import Turn, TurnEnd
from ..core.commands import OnOverlap
from ..core.listing import ConversationPage
from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.state import ColdLoad
from ..core.transcript import Transcript
from ..errors import NotYours
from ..events import FileContent, ImageContent
from ..journal import ListOrder
from ..journals.transfer import export_lines
from ..owner.loading import in_slices
from .bodies import keep_one_unknown, one_unknown
from .changes import feed_changes
from .events import feed_events, page_of_events
from .faults import PROBLEM, PROBLEMS, OwnRoute, invalid_id, unusable
from .inspection import Brief, shown_json
from .names import ID_LENGTH_MAX, SEQ_MAX, Cursor, from_path, is_known_id, is_new_id, to_path
from .problems import OWN, ProblemRaised, once_it_happened
from .readiness import find_unreadiness
from .replies import EventStream, LineStream, Write, json_reply, long_reply
from .service import (
    Caller,
    ConversationCaller,
    Inspecting,
    Listing,
    Reading,
    Ruling,
    Writing,
    cursor_of,
)
from .shapes import Asked, Shape, shaped_transcript, shaped_view
from .wire import (
    Json,
    conversation_json,
    deletion_json,
    erasure_json,
    event_json,
    exported_line,
    hit_json,
    rejection_json,
    row_json,
    state_json,
    step_json,
    time_json,
)

__all__ = ["EVENT_SOURCES", "health", "router", "wants_page"]

router = APIRouter(prefix="/v1", route_class=OwnRoute, responses=PROBLEMS)
health = APIRouter(responses=PROBLEMS)

HERE = "/conversations/{conversation_id}"
COMPLETE_EVERY_S = 10.0
"""The steps of the time up to which a principal's search is complete; it is one step old."""
Seq = Annotated[int | None, Query(ge=0, le=SEQ_MAX)]


class Body(BaseModel):
    """A request's body: unknown fields are refused, and no error shows the input."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, given: object) -> object:
        return keep_one_unknown(given, cls.model_fields)


def _whole(rule: LiteralString) -> WrapValidator:
    """Check an object as a whole: an error does not name its keys, which the client chose."""

    def check(value: object, check_parts: ValidatorFunctionWrapHandler) -> object:
        try:
            return check_parts(value)
        except ValidationError:
            raise PydanticCustomError("whole", "{rule}", {"rule": rule}) from None

    return WrapValidator(check)


# --- chat messages -------------------------------------------------------------------------------


class MessageBody(Body):
    content: str
    images: list[Annotated[ImageContent, one_unknown(ImageContent)]] = Field(
        default=[], max_length=64
    )
    on_overlap: OnOverlap | None = None
    replaces: str | None = Field(default=None, max_length=ID_LENGTH_MAX)
    """The id of an earlier message: its turn and all later ones leave the view."""
    metadata: dict[str, object] = {}
    """Kept with the message; the model does not see it."""
    files: list[Annotated[FileContent, one_unknown(FileContent)]] = Field(default=[], max_length=64)


IfMatch: TypeAlias = Annotated[str | None, Header(description="A cursor of this conversation.")]


@router.post(
    f"{HERE}/messages",
    status_code=202,
    responses={200: {"content": {"application/json": {}}}, 409: PROBLEM, 412: PROBLEM},
)
async def send_message(
    caller: Writing,
    body: MessageBody,
    *,
    create: bool = True,
    idempotency_key: Annotated[
        str | None, Header(max_length=ID_LENGTH_MAX, description="The message's id.")
    ] = None,
    prefer: Annotated[str | None, Header(description="`wait=30`: wait for the turn's end.")] = None,
    if_match: IfMatch = None,
) -> Response:
    """Send a chat message; answer once it is durable: 202, or 200 if it was there already."""
    conversation = await _meant(caller, create=create, if_match=if_match)
    turn = await conversation.send(
        body.content,
        images=body.images,
        message_id=idempotency_key,
        on_overlap=body.on_overlap,
        replaces=body.replaces,
        author=caller.author,
        metadata=body.metadata,
        files=body.files,
    )
    answer: dict[str, object] = {
        "conversation_id": caller.local_id,
        "message_id": turn.message_id,
        "seq": turn.seq,
        "turn_id": turn.turn_id,
        "overlapped": turn.overlapped,
        "waits_for": turn.waits_for,
    }
    # Relative to this address, wherever the gateway is mounted.
    headers = {"Location": f"messages/{to_path(turn.message_id)}/turn"}
    wait_s = _wait_of(prefer, caller.service.limits.wait_s_max)
    end = None
    if wait_s is not None:
        # The message is durable: whatever keeps its end from being seen, it has happened.
        with suppress(TurnkeeperError):
            end = await _end_within(caller, turn, wait_s)
        answer["end"] = None if end is None else _end_json(end)
        headers["Preference-Applied"] = f"wait={wait_s:g}"
    return json_reply(answer, 200 if turn.is_duplicate or end is not None else 202, headers=headers)


async def _meant(caller: ConversationCaller, *, create: bool, if_match: str | None) -> Conversation:
    """Return the conversation, with the client's conditions, which its owner checks."""
    if if_match is not None:
        return caller.expecting(cursor=_cursor_to_match(if_match))
    if not create:
        return caller.expecting(exists=True)
    await caller.check_may_begin()
    return caller.conversation


def _cursor_to_match(if_match: str) -> Cursor:
    cursor = cursor_of(if_match.strip('"'), header="if-match")
    if not cursor.seq:
        raise ProblemRaised(OWN["precondition-failed"])
    return cursor


def _wait_of(prefer: str | None, wait_s_max: float) -> float | None:
    """Return how many seconds the client wants to wait, bounded; None if it does not say."""
    for preference in (prefer or "").split(","):
        name, _, value = preference.partition("=")
        if name.strip().lower() == "wait" and value.strip().isascii() and value.strip().isdigit():
            return min(float(value.strip()[:9]), wait_s_max)
    return None


async def _end_within(caller: ConversationCaller, turn: Turn, wait_s: float) -> TurnEnd | None:
    with anyio.move_on_after(wait_s), suppress(NotYours):
        end = await turn.end()
        # While it ran, the conversation may have been given to another user.
        await caller.conversation.check_user()
        return end
    return None


def _end_json(end: TurnEnd) -> dict[str, object]:
    return {"outcome": end.outcome, "reply": end.reply, "detail": end.detail}


# --- events --------------------------------------------------------------------------------------


def wants_page(request: Request) -> bool:
    """Return True if a client asks for events as a page of JSON, not as a stream."""
    return "application/json" in request.headers.get("accept", "")


@router.get(
    f"{HERE}/events",
    responses={200: {"content": {"text/event-stream": {}, "application/json": {}}}},
)
async def read_events(
    caller: Reading,
    request: Request,
    *,
    after: str = "0",
    pieces: bool = False,
    live: bool = True,
    limit: Annotated[int, Query(ge=1)] = 100,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Stream the events after a cursor; with `Accept: application/json`, return a page of them."""
    if last_event_id:
        cursor = cursor_of(last_event_id, header="last-event-id")
    else:
        cursor = cursor_of(after, parameter="after")
    if wants_page(request):
        limit = min(limit, caller.service.limits.page_max)
        return await long_reply(await page_of_events(caller, cursor, limit))
    return EventStream(feed_events(caller, cursor, pieces=pieces, live=live))


# --- time travel ---------------------------------------------------------------------------------


@router.get(f"{HERE}/state")
async def read_state(caller: Reading, at: Seq = None) -> Response:
    """Return the state at a seq, or at the end of the log."""
    return json_reply(state_json(await caller.at(at), caller.rename))


@router.get(f"{HERE}/view")
async def read_view(
    caller: Reading,
    *,
    at: Seq = None,
    offset: Annotated[int, Query(ge=0, le=SEQ_MAX)] = 0,
    limit: Annotated[int | None, Query(ge=1, description="Without it, all are returned.")] = None,
    brief: Brief = None,
) -> Response:
    """Return the events, or a range of them, that the model sees at a seq or at the log's end."""
    state = await caller.at(at)
    end = None if limit is None else offset + limit
    shown = state.view[offset:end]
    events = (shown_json(caller, event, brief) for event in shown)
    return await long_reply({"seq": state.seq, "count": len(state.view), "events": events})


@router.get(f"{HERE}/steps")
async def read_steps(caller: Reading) -> Response:
    """Return the model calls, oldest first, each with the seq whose view the model saw."""
    return await long_reply({"steps": map(step_json, await caller.conversation.steps())})


@router.get(f"{HERE}/messages")
async def read_messages(
    caller: Reading,
    *,
    of: Literal["transcript", "view"] = "transcript",
    at: Seq = None,
    shape: Shape = "events",
    before: Annotated[int | None, Query(ge=1, le=SEQ_MAX)] = None,
    limit: Annotated[int, Query(ge=1)] = 100,
    model: str = "",
    is_plain: bool = False,
    show_author: bool = False,
) -> Response:
    """Return the transcript or the view, as messages of a provider or of a client.

    The transcript has all chat messages, answers and calls, condensed or not. As `events` it comes
    in pages from its end, in the order of the log: `before` is the seq of the first event of the
    page that you have. A page has `limit` events, or fewer, once they have 4 MiB.
    The view at the `view_seq` of a step, with the `model`, `is_plain` and `show_author` of its
    request, gives exactly the messages that were sent to the model.
    """
    if of == "view":
        state = await caller.at(at)
        asked = Asked(model=model, is_plain=is_plain, show_author=show_author)
        return await long_reply(await in_slices(shaped_view(state, shape, caller.rename, asked)))
    head = (await caller.at(at)).seq
    transcript = Transcript()
    newest = Cursor(0)
    async for logged in caller.conversation.events(live=False):
        if logged.seq > head:
            break
        transcript.fold(logged)
        newest = Cursor.of(logged)
    limit = min(limit, caller.service.limits.page_max)
    shaped = await in_slices(
        shaped_transcript(transcript, shape, caller.rename, before=before, limit=limit)
    )
    return await long_reply({"cursor": str(newest), **shaped})


# --- turns ---------------------------------------------------------------------------------------


@router.get(f"{HERE}/messages/{{message_id}}/turn")
async def read_turn(
    caller: Reading,
    message_id: Annotated[
        str,
        Path(description="Its id; one with special characters as `~` and its base64url."),
    ],
    prefer: Annotated[str | None, Header(description="`wait=30`: wait for its end.")] = None,
) -> Response:
    """Return the turn of a chat message and how it ended; `end` is null until then."""
    found = from_path(message_id)
    if found is None or not is_known_id(found):
        raise invalid_id(parameter="message_id")
    turn = await caller.conversation.turn(found)
    wait_s = _wait_of(prefer, caller.service.limits.wait_s_max)
    end = await (turn.find_end() if wait_s is None else _end_within(caller, turn, wait_s))
    return json_reply(
        {
            "message_id": turn.message_id,
            "seq": turn.seq,
            "turn_id": turn.turn_id,
            "end": None if end is None else _end_json(end),
        }
    )


class TurnBody(Body):
    turn_id: str | None = None


_ANY_TURN = TurnBody()


@router.post(f"{HERE}/interrupt")
async def interrupt(caller: Writing, body: TurnBody = _ANY_TURN) -> Response:
    """End the running turn. Name the turn that the user saw, so that no later one is ended."""
    return json_reply({"changed": await caller.conversation.interrupt(body.turn_id)})


@router.post(f"{HERE}/undo")
async def undo(caller: Writing, body: TurnBody = _ANY_TURN) -> Response:
    """Take the newest turn with chat messages out of the view, and return these messages.

    Name the turn that the user saw, so that no other one is taken back.
    """
    messages = await caller.conversation.undo(body.turn_id)
    return json_reply({"messages": [event_json(message, caller.rename) for message in messages]})


@router.post(f"{HERE}/pause")
async def pause(caller: Writing) -> Response:
    """Begin no further step until resumed."""
    return json_reply({"changed": await caller.conversation.pause()})


@router.post(f"{HERE}/resume")
async def resume(caller: Writing) -> Response:
    """Go on after a pause."""
    return json_reply({"changed": await caller.conversation.resume()})


class AnswerBody(Body):
    answers: Annotated[dict[str, bool | str], _whole("must be an object of true, false or reasons")]
    """By tool call id: true lets it run, false or a reason rejects it."""


@router.post(f"{HERE}/answer")
async def answer(caller: Writing, body: AnswerBody) -> Response:
    """Answer all calls that wait for a confirmation. Sending the same answers again succeeds."""
    await caller.check_exists()
    await caller.conversation.answer(body.answers)
    return json_reply({"answered": sorted(body.answers)})


class RetractBody(Body):
    event_ids: list[str] = Field(default=[], max_length=10_000)
    turn_id: str | None = None


@router.post(f"{HERE}/retract")
async def retract(caller: Writing, body: RetractBody) -> Response:
    """Take events, or a whole turn, out of the view; the log keeps them."""
    await caller.check_exists()
    conversation = caller.conversation
    if body.turn_id is not None:
        done = await conversation.retract_turn(body.turn_id)
    else:
        done = await conversation.retract(body.event_ids)
    return json_reply({"seq": done.seq})


class ForkBody(Body):
    id: str
    at: int | None = Field(default=None, ge=1, le=SEQ_MAX)


@router.post(f"{HERE}/fork", status_code=201)
async def fork(caller: Reading, body: ForkBody) -> Response:
    """Begin another conversation, which the caller may write, with this one's log up to a seq."""
    caller.service.check_may(caller.principal, "write", body.id)
    if not is_new_id(body.id):
        raise invalid_id(pointer="#/id")
    target = await caller.service.caller_in(caller.principal, body.id)
    user = target.place.user or caller.author
    await caller.conversation.fork(target.conversation_id, at=body.at, owner=user)
    return json_reply({"id": body.id}, 201, headers={"Location": f"../{to_path(body.id)}"})


# --- conversations -------------------------------------------------------------------------------


_PREFIX = "Only conversations whose ids begin with this."


@dataclass
class Filters:
    """Select the conversations of a list; a principal only ever gets its own."""

    prefix: Annotated[str, Query(description=_PREFIX, max_length=ID_LENGTH_MAX)] = ""
    owner: str | None = None
    status: str | None = None
    label: Annotated[str | None, Query(description="`name=value`")] = None

    async def page(
        self, caller: Caller, *, limit: int, order: ListOrder, cursor: str | None = None
    ) -> ConversationPage:
        """Return a page of the caller's conversations."""
        return await caller.service.conversations.list(
            limit=min(limit, caller.service.limits.page_max),
            cursor=cursor,
            prefix=caller.stored(self.prefix),
            # The index is ordered by user, so the rows of other users are not read.
            owner=self.owner if caller.user is None else caller.user,
            status=self.status,
            label=_label_of(self.label),
            order=order,
        )


def _label_of(text: str | None) -> tuple[str, str] | None:
    """Return the label that a filter names. Refuse a filter that cannot be read."""
    if not text:
        return None
    name, equals, value = text.partition("=")
    if not equals:
        raise unusable("must be name=value", parameter="label")
    return name, value


def _shown_rows(caller: Caller, page: ConversationPage) -> Iterator[Json]:
    principal = caller.principal
    shows_address = principal is None or principal.is_admin
    return (row_json(row, caller.rename, shows_address=shows_address) for row in page.rows)


@router.get("/conversations")
async def list_conversations(
    caller: Listing,
    filters: Annotated[Filters, Depends()],
    *,
    limit: Annotated[int, Query(ge=1)] = 50,
    cursor: Annotated[str | None, Query(description="The `cursor` of the page before.")] = None,
    order: ListOrder = "id",
) -> Response:
    """Return a page of the caller's conversations, without opening them."""
    page = await filters.page(caller, limit=limit, order=order, cursor=cursor)
    rows = _shown_rows(caller, page)
    return await long_reply(
        {"conversations": rows, "cursor": page.cursor, "is_complete": page.is_complete}
    )


@router.get("/search")
async def search(
    caller: Listing,
    words: Annotated[
        str,
        Query(description="A message must have all of them; `deploy*` means words that begin so."),
    ],
    *,
    limit: Annotated[int, Query(ge=1)] = 20,
    cursor: Annotated[str | None, Query(description="The `cursor` of the page before.")] = None,
    prefix: Annotated[str, Query(description=_PREFIX, max_length=ID_LENGTH_MAX)] = "",
    owner: str | None = None,
    status: str | None = None,
    label: Annotated[str | None, Query(description="`name=value`")] = None,
) -> Response:
    """Return the messages with these words in the caller's conversations, newest first."""
    found = await caller.service.conversations.search(
        words,
        limit=min(limit, caller.service.limits.page_max),
        cursor=cursor,
        prefix=caller.stored(prefix),
        owner=owner if caller.user is None else caller.user,
        status=status,
        label=_label_of(label),
    )
    return await long_reply(
        {
            "hits": (hit_json(hit, caller.rename) for hit in found.hits),
            "cursor": found.cursor,
            "is_complete": found.is_complete,
            "complete_to": time_json(_complete_to(caller, found.complete_to)),
        }
    )


def _complete_to(caller: Caller, complete_to: float | None) -> float | None:
    """Return the time up to which a search is complete, as its caller may know it.

    The journal's time is that of a message that is not in the index yet, perhaps another user's.
    For a principal, the clock decides, unless the index is far behind.
    """
    if caller.user is None:
        return complete_to
    told = caller.service.ports.now() - COMPLETE_EVERY_S
    if complete_to is not None:
        told = min(told, complete_to)
    return told - told % COMPLETE_EVERY_S


@router.get("/changes", status_code=200, response_class=EventStream)
async def read_changes(
    caller: Listing,
    filters: Annotated[Filters, Depends()],
    *,
    limit: Annotated[int, Query(ge=1)] = 100,
    live: bool = True,
) -> Response:
    """Stream the newest rows of a list, and then each row that changes."""

    async def look() -> list[Json]:
        rows: list[Json] = []
        for row in _shown_rows(caller, await filters.page(caller, limit=limit, order="activity")):
            rows.append(row)
            if len(rows) % SLICE_EVENTS == 0:
                await anyio.lowlevel.checkpoint()
        return rows

    await look()  # an invalid request is refused here, before the stream begins
    return EventStream(feed_changes(caller.service, look, live=live))


@router.get(HERE)
async def read_conversation(caller: Reading) -> Response:
    """Return a conversation's title, labels and user, and its current state in brief."""
    return json_reply(conversation_json(await caller.conversation.at(), caller.local_id))


class ChangeBody(Body):
    title: str | None = None
    labels: Annotated[
        dict[str, str | None] | None, _whole("must be an object of texts; null removes a label")
    ] = None
    owner: str | None = None
    """The principal who owns the conversation; only administrators may change this."""


@router.patch(HERE)
async def change(
    caller: Writing,
    body: ChangeBody,
    *,
    idempotency_key: Annotated[str | None, Header(max_length=ID_LENGTH_MAX)] = None,
) -> Response:
    """Change the title, labels or user by a merge patch (RFC 7396); null removes a value."""
    await caller.check_exists()
    labels = body.labels
    if labels is None and "labels" in body.model_fields_set:
        labels = await _removed_labels(caller, idempotency_key)
    title = body.title or "" if "title" in body.model_fields_set else None
    owner = body.owner or "" if "owner" in body.model_fields_set else None
    if owner is not None and caller.user is not None:
        raise ProblemRaised(OWN["forbidden"])
    if title is not None or owner is not None or labels:
        await caller.conversation.change(
            title=title, labels=labels, owner=owner, change_id=idempotency_key
        )
    with once_it_happened():
        return json_reply(conversation_json(await caller.conversation.at(), caller.local_id))


async def _removed_labels(
    caller: ConversationCaller, change_id: str | None
) -> dict[str, str | None]:
    """Return the labels that null removes, each with None: all; for a repeat, all of that time."""
    seq = None
    if change_id is not None:
        journal = caller.service.conversations.journal
        made = await journal.find_events(caller.conversation_id, [change_id])
        if change_id in made:
            seq = made[change_id] - 1
    return dict.fromkeys((await caller.conversation.at(seq)).details.labels)


@router.delete(HERE, responses={412: PROBLEM})
async def delete(caller: Writing, *, if_match: IfMatch = None) -> Response:
    """Delete a conversation, and return what was erased."""
    cursor = None if if_match is None else _cursor_to_match(if_match)
    deletion = await caller.service.conversations.delete(
        caller.conversation_id,
        owner=caller.place.user,
        seq=None if cursor is None else cursor.seq,
        event_id=None if cursor is None else cursor.event_id,
        at_us=None if cursor is None else cursor.at_us,
        behalf=caller.behalf,
    )
    return json_reply(deletion_json(deletion, caller.rename))


@router.get(f"{HERE}/rejections")
async def read_rejections(caller: Reading) -> Response:
    """Return the events that admission refused."""
    await caller.check_exists()
    rejections = await caller.conversation.rejections()
    return await long_reply({"rejections": map(rejection_json, rejections)})


@router.post(f"{HERE}/verify")
async def verify(caller: Reading) -> Response:
    """Read and fold the whole log, and compare the result with the state that is loaded from it."""
    load = ColdLoad()
    seq = 0
    async for logged in caller.conversation.events(live=False):
        load.fold(logged.event)
        seq = logged.seq
    folded, enforced_away = load.finish()
    loaded = await caller.conversation.at(seq)
    is_sound = not enforced_away and await in_slices(folded.comparing_with(loaded))
    return json_reply({"events": seq, "is_sound": is_sound})


@router.get(f"{HERE}/export", status_code=200, response_class=LineStream)
async def export(caller: Reading) -> Response:
    """Return the conversation as JSON Lines, with each event byte for byte as it is stored.

    Of a fork of another principal's conversation, the id of that conversation is left out.
    """
    await caller.check_exists()
    journal = caller.service.conversations.journal

    async def feed(write: Write) -> None:
        async with aclosing(export_lines(journal, [caller.conversation_id])) as lines:
            async for line in lines:
                await write(f"{exported_line(line, caller.rename)}\n".encode())

    return LineStream(feed)


EVENT_SOURCES = (read_events, read_changes)
"""The routes that a browser reads with an `EventSource`, which reconnects only after a 200."""


# --- operators -----------------------------------------------------------------------------------


@router.get("/self")
async def read_self(caller: Listing) -> Response:
    """Return the principal who asks, and what it may do."""
    principal = caller.principal
    return json_reply(
        {
            "principal": None if principal is None else principal.name,
            "scopes": None if principal is None else sorted(principal.scopes),
            "is_read_only": caller.service.is_read_only,
        }
    )


@router.delete("/principals/{principal}")
async def erase(
    caller: Ruling,
    principal: Annotated[
        str, Path(description="A name; one with special characters as `~` and its base64url.")
    ],
) -> Response:
    """Delete all conversations of a principal, and return a receipt for each."""
    user = from_path(principal)
    if user is None or not is_new_id(user):
        raise invalid_id(parameter="principal")
    erasure = await caller.service.conversations.erase(user, behalf=caller.behalf)
    left = {name: caller.service.told(error)[0] for name, error in erasure.left.items()}
    return json_reply(erasure_json(erasure.receipts, left, caller.rename))


@router.get("/runtime/tree")
async def read_tree(
    caller: Inspecting,
    limit: Annotated[
        int, Query(ge=1, description="At most so many below each actor, the idle ones last.")
    ] = 1_000,
) -> Response:
    """Return the state of the actors, without any message; `left_out` counts the others."""
    limit = min(limit, caller.service.limits.page_max)
    tree = caller.service.conversations.runtime.tree(limit=limit)
    return json_reply(
        {
            "actors": await in_slices(_actors_json(tree)),
            "left_out": tree.left_out,
            "handling_times": [asdict(each) for each in tree.handling_times],
        }
    )


_OF_ACTOR = tuple(field.name for field in fields(ActorState) if field.name != "children")


def _actors_json(tree: Tree) -> Slices[Sequence[dict[str, object]]]:
    """Return the actors, each with those below it; in slices, as there may be very many."""
    roots: list[dict[str, object]] = []
    waiting = [(roots, tree.actors)]
    count = 0
    while waiting:
        found, states = waiting.pop()
        for state in states:
            below: list[dict[str, object]] = []
            found.append({**{name: getattr(state, name) for name in _OF_ACTOR}, "children": below})
            if state.children:
                waiting.append((below, state.children))
            count += 1
            if count % SLICE_EVENTS == 0:
                yield
    return roots


@router.get("/dead-letters")
async def read_dead_letters(caller: Inspecting) -> Response:
    """Return how many messages reached no actor, by reason, without the messages."""
    letters = caller.service.conversations.runtime.dead_letters
    return json_reply({"count": letters.count, "by_reason": letters.count_by_reason})


@health.get("/healthz")
async def healthz() -> Response:
    """Answer while this process works. Checks nothing that a restart would not repair."""
    return json_reply({"ok": True})


@health.get("/readyz")
async def readyz(request: Request) -> Response:
    """Answer 503, with the reason, if another node should get the requests."""
    problem = await find_unreadiness(request.app.state.service)
    if problem is not None:
        raise ProblemRaised(problem)
    return json_reply({"ok": True})
