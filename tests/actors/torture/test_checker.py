"""The checker finds nothing in a sound history, and each fault that is made in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeeper.actors.torture.checker import FAULTS, Fault, check
from turnkeeper.actors.torture.history import (
    Acknowledged,
    Answered,
    Closed,
    Disturbed,
    Entry,
    How,
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
    as_line,
    marker_of,
    markers_in,
    parse_history,
)


class SoundServer:
    """A conversation as a sound server keeps it, and what its users see of that."""

    def __init__(self, random: Random, room: int = 1) -> None:
        self.random = random
        self.room = room
        self.history: list[Record] = []
        self.log: list[Entry] = []
        self.view: dict[str, str] = {}
        self.waiting: list[Entry] = []
        self.streams = room * 100

    def write(self, kind: str, **fields: object) -> Entry:
        seq = len(self.log) + 1
        entry = Entry.model_validate({"seq": seq, "id": f"e{seq}", "kind": kind, **fields})
        self.log.append(entry)
        return entry

    def send(self, number: int) -> None:
        """Send a message, perhaps several times; it is taken, or refused."""
        key, marker = f"m{number}", marker_of(self.room, 1, number)
        sent = Sent(room=self.room, message=key, user=1, marker=marker, text=f"hello {marker}")
        self.history.append(sent)
        fate = self.random.randrange(6)
        if fate == 0:
            self.history.append(
                Refused(room=self.room, message=key, attempt=1, status=409, problem="no")
            )
            return
        taken = self.write("message_queued", message=key, text=sent.text)
        self.waiting.append(taken)
        if fate == 1:
            self.history.append(Unknown(room=self.room, message=key, attempt=1, why="cut off"))
            self.history.append(sent)
        for attempt in (1, 2)[: self.random.randint(1, 2)]:
            self.history.append(
                Acknowledged(room=self.room, message=key, attempt=attempt, seq=taken.seq)
            )

    def turn(self) -> None:
        """Answer the message that waits longest."""
        if not self.waiting:
            return
        taken = self.waiting.pop(0)
        turn = f"t{taken.seq}"
        self.write("turn_started", turn=turn)
        joined = self.write("user_message", turn=turn, message=taken.message, text=taken.text)
        self.view[joined.id] = taken.text or ""
        text = " ".join(["I saw", *(at for said in self.view.values() for at in markers_in(said))])
        self.write("agent_message", turn=turn, text=text)
        self.write("turn_ended", turn=turn, outcome="completed")
        self.history.append(
            Answered(
                room=self.room,
                message=taken.message or "",
                outcome="completed",
                text=text,
                is_whole=True,
            )
        )

    def read(self, after: int | None = None) -> None:
        """Read the log from some place on, with the pieces of each answer."""
        self.streams += 1
        after = self.random.randint(0, len(self.log)) if after is None else after
        self.history.append(Opened(stream=self.streams, room=self.room, after=after, live=False))
        for entry in self.log[after:]:
            if entry.kind == "agent_message":
                self.pieces(entry)
            self.history.append(Seen(stream=self.streams, entry=entry))
        self.history.append(Closed(stream=self.streams, how="ended", why="caught-up"))

    def pieces(self, entry: Entry) -> None:
        text, offset = entry.text or "", 0
        while offset < len(text):
            said = text[offset : offset + self.random.randint(1, 9)]
            self.history.append(
                Piece(
                    stream=self.streams,
                    turn=entry.turn or "",
                    answer=0,
                    epoch=1,
                    attempt=1,
                    offset=offset,
                    text=said,
                )
            )
            offset += len(said)

    def end(self) -> list[Record]:
        while self.waiting:
            self.turn()
        self.read(0)
        shown = [entry for entry in self.log if entry.kind in ("user_message", "agent_message")]
        self.history.append(Read(room=self.room, entries=tuple(self.log)))
        self.history.append(Shown(room=self.room, entries=tuple(shown)))
        return self.history


def sound(seed: int, rooms: int = 1) -> list[Record]:
    """Return the history of a sound server; conversations take turns."""
    random = Random(seed)
    servers = [SoundServer(random, room) for room in range(1, rooms + 1)]
    for number in range(1, 12):
        for server in servers:
            server.send(number)
            for _ in range(random.randint(0, 2)):
                random.choice((server.turn, server.read))()
    return [record for server in servers for record in server.end()]


def found(history: Sequence[Record]) -> set[Fault]:
    return {finding.fault for finding in check(history).findings}


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), rooms=st.integers(1, 3))
def test_nothing_is_found_in_a_sound_history(seed: int, rooms: int) -> None:
    assert check(sound(seed, rooms)).findings == ()


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_a_history_is_read_as_it_was_written(seed: int) -> None:
    history = sound(seed)

    assert list(parse_history(map(as_line, history))) == history


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_a_sound_history_that_is_cut_off_while_all_is_quiet_shows_no_harm_in_streams(
    seed: int,
) -> None:
    """A cut is no fault: every stream may end at any event, if the client has cut it."""
    cut: list[Record] = []
    for record in sound(seed):
        if isinstance(record, Seen) and record.entry.seq % 3 == 0 and len(cut) > seed % 40:
            continue_after = record.stream
            cut.append(Closed(stream=continue_after, how="cut"))
            cut.append(record)  # of a stream that is closed: dropped below
        else:
            cut.append(record)
    closed: set[int] = set()
    kept: list[Record] = []
    for record in cut:
        if isinstance(record, Seen | Piece | Closed) and record.stream in closed:
            continue
        if isinstance(record, Closed):
            closed.add(record.stream)
        kept.append(record)

    assert check(kept).findings == ()


# --- each fault, made in a sound history ---------------------------------------------------------

Change = Callable[[list[Record]], list[Record]]


def in_log(change: Callable[[list[Entry]], list[Entry]]) -> Change:
    """Change the log that is read at the end."""

    def changed(history: list[Record]) -> list[Record]:
        return [
            record.model_copy(update={"entries": tuple(change(list(record.entries)))})
            if isinstance(record, Read)
            else record
            for record in history
        ]

    return changed


def renumbered(log: list[Entry]) -> list[Entry]:
    return [entry.model_copy(update={"seq": seq}) for seq, entry in enumerate(log, 1)]


def nth(history: Sequence[Record], kind: type[Record], number: int = 2) -> int:
    places = [place for place, record in enumerate(history) if isinstance(record, kind)]
    return places[number]


def first(log: Sequence[Entry], kind: str, number: int = 2) -> int:
    return [place for place, entry in enumerate(log) if entry.kind == kind][number]


def without_message(log: list[Entry]) -> list[Entry]:
    message = log[first(log, "user_message")].message
    return renumbered([entry for entry in log if entry.message != message])


def with_message_twice(log: list[Entry]) -> list[Entry]:
    return renumbered([*log, log[first(log, "user_message")]])


def without_end(log: list[Entry]) -> list[Entry]:
    del log[first(log, "turn_ended")]
    return renumbered(log)


def without_answer(log: list[Entry]) -> list[Entry]:
    del log[first(log, "agent_message")]
    return renumbered(log)


def failed(log: list[Entry]) -> list[Entry]:
    place = first(log, "turn_ended")
    log[place] = log[place].model_copy(update={"outcome": "failed"})
    return log


def with_answer(change: Callable[[list[str]], list[str]]) -> Change:
    """Change the markers of the third answer, in the log and in what its sender was told."""

    def changed(history: list[Record]) -> list[Record]:
        log = next(record.entries for record in history if isinstance(record, Read))
        entry = log[first(log, "agent_message")]
        text = " ".join(["I saw", *change(markers_in(entry.text or ""))])

        def of(record: Record) -> Record:
            match record:
                case Read() | Shown():
                    entries = [
                        each.model_copy(update={"text": text}) if each.seq == entry.seq else each
                        for each in record.entries
                    ]
                    return record.model_copy(update={"entries": tuple(entries)})
                case Answered(text=entry.text):
                    return record.model_copy(update={"text": text})
                case _:
                    return record

        return [
            of(record)
            for record in history
            if not isinstance(record, Opened | Seen | Piece | Closed)
        ]

    return changed


def retracted(log: list[Entry]) -> list[Entry]:
    target = log[first(log, "user_message")]
    taken = Entry(seq=0, id="r", kind="retraction", retracted=(target.id,))
    return renumbered([*log, taken])


def whole_reading(history: Sequence[Record]) -> int:
    """Return the place where the last stream begins, which shows the whole log."""
    return max(place for place, record in enumerate(history) if isinstance(record, Opened))


def drop(kind: type[Record]) -> Change:
    def changed(history: list[Record]) -> list[Record]:
        begin = whole_reading(history)
        del history[begin + nth(history[begin:], kind, 0)]
        return history

    return changed


def twice(kind: type[Record]) -> Change:
    def changed(history: list[Record]) -> list[Record]:
        begin = whole_reading(history)
        place = begin + nth(history[begin:], kind)
        return [*history[: place + 1], history[place], *history[place + 1 :]]

    return changed


def updated(kind: type[Record], number: int = -1, /, **fields: object) -> Change:
    def changed(history: list[Record]) -> list[Record]:
        place = nth(history, kind, number)
        history[place] = history[place].model_copy(update=fields)
        return history

    return changed


def other_stream(history: list[Record]) -> list[Record]:
    """Show an event of another conversation."""
    place = nth(history, Seen)
    seen = history[place]
    assert isinstance(seen, Seen)
    entry = seen.entry.model_copy(update={"text": "I saw [m:9-9-9]"})
    history[place] = seen.model_copy(update={"entry": entry})
    return history


def acknowledged_anew(history: list[Record]) -> list[Record]:
    place = nth(history, Acknowledged)
    told = history[place]
    assert isinstance(told, Acknowledged)
    return [*history, told.model_copy(update={"seq": 900})]


def sent_later(history: list[Record]) -> list[Record]:
    """Acknowledge the last message in front of all others."""
    place = max(n for n, record in enumerate(history) if isinstance(record, Acknowledged))
    told = history[place]
    assert isinstance(told, Acknowledged)
    return [
        record.model_copy(update={"seq": 1})
        if isinstance(record, Acknowledged) and record.message == told.message
        else record
        for record in history
        if not isinstance(record, Read | Shown)
    ]


CHANGES: dict[str, tuple[Fault, Change]] = {
    "a message is not in the log": ("lost", in_log(without_message)),
    "a message is in the log twice": ("doubled", in_log(with_message_twice)),
    "a turn has no end": ("unanswered", in_log(without_end)),
    "a turn has no answer": ("unanswered", in_log(without_answer)),
    "a turn failed": ("unanswered", in_log(failed)),
    "a message is taken back unasked": ("lost", in_log(retracted)),
    "the log has a gap": ("lost", in_log(lambda log: log[:4] + log[5:])),
    "the log shows an event twice": ("doubled", in_log(lambda log: log[:4] + log[3:])),
    "the log ends too early": ("lost", in_log(lambda log: log[:-1])),
    "the model did not see a message": ("blind", with_answer(lambda seen: seen[1:])),
    "the model saw what is not there": ("blind", with_answer(lambda seen: [*seen, "[m:1-9-9]"])),
    "the model saw a message twice": ("doubled", with_answer(lambda seen: [*seen, seen[0]])),
    "the model saw another order": ("reordered", with_answer(lambda seen: seen[::-1])),
    "the model saw another conversation": (
        "foreign",
        with_answer(lambda seen: [*seen, "[m:2-1-1]"]),
    ),
    "a stream leaves an event out": ("lost", drop(Seen)),
    "a stream shows an event twice": ("doubled", twice(Seen)),
    "a stream shows another conversation": ("foreign", other_stream),
    "a stream ends without a word": ("torn", updated(Closed, why=None)),
    "a stream breaks off": ("torn", updated(Closed, how="broken", why="reset")),
    "a stream says gone": ("lost", updated(Closed, why="gone")),
    "a piece is left out": ("lost", drop(Piece)),
    "a piece comes twice": ("doubled", twice(Piece)),
    "a key has two places": ("doubled", acknowledged_anew),
    "a later message has an earlier place": ("reordered", sent_later),
    "a place in the log is another one": ("reordered", updated(Acknowledged, 0, seq=77)),
    "another conversation acknowledges": ("foreign", updated(Acknowledged, told_room="other")),
    "a sender is told another answer": ("torn", updated(Answered, text="I saw")),
    "the transcript leaves something out": (
        "lost",
        lambda history: [
            record.model_copy(update={"entries": record.entries[1:]})
            if isinstance(record, Shown)
            else record
            for record in history
        ],
    ),
    "what was refused is in the log": (
        "foreign",
        lambda history: [
            Refused(room=1, message=record.message, attempt=record.attempt, status=409)
            if isinstance(record, Acknowledged)
            else record
            for record in history
            if not (isinstance(record, Acknowledged) and record.attempt > 1)
        ],
    ),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
@settings(max_examples=15)
@given(seed=st.integers(0, 1_000))
def test_a_fault_that_is_made_in_a_sound_history_is_found(change: str, seed: int) -> None:
    fault, make = CHANGES[change]

    assert fault in found(make(sound(seed)))


def test_each_fault_is_made_once_at_least() -> None:
    assert {fault for fault, _ in CHANGES.values()} == set(FAULTS)


# --- what is excused -----------------------------------------------------------------------------


def small(*between: Record, outcome: str = "completed") -> list[Record]:
    """Return a history of one message, whose turn ends with this outcome."""
    marker = marker_of(1, 1, 1)
    log = (
        Entry(seq=1, id="a", kind="user_message", turn="t", message="m", text=marker),
        Entry(seq=2, id="b", kind="agent_message", turn="t", text=f"I saw {marker}"),
        Entry(seq=3, id="c", kind="turn_ended", turn="t", outcome=outcome),
    )
    return [
        Sent(room=1, message="m", user=1, marker=marker, text=marker),
        Acknowledged(room=1, message="m", attempt=1, seq=1),
        *between,
        Read(room=1, entries=log),
    ]


def test_a_turn_may_be_interrupted_if_a_client_asked_or_the_server_was_killed() -> None:
    assert found(small(outcome="interrupted")) == {"unanswered"}
    asked = Intervened(room=1, how="interrupt")
    assert found(small(asked, outcome="interrupted")) == set()
    assert found(small(Disturbed(how="killed"), outcome="interrupted")) == set()


def test_a_stream_may_break_while_the_server_is_away_and_not_otherwise() -> None:
    broken: list[Record] = [
        Opened(stream=1, room=1),
        Closed(stream=1, how="broken", why="reset"),
    ]
    killed, started = Disturbed(how="killed"), Disturbed(how="started")

    assert found(small(*broken)) == {"torn"}
    assert found(small(killed, *broken, started)) == set()
    assert found(small(broken[0], killed, broken[1], started)) == set()
    assert found(small(broken[0], killed, started, broken[1])) == set()
    assert found(small(killed, started, *broken)) == {"torn"}


@pytest.mark.parametrize("how", ["rolled", "stood still"])
def test_a_connection_may_end_unanswered_while_a_server_stops_and_not_a_stream(how: How) -> None:
    """A server that stops, or goes on after a pause, closes connections it has not read yet."""
    opened = Opened(stream=1, room=1)
    unanswered = Closed(stream=1, how="broken", why="reset", has_begun=False)
    broken = Closed(stream=1, how="broken", why="reset")
    rolled, started = Disturbed(how=how), Disturbed(how="started")
    silent = Disturbed(how="silent one way")

    assert found(small(rolled, opened, unanswered, started)) == set()
    assert found(small(opened, rolled, started, unanswered)) == set()
    assert found(small(rolled, opened, broken, started)) == {"torn"}
    assert found(small(opened, unanswered, rolled, started)) == {"torn"}
    assert found(small(rolled, started, opened, unanswered)) == {"torn"}
    assert found(small(rolled, started, silent, opened, unanswered, started)) == {"torn"}


def test_a_server_is_away_until_it_has_started_and_not_until_the_next_one_has() -> None:
    killed, started = Disturbed(how="killed"), Disturbed(how="started")
    broken = (Opened(stream=1, room=1), Closed(stream=1, how="broken", why="reset"))

    assert found(small(killed, started, Disturbed(how="apart"), *broken, started)) == {"torn"}


def test_an_answer_may_be_longer_than_its_pieces_if_the_stream_says_so_in_between() -> None:
    whole = small()[-1]
    assert isinstance(whole, Read)
    text = whole.entries[1].text or ""

    def piece(offset: int, end: int) -> Piece:
        said = text[offset:end]
        return Piece(stream=1, turn="t", answer=0, epoch=1, attempt=1, offset=offset, text=said)

    def found_with(*shown: Piece | Noted) -> set[Fault]:
        joined, *rest = [Seen(stream=1, entry=entry) for entry in whole.entries]
        closed = Closed(stream=1, how="cut")
        return found(small(Opened(stream=1, room=1), joined, *shown, *rest, closed))

    without, again = Noted(stream=1, pieces=False), Noted(stream=1, pieces=True)
    wrong = piece(0, 3).model_copy(update={"text": "It "})

    assert found_with(piece(0, 3), piece(3, 99)) == set()
    assert found_with(piece(0, 3)) == {"torn"}
    assert found_with(piece(0, 3), without) == set()
    assert found_with(piece(0, 3), without, again, piece(3, 99)) == set()
    assert found_with(without, piece(0, 3)) == {"torn"}
    assert found_with(piece(0, 3), without, again) == {"torn"}
    assert found_with(piece(0, 3), without, piece(3, 4)) == {"torn"}
    assert found_with(wrong, without) == {"torn"}


def test_a_message_of_unknown_outcome_may_be_there_or_not() -> None:
    marker = marker_of(1, 1, 1)
    sent = Sent(room=1, message="m", user=1, marker=marker, text=marker)
    unknown = Unknown(room=1, message="m", attempt=1, why="504")
    there = [record for record in small() if isinstance(record, Read)]

    assert found([sent, unknown, *there]) == set()
    assert found([sent, unknown, Read(room=1, entries=())]) == set()


def test_an_answer_that_was_cut_off_has_seen_the_beginning_of_the_view() -> None:
    """The rest was not said any more; a marker that is missing before another was not seen."""

    def history(said: str) -> list[Record]:
        log = [
            Entry(seq=n, id=f"u{n}", kind="user_message", turn=f"t{n}", text=marker_of(1, 1, n))
            for n in (1, 2, 3)
        ]
        log.append(
            Entry(seq=4, id="a", kind="agent_message", turn="t3", text=said, is_partial=True)
        )
        return [Intervened(room=1, how="interrupt"), Read(room=1, entries=tuple(log))]

    assert found(history("I saw [m:1-1-1] [m:1-")) == set()
    assert found(history("I saw [m:1-1-2]")) == {"blind"}
