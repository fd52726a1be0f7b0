"""Checks a history. Pure: the same history gives the same verdict.

It counts seven faults, each at most once for one message, event or stream:

    lost        an acknowledged message, or an event that was shown, is not there
    doubled     a message, an event or a piece of an answer is there more than once
    reordered   a message is not in its place: the order of acknowledgements, of a log, of a queue
    unanswered  a message whose turn has no end, or a turn that ended without an answer
    blind       an answer by a model that did not see what it had to see, or saw what was taken back
    foreign     something that was not sent to this conversation, or that was refused
    torn        a stream that ends without a word, or pieces that do not make up their answer
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from .history import (
    Acknowledged,
    Answered,
    Began,
    Closed,
    Disturbed,
    Entry,
    Intervened,
    Noted,
    Opened,
    Piece,
    Read,
    Record,
    Refused,
    Seen,
    Sent,
    Shown,
    Unknown,
    markers_in,
)

__all__ = ["FAULTS", "Fault", "Finding", "Verdict", "check"]

Fault: TypeAlias = Literal["lost", "doubled", "reordered", "unanswered", "blind", "foreign", "torn"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
Spans: TypeAlias = Sequence[tuple[int, int]]
"""A span of a history: its first and its last place."""
_OPEN = 1 << 62
"""The end of a span before it is known."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One fault, and where it was found."""

    room: int
    fault: Fault
    subject: str
    """The message, event or stream that has the fault."""
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults of a history, and how much was checked."""

    findings: tuple[Finding, ...]
    totals: dict[str, int]
    refusals: dict[str, int]
    """How often the server answered with each problem, the most frequent first."""

    @property
    def counts(self) -> dict[Fault, int]:
        found = Counter(finding.fault for finding in self.findings)
        return {fault: found[fault] for fault in FAULTS}

    @property
    def is_sound(self) -> bool:
        return not self.findings


def check(history: Iterable[Record]) -> Verdict:
    """Return the faults of a history."""
    rooms: dict[int, _Room] = {}
    streams: dict[int, _Stream] = {}
    totals: Counter[str] = Counter()
    falls: list[tuple[int, int]] = []
    """The spans in which the server was down."""
    lulls: list[tuple[int, int]] = []
    """The spans in which one of several servers was suspended, or each was restarted in turn."""
    refusals: Counter[str] = Counter()
    for place, record in enumerate(history):
        totals[record.record] += 1
        match record:
            case Disturbed(how="killed" | "stopped"):
                totals["kills" if record.how == "killed" else "stops"] += 1
                falls.append((place, _OPEN))
            case Disturbed(how="started"):
                for spans in (falls, lulls):
                    if spans and spans[-1][1] == _OPEN:
                        spans[-1] = (spans[-1][0], place)
            case Opened():
                room = rooms.setdefault(record.room, _Room(record.room))
                streams[record.stream] = stream = _Stream(place, record)
                room.streams.append(stream)
            case Seen() | Piece() | Noted() | Closed():
                streams[record.stream].records.append((place, record))
            case Disturbed(how=how):
                totals["disturbances"] += 1
                if how in ("rolled", "stood still"):
                    lulls.append((place, _OPEN))
            case Began():
                pass
            case _:
                rooms.setdefault(record.room, _Room(record.room)).take(place, record)
                if isinstance(record, Refused):
                    refusals[f"{record.status} {record.problem}".strip()] += 1
    unique: dict[tuple[int, Fault, str], Finding] = {}
    for room in rooms.values():
        for finding in room.findings(falls, lulls):
            unique.setdefault((finding.room, finding.fault, finding.subject), finding)
    totals["rooms"] = len(rooms)
    totals["messages"] = sum(len(room.messages) for room in rooms.values())
    totals["known"] = sum(len(room.first_seq) for room in rooms.values())
    return Verdict(tuple(sorted(unique.values())), dict(totals), dict(refusals.most_common()))


@dataclass(slots=True)
class _Stream:
    """A reading of a log."""

    place: int
    opened: Opened
    records: list[tuple[int, Seen | Piece | Noted | Closed]] = field(default_factory=list)


@dataclass(slots=True)
class _Message:
    """A message as its sender knows it."""

    first: Sent
    place: int
    """The place of the first attempt."""
    acknowledged: list[tuple[int, Acknowledged]] = field(default_factory=list)
    answered: list[tuple[int, Answered]] = field(default_factory=list)
    attempts: int = 0
    refusals: int = 0

    @property
    def is_refused(self) -> bool:
        """True if each attempt was refused, so that the message cannot have had any effect."""
        return self.attempts > 0 and self.refusals == self.attempts


class _Room:
    """One conversation."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.messages: dict[str, _Message] = {}
        self.streams: list[_Stream] = []
        self.log: Sequence[Entry] | None = None
        self.transcript: Sequence[Entry] | None = None
        self.first_seq: dict[str, int | None] = {}
        """The messages that were acknowledged, with their seq."""
        self._is_interrupted = False
        self._is_undone = False

    def take(
        self,
        place: int,
        record: Sent | Acknowledged | Refused | Unknown | Answered | Intervened | Read | Shown,
    ) -> None:
        """Take in the next record about this conversation."""
        match record:
            case Sent():
                message = self.messages.setdefault(record.message, _Message(record, place))
                message.attempts += 1
            case Acknowledged():
                self.messages[record.message].acknowledged.append((place, record))
                if self.first_seq.get(record.message) is None:
                    self.first_seq[record.message] = record.seq
            case Refused():
                self.messages[record.message].refusals += 1
            case Answered():
                self.messages[record.message].answered.append((place, record))
            case Read():
                self.log = record.entries
            case Shown():
                self.transcript = record.entries
            case Intervened():
                self._is_interrupted |= record.how == "interrupt"
                self._is_undone |= record.how == "undo"
            case Unknown():
                pass

    def findings(self, falls: Spans, lulls: Spans) -> Iterator[Finding]:
        """Yield all faults; one may come several times, from different sides."""
        yield from self._acknowledgements()
        yield from self._answers(is_killed=bool(falls))
        for stream in self.streams:
            yield from self._stream(stream, falls, lulls)
        if self.log is not None:
            yield from self._log(self.log, is_killed=bool(falls))
            yield from self._shown_and_gone(self.log)
        if self.log is not None and self.transcript is not None:
            yield from self._transcript(self.log, self.transcript)

    def _find(self, fault: Fault, subject: str, detail: str) -> Finding:
        return Finding(self.number, fault, subject, detail)

    # --- answers to the senders -----------------------------------------------------------------

    def _acknowledgements(self) -> Iterator[Finding]:
        for key, message in self.messages.items():
            seqs = {told.seq for _, told in message.acknowledged}
            if len(seqs) > 1:
                yield self._find("doubled", key, f"acknowledged at the seqs {_listed(seqs)}")
            for _, told in message.acknowledged:
                if told.told_room is not None:
                    yield self._find("foreign", key, f"acknowledged for {told.told_room}")
        yield from self._order_of_acknowledgements()

    def _order_of_acknowledgements(self) -> Iterator[Finding]:
        """Yield each message that was sent after another one's acknowledgement, and precedes it."""
        told = sorted(
            (message.acknowledged[0][0], seq, key)
            for key, message in self.messages.items()
            if message.acknowledged and (seq := message.acknowledged[0][1].seq) is not None
        )
        sent = sorted((message.place, key) for key, message in self.messages.items())
        highest, of, at = 0, "", 0
        for place, key in sent:
            while at < len(told) and told[at][0] < place:
                if told[at][1] > highest:
                    highest, of = told[at][1], told[at][2]
                at += 1
            seq = self.first_seq.get(key)
            if seq is not None and seq <= highest:
                yield self._find(
                    "reordered",
                    key,
                    f"it is at seq {seq}, and {of} at seq {highest} was acknowledged before it",
                )

    def _answers(self, *, is_killed: bool) -> Iterator[Finding]:
        for key, message in self.messages.items():
            seen: list[str] | None = None
            for place, told in message.answered:
                if told.outcome != "completed":
                    continue
                found = markers_in(told.text)
                if seen is not None and found != seen:
                    yield self._find("doubled", key, "two answers to it differ")
                seen = found
                yield from self._sighting(key, message, place, found)
            if self.log is None and message.acknowledged:
                yield from self._untold(key, message, is_killed=is_killed)

    def _untold(self, key: str, message: _Message, *, is_killed: bool) -> Iterator[Finding]:
        """Yield the message if its sender was not told an end that it asked for."""
        outcomes = {told.outcome for _, told in message.answered}
        may_be_cut = is_killed or self._may_interrupt
        if not outcomes:
            yield self._find("unanswered", key, "its sender was never told an end of its turn")
        elif "completed" not in outcomes and not may_be_cut:
            yield self._find("unanswered", key, f"its turn is {_listed(outcomes)}")

    def _sighting(
        self, key: str, message: _Message, place: int, found: Sequence[str]
    ) -> Iterator[Finding]:
        """Yield the faults of an answer, which says which messages the model has seen."""
        by_marker = {other.first.marker: (name, other) for name, other in self.messages.items()}
        places = {marker: at for at, marker in enumerate(found)}
        for marker, count in Counter(found).items():
            if marker not in by_marker:
                yield self._find("foreign", marker, f"the answer to {key} has seen it")
            elif count > 1:
                name = by_marker[marker][0]
                yield self._find("doubled", name, f"seen twice, says {key}'s answer")
            elif by_marker[marker][1].place > place:
                yield self._find("foreign", marker, f"seen by {key}'s answer before it was sent")
        if message.first.marker not in places:
            yield self._find("blind", key, "its answer has not seen it")
        if self.log is not None:
            return  # compared with the log, exactly
        before = sorted(
            (answered[0], other.place, name)
            for name, other in self.messages.items()
            if (answered := _completed(other)) is not None and answered[0] < message.place
        )
        for _, _, name in before:
            if self.messages[name].first.marker not in places:
                fault: Fault = "lost" if message.first.is_last else "blind"
                yield self._find(fault, name, f"{key}'s answer, which came later, has not seen it")
        if message.first.is_last:
            for name, other in self.messages.items():
                if other.acknowledged and other.first.marker not in places:
                    yield self._find("lost", name, "the last answer has not seen it")
        yield from self._order_of_sight(key, places)

    def _order_of_sight(self, key: str, places: dict[str, int]) -> Iterator[Finding]:
        """Yield messages that are seen after another which was sent only after their answer."""
        known = [
            (other, answered[0])
            for other in self.messages.values()
            if other.first.marker in places and (answered := _completed(other)) is not None
        ]
        for earlier, answered_at in known:
            for later, _ in known:
                is_earlier = answered_at < later.place
                if is_earlier and places[earlier.first.marker] > places[later.first.marker]:
                    yield self._find(
                        "reordered", later.first.message, f"seen too early, says {key}'s answer"
                    )

    # --- streams --------------------------------------------------------------------------------

    def _stream(self, stream: _Stream, falls: Spans, lulls: Spans) -> Iterator[Finding]:
        opened = stream.opened
        subject = f"stream {opened.stream}"
        last = opened.after
        seen: set[int] = set()
        pieces = _Pieces()
        for place, record in stream.records:
            match record:
                case Seen(entry=entry):
                    where = f"{subject}, after {opened.after}"
                    if entry.seq == last + 1:
                        pass
                    elif entry.seq > last + 1:
                        yield self._find(
                            "lost", f"seq {last + 1}", f"{where}: seq {entry.seq} follows {last}"
                        )
                    elif entry.seq in seen or entry.seq <= opened.after:
                        yield self._find("doubled", f"seq {entry.seq}", f"{where}: shown again")
                    else:
                        yield self._find("reordered", f"seq {entry.seq}", f"{where}: shown late")
                    seen.add(entry.seq)
                    last = max(last, entry.seq)
                    yield from self._entry(entry)
                    if (torn := pieces.close(entry)) is not None:
                        yield self._find("torn", f"answer of {entry.turn}", f"{subject}: {torn}")
                case Piece():
                    if (found := pieces.take(record)) is not None:
                        yield self._find(found[0], f"answer of {record.turn}", found[1])
                    yield from self._words(record.text, f"a piece of {subject}")
                case Noted():
                    pieces.note(record)
                case Closed():
                    # A server that stops closes connections whose request it has not read. So does
                    # one that goes on after a pause: they have been silent for too long.
                    spans = falls if record.has_begun else [*falls, *lulls]
                    is_excused = any(begin < place and stream.place < end for begin, end in spans)
                    yield from self._end_of(stream, record, last, is_excused=is_excused)

    def _end_of(
        self, stream: _Stream, closed: Closed, last: int, *, is_excused: bool
    ) -> Iterator[Finding]:
        subject = f"stream {closed.stream}"
        told = [
            (seq, key)
            for key, message in self.messages.items()
            for place, acknowledged in message.acknowledged
            if place < stream.place and (seq := acknowledged.seq) is not None
        ]
        if closed.how == "broken" and not is_excused:
            yield self._find("torn", subject, f"it broke off: {closed.why or 'no reason'}")
        elif closed.how == "ended" and closed.why is None:
            yield self._find("torn", subject, "it ended, and did not say why")
        elif closed.why == "caught-up":
            for seq, key in told:
                if seq > last:
                    yield self._find("lost", key, f"{subject} was whole, and ended at seq {last}")
        elif closed.why in ("gone", "conversation-not-found", "conversation-deleted"):
            for _, key in told:
                yield self._find("lost", key, f"{subject} says {closed.why}")
            if stream.opened.after and not told:
                yield self._find("lost", f"seq {stream.opened.after}", f"{subject}: {closed.why}")

    def _entry(self, entry: Entry) -> Iterator[Finding]:
        """Yield the faults of a single event."""
        where = f"seq {entry.seq}"
        yield from self._words(entry.text or "", where)
        if entry.message is None or entry.kind not in _CARRIES:
            return
        message = self.messages.get(entry.message)
        if message is None:
            yield self._find("foreign", entry.message, f"{where}: it was not sent here")
        elif message.is_refused:
            yield self._find("foreign", entry.message, f"{where}: it was refused")
        elif entry.text is not None and entry.text != message.first.text:
            yield self._find("foreign", entry.message, f"{where}: it says something else")

    def _words(self, text: str, where: str) -> Iterator[Finding]:
        """Yield the markers of other conversations."""
        for marker in markers_in(text):
            if not marker.startswith(f"[m:{self.number}-"):
                yield self._find("foreign", marker, f"{where}: it is of another conversation")

    # --- the log --------------------------------------------------------------------------------

    def _shown_and_gone(self, log: Sequence[Entry]) -> Iterator[Finding]:
        """Yield the events that were shown, but are missing or different in the log."""
        by_seq = {entry.seq: entry for entry in log}
        for stream in self.streams:
            for _, record in stream.records:
                if isinstance(record, Seen) and by_seq.get(record.entry.seq) != record.entry:
                    is_there = record.entry.seq in by_seq
                    how = "shown as another" if is_there else "shown, and gone"
                    where = f"seq {record.entry.seq}"
                    yield self._find("lost", where, f"stream {record.stream}: {how}")

    def _log(self, log: Sequence[Entry], *, is_killed: bool) -> Iterator[Finding]:
        for expected, entry in enumerate(log, 1):
            yield from self._entry(entry)
            if entry.seq != expected:
                fault: Fault = "lost" if entry.seq > expected else "doubled"
                yield self._find(fault, f"seq {expected}", f"the log has seq {entry.seq} there")
                break
        lives = _lives_in(log)
        for key, message in self.messages.items():
            if message.acknowledged and key not in lives:
                yield self._find("lost", key, "acknowledged, and not in the log")
        turns = _turns_in(log)
        for key, life in lives.items():
            if key not in self.messages:
                continue  # it is foreign
            seq = self.first_seq.get(key)
            if seq is not None and seq != life[0].seq:
                yield self._find(
                    "reordered", key, f"acknowledged at seq {seq}, and in the log at {life[0].seq}"
                )
            yield from self._life(key, life, turns, is_killed=is_killed)
        yield from self._order_of_turns(lives)
        yield from self._views(log)
        yield from self._told(lives, turns)

    def _life(
        self, key: str, life: Sequence[Entry], turns: dict[str, _Turn], *, is_killed: bool
    ) -> Iterator[Finding]:
        """Yield the faults of the events of one message in the log."""
        joined = [entry for entry in life if entry.kind == "user_message"]
        again = sum(entry.is_again for entry in life)
        queued = sum(entry.kind == "message_queued" and not entry.is_again for entry in life)
        if len(joined) > 1 + again or queued > 1:
            yield self._find("doubled", key, f"in the log at {_listed(e.seq for e in life)}")
        newest = life[-1]
        match newest.kind:
            case "message_withdrawn":
                other = self.messages.get(newest.replaced_by or "")
                if other is None or other.first.replaces != key:
                    yield self._find("lost", key, f"withdrawn at seq {newest.seq} without a reason")
            case "message_queued":
                yield self._find("unanswered", key, "it still waits")
            case _:
                turn = turns.get(newest.turn or "", _Turn())
                yield from self._end(key, newest, turn, is_killed=is_killed)

    def _end(self, key: str, joined: Entry, turn: _Turn, *, is_killed: bool) -> Iterator[Finding]:
        if not turn.ends:
            yield self._find("unanswered", key, f"its turn {joined.turn} has no end")
            return
        if len(turn.ends) > 1:
            yield self._find("doubled", f"turn {joined.turn}", "it ended more than once")
        match turn.ends[0].outcome:
            case "completed":
                if not any(answer.seq > joined.seq for answer in turn.answers):
                    yield self._find("unanswered", key, f"its turn {joined.turn} says nothing")
            case "interrupted" if self._may_interrupt or is_killed:
                pass
            case "rolled_back" if self._may_retract:
                pass
            case outcome:
                yield self._find("unanswered", key, f"its turn {joined.turn} is {outcome}")

    @property
    def _may_interrupt(self) -> bool:
        """True if a client has asked for the end of a turn here."""
        asked = {message.first.on_overlap for message in self.messages.values()}
        return self._is_interrupted or "interrupt" in asked or self._may_retract

    @property
    def _may_retract(self) -> bool:
        """True if a client has asked here that a turn leaves the view."""
        return self._is_undone or any(
            message.first.on_overlap == "rollback" or message.first.replaces is not None
            for message in self.messages.values()
        )

    def _order_of_turns(self, lives: dict[str, list[Entry]]) -> Iterator[Finding]:
        """Yield queued messages that overtook one that had been acknowledged earlier."""
        replaced = {message.first.replaces for message in self.messages.values()}
        joined: list[tuple[int, _Message]] = []
        for key, life in lives.items():
            message = self.messages.get(key)
            if message is None or key in replaced or message.first.replaces is not None:
                continue
            begun = next((entry.seq for entry in life if entry.kind == "user_message"), None)
            if begun is not None and message.first.on_overlap in (None, "queue"):
                joined.append((begun, message))
        latest = -1
        by = ""
        for _, message in sorted(joined, key=lambda pair: pair[0]):
            if message.acknowledged and message.acknowledged[0][0] < latest:
                first = message.first.message
                yield self._find("reordered", first, f"{by}, sent later, was answered before it")
            if message.place > latest:
                latest, by = message.place, message.first.message

    def _views(self, log: Sequence[Entry]) -> Iterator[Finding]:
        """Yield the answers whose model saw a view that differs from the log's."""
        view: dict[str, Entry] = {}
        for entry in log:
            if entry.kind == "user_message":
                view[entry.id] = entry
            for retracted in entry.retracted:
                view.pop(retracted, None)
                if not self._may_retract:
                    yield self._find("lost", f"event {retracted}", "taken back, and no one asked")
            if entry.kind == "agent_message":
                expected = [at for joined in view.values() for at in markers_in(joined.text or "")]
                yield from self._view(entry, expected)

    def _view(self, answer: Entry, expected: Sequence[str]) -> Iterator[Finding]:
        found = markers_in(answer.text or "")
        where = f"the answer at seq {answer.seq}"
        if answer.is_partial:
            expected = expected[: len(found)]
        missing = [at for at in expected if at not in found]
        if missing:
            yield self._find("blind", where, f"its model has not seen {_listed(missing)}")
        for marker, count in Counter(found).items():
            if count > 1:
                yield self._find("doubled", marker, f"{where} has seen it {count} times")
            if marker not in expected and marker.startswith(f"[m:{self.number}-"):
                yield self._find("blind", where, f"its model has seen {marker}, not in the view")
        both = [at for at in expected if at in found]
        if [at for at in dict.fromkeys(found) if at in both] != both:
            yield self._find("reordered", where, "its model has seen messages in another order")

    def _told(self, lives: dict[str, list[Entry]], turns: dict[str, _Turn]) -> Iterator[Finding]:
        """Yield the turn ends that clients were told but that differ from the log's."""
        for key, message in self.messages.items():
            life = lives.get(key, [])
            turn = turns.get(life[-1].turn or "", _Turn()) if life else _Turn()
            for _, told in message.answered:
                if told.outcome != "completed":
                    continue
                said = turn.answers[-1].text or "" if turn.answers else ""
                is_same = (
                    told.text == said
                    if told.is_whole
                    else markers_in(told.text) == markers_in(said)
                )
                if not is_same:
                    yield self._find("torn", key, "its sender was told another answer than the log")

    def _transcript(self, log: Sequence[Entry], shown: Sequence[Entry]) -> Iterator[Finding]:
        """Yield the messages that the transcript should not show, and those that it lacks."""
        retracted = {event for entry in log for event in entry.retracted}
        expected = {
            entry.seq: entry
            for entry in log
            if entry.kind in ("user_message", "agent_message") and entry.id not in retracted
        }
        found = [entry for entry in shown if entry.kind in ("user_message", "agent_message")]
        for seq, count in Counter(entry.seq for entry in found).items():
            if count > 1:
                yield self._find("doubled", f"seq {seq}", "twice in the transcript")
            if seq not in expected:
                yield self._find("foreign", f"seq {seq}", "in the transcript, and taken back")
        for seq in expected.keys() - {entry.seq for entry in found}:
            yield self._find("lost", f"seq {seq}", "it is not in the transcript")
        if [entry.seq for entry in found] != sorted(entry.seq for entry in found):
            yield self._find("reordered", "the transcript", "it is not in the order of the log")


