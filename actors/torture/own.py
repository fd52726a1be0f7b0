"""turnkeeper's own protocol: messages, events after a cursor, and turns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from .exchanges import NO_CUT, Broken, Cut, CutOff, Reply, ServerSent
from .history import Closed, Entry, Intervened, Noted, Opened, Piece, Read, Seen, Shown
from .rooms import Message, Room, clean, problem_in, text_of

__all__ = [
    "How",
    "Reader",
    "ask_end",
    "entry_of",
    "interrupt",
    "note_log",
    "read_log",
    "read_page",
    "read_transcript",
    "send",
    "undo",
]

_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Problems that mean that nothing happened and the same request may be sent again."""
_PAGE = 200


def _here(room: Room, rest: str) -> str:
    return f"{room.site.path}/v1/conversations/{quote(room.name, safe='')}{rest}"


# --- sending -------------------------------------------------------------------------------------


async def send(message: Message, *, cut: Cut = NO_CUT, wait_s: int | None = None) -> None:
    """Try to send a message once, and note the outcome."""
    room = message.room
    headers = {**room.headers, "Idempotency-Key": message.key}
    if wait_s is not None:
        headers["Prefer"] = f"wait={wait_s}"
    body: dict[str, object] = {"content": message.text}
    if message.on_overlap is not None:
        body["on_overlap"] = message.on_overlap
    if message.replaces is not None:
        body["replaces"] = message.replaces
    message.begin()
    try:
        async with room.site.exchange(
            "POST", _here(room, "/messages"), headers=headers, body=body, cut=cut
        ) as reply:
            told = await reply.json()
    except (CutOff, Broken) as error:
        message.lose(str(error) or "cut off")
        return
    if reply.status in (HTTPStatus.OK, HTTPStatus.ACCEPTED) and isinstance(
        seq := told.get("seq"), int
    ):
        is_other = (told.get("conversation_id"), told.get("message_id")) != (room.name, message.key)
        other = f"{told.get('conversation_id')} {told.get('message_id')}"
        message.acknowledge(seq, clean(other) if is_other else None)
        message.is_settled = True
        _note_end(message, told)
    else:
        message.fail(reply, told, again=_AGAIN)


def _note_end(message: Message, told: Mapping[str, object]) -> None:
    end = told.get("end")
    message.turn_id = text_of(told.get("turn_id")) or None
    if isinstance(end, dict):
        reply = text_of(end.get("reply"))
        message.answer(text_of(end.get("outcome")), reply, is_whole=True)


async def ask_end(message: Message, *, wait_s: int, cut: Cut) -> None:
    """Ask how the turn of a message ended."""
    room = message.room
    path = _here(room, f"/messages/{quote(message.key, safe='')}/turn")
    headers = {**room.headers, "Prefer": f"wait={wait_s}"}
    told = await _asked(room, "GET", path, headers=headers, cut=cut)
    if told:
        _note_end(message, told)


async def interrupt(room: Room, turn_id: str | None) -> None:
    """End the running turn."""
    room.history.add(Intervened(how="interrupt", room=room.number))
    body = {} if turn_id is None else {"turn_id": turn_id}
    await _asked(room, "POST", _here(room, "/interrupt"), headers=room.headers, body=body)


async def undo(room: Room) -> None:
    """Take the newest turn back."""
    room.history.add(Intervened(how="undo", room=room.number))
    await _asked(room, "POST", _here(room, "/undo"), headers=room.headers, body={})


async def _asked(
    room: Room,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str],
    body: object = None,
    cut: Cut = NO_CUT,
) -> Mapping[str, object]:
    """Return the answer to a request; empty if there is none."""
    try:
        async with room.site.exchange(method, path, headers=headers, body=body, cut=cut) as reply:
            told = await reply.json()
    except (CutOff, Broken):
        return {}
    return told if reply.status == HTTPStatus.OK else {}


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class How:
    """The way in which a stream is opened."""

    cut: Cut = NO_CUT
    live: bool = True
    pieces: bool = False
    by_header: bool = True
    """True to say the cursor as `Last-Event-ID`, false to say it in the address."""


class Reader:
    """Follows a room's events, over one or more streams."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._seq = 0
        self._cursor: str | None = None

    def forget(self) -> None:
        """Read from the beginning the next time."""
        self._seq, self._cursor = 0, None

    def forget_event(self) -> None:
        """Send only a seq as the next cursor, without the id of the event there."""
        self._cursor = None

    async def stream(self, how: How) -> bool:
        """Read one stream to its end, from the cursor on; return False if it broke off."""
        room = self._room
        headers = {**room.headers, "Accept": "text/event-stream"}
        query = f"?pieces={str(how.pieces).lower()}&live={str(how.live).lower()}"
        if self._cursor is not None and how.by_header:
            headers["Last-Event-ID"] = self._cursor
        else:
            query += f"&after={quote(self._cursor or str(self._seq))}"
        number = room.history.next_stream()
        room.history.add(Opened(stream=number, room=room.number, after=self._seq, live=how.live))
        closed = Closed(stream=number, how="cut")
        has_begun = False
        try:
            async with room.site.exchange(
                "GET", _here(room, f"/events{query}"), headers=headers, cut=how.cut
            ) as reply:
                has_begun = True
                closed = await self._read(number, reply)
        except CutOff:
            pass
        except Broken as error:
            closed = _broken(number, error, has_begun=has_begun)
        finally:
            # Even if the reader is cancelled, which is a cut as well.
            room.history.add(closed)
        return closed.how != "broken"

    async def _read(self, number: int, reply: Reply) -> Closed:
        if reply.status != HTTPStatus.OK:
            told = await reply.json()
            problem = problem_in(told) or str(reply.status)
            return Closed(stream=number, how="ended", why=problem)
        why: str | None = None
        async for sent in reply.events():
            match sent.event:
                case "end":
                    why = text_of(sent.json.get("why")) or None
                case "piece":
                    self._room.history.add(_piece(number, sent))
                case "message":
                    self._note(number, sent)
                case "note" if isinstance(pieces := sent.json.get("pieces"), bool):
                    self._room.history.add(Noted(stream=number, pieces=pieces))
                case _:
                    pass
        return Closed(stream=number, how="ended", why=why)

    def _note(self, number: int, sent: ServerSent) -> None:
        entry = entry_of(sent.json)
        self._room.history.add(Seen(stream=number, entry=entry))
        self._seq, self._cursor = entry.seq, sent.id


def _broken(number: int, error: Broken, *, has_begun: bool) -> Closed:
    why = clean(str(error))
    return Closed(stream=number, how="broken", why=why, has_begun=has_begun)


def _piece(number: int, sent: ServerSent) -> Piece:
    told = sent.json
    return Piece(
        stream=number,
        turn=text_of(told.get("turn_id")),
        answer=_int(told.get("answer")),
        epoch=_int(told.get("epoch")),
        attempt=_int(told.get("attempt")),
        offset=_int(told.get("offset")),
        text=text_of(told.get("text")),
    )


def entry_of(told: Mapping[str, object]) -> Entry:
    """Return an event with its place, in the form that the checker uses."""
    event = told.get("event")
    if not isinstance(event, dict):
        event = {}
    retracted = event.get("retracted_event_ids")
    return Entry(
        seq=_int(told.get("seq")),
        id=text_of(event.get("id")),
        kind=text_of(event.get("kind")),
        turn=text_of(event.get("turn_id")) or None,
        message=text_of(event.get("message_id")) or None,
        text=text_of(event["content"]) if "content" in event else None,
        retracted=tuple(map(text_of, retracted)) if isinstance(retracted, list) else (),
        outcome=text_of(event.get("outcome")) or None,
        is_partial=event.get("interrupted") is True,
        is_again=event.get("queued_again") is True,
        replaced_by=text_of(event.get("replaced_by")) or None,
    )


def _int(value: object) -> int:
    return value if isinstance(value, int) else -1


async def read_page(room: Room, after: int, *, cut: Cut = NO_CUT) -> tuple[list[Entry], bool]:
    """Read a page of events after a seq, and note it; return True if it is the last one.

    Raises `Broken` or `CutOff` if it cannot be read.
    """
    number = room.history.next_stream()
    room.history.add(Opened(stream=number, room=room.number, after=after, live=False))
    closed = Closed(stream=number, how="cut")
    path = _here(room, f"/events?after={after}&limit={_PAGE}")
    headers = {**room.headers, "Accept": "application/json"}
    entries: list[Entry] = []
    has_begun = False
    try:
        async with room.site.exchange("GET", path, headers=headers, cut=cut) as reply:
            has_begun = True
            told = await reply.json()
        events = told.get("events")
        if reply.status != HTTPStatus.OK or not isinstance(events, list):
            closed = Closed(stream=number, how="ended", why=problem_in(told) or str(reply.status))
            raise Broken(closed.why or "")
        for event in events:
            entry = entry_of(event)
            entries.append(entry)
            room.history.add(Seen(stream=number, entry=entry))
        is_last = told.get("has_more") is not True
        closed = Closed(stream=number, how="ended", why="caught-up" if is_last else "page")
    except Broken as error:
        if closed.how == "cut":
            closed = _broken(number, error, has_begun=has_begun)
        raise
    finally:
        room.history.add(closed)
    return entries, is_last


async def read_log(room: Room, known: list[Entry]) -> None:
    """Read on, page by page, to the end of the log. Raises `Broken`."""
    is_last = False
    while not is_last:
        found, is_last = await read_page(room, known[-1].seq if known else 0)
        known.extend(found)


def note_log(room: Room, entries: list[Entry]) -> None:
    room.history.add(Read(room=room.number, entries=tuple(entries)))


async def read_transcript(room: Room) -> None:
    """Read the transcript, page by page from its end, and note it. Raises `Broken`."""
    entries: list[Entry] = []
    async for page in _transcript_pages(room):
        entries = [*page, *entries]
    room.history.add(Shown(room=room.number, entries=tuple(entries)))


async def _transcript_pages(room: Room) -> AsyncIterator[list[Entry]]:
    before = ""
    while True:
        path = _here(room, f"/messages?limit={_PAGE}{before}")
        async with room.site.exchange("GET", path, headers=room.headers) as reply:
            told = await reply.json()
        messages = told.get("messages")
        if reply.status != HTTPStatus.OK or not isinstance(messages, list):
            raise Broken(problem_in(told) or str(reply.status))
        page = [entry_of(message) for message in messages]
        yield page
        if told.get("has_more") is not True or not page:
            return
        before = f"&before={page[0].seq}"