_CARRIES = ("user_message", "message_queued")
"""The kinds of events that carry a chat message."""


@dataclass(slots=True)
class _Turn:
    ends: list[Entry] = field(default_factory=list)
    answers: list[Entry] = field(default_factory=list)


def _turns_in(log: Sequence[Entry]) -> dict[str, _Turn]:
    turns: defaultdict[str, _Turn] = defaultdict(_Turn)
    for entry in log:
        if entry.turn is not None and entry.kind == "turn_ended":
            turns[entry.turn].ends.append(entry)
        elif entry.turn is not None and entry.kind == "agent_message":
            turns[entry.turn].answers.append(entry)
    return turns


def _lives_in(log: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the events of each message."""
    lives: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in log:
        if entry.message is not None:
            lives[entry.message].append(entry)
    return lives


def _completed(message: _Message) -> tuple[int, Answered] | None:
    """Return the first full answer that its sender was told, and when."""
    return next((pair for pair in message.answered if pair[1].outcome == "completed"), None)


class _Pieces:
    """The text assembled from the pieces of one stream."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[tuple[int, int, int], str]] = {}
        """By turn: the answer with its epoch and attempt, and the text shown so far."""
        self._are_missing = False
        """The stream has said so since the last piece."""

    def note(self, noted: Noted) -> None:
        """Take in a note."""
        self._are_missing = not noted.pieces

    def take(self, piece: Piece) -> tuple[Fault, str] | None:
        """Take in a piece; return the fault if it does not fit."""
        which = (piece.answer, piece.epoch, piece.attempt)
        self._are_missing = False
        known = self._texts.get(piece.turn)
        if known is None or which > known[0]:
            text = ""
        elif which == known[0]:
            text = known[1]
        else:
            return "doubled", f"a piece of an earlier attempt, {which} after {known[0]}"
        if piece.offset == len(text):
            self._texts[piece.turn] = which, text + piece.text
            return None
        self._texts[piece.turn] = which, text[: piece.offset] + piece.text
        fault: Fault = "doubled" if piece.offset < len(text) else "lost"
        return fault, f"a piece at {piece.offset}, where {len(text)} code points were shown"

    def close(self, entry: Entry) -> str | None:
        """Take an event, which replaces the pieces of its answer; return how they differ."""
        if entry.kind not in ("agent_message", "action", "turn_ended") or entry.turn is None:
            return None
        known = self._texts.pop(entry.turn, None)
        if known is None or entry.kind != "agent_message" or known[1] == entry.text:
            return None
        said = entry.text or ""
        if entry.is_partial and (said.startswith(known[1]) or known[1].startswith(said)):
            return None
        if self._are_missing and said.startswith(known[1]):
            return None
        return f"the pieces say {len(known[1])} code points, and the answer {len(said)}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in sorted(values, key=str))
