"""Looks up the ids that a command names, for the decision on it.

A command names what the log may have already: the event or chat message that it brings, if it is
sent again, and those that it replaces or expects. `decide` finds the newest of them in the working
state. Older ones are put into the command's stamp. `look_up` reads them from the journal, before
the batch is decided, because a decision does not wait. `look_up_in_batch` finds those that earlier
commands of the batch have decided and the working state has dropped since. A command that waits
with a parked result is decided batches later: `note_decided` puts what is decided meanwhile into
its stamp.

Invariant: when a command is decided, everything that the log or the batch has under an id that it
names is in the working state or in its stamp. Only the owner writes the log, so the journal's
answer still holds then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from turnkeeper.runtime import InvariantViolation

from ..core.commands import Answer, Append, AppendAll, Change, Command, FromOutside, Query, Send
from ..core.records import decode_record
from ..core.state import Folded
from ..core.turn_table import KnownMessage
from ..core.working_state import WorkingState
from ..errors import ConversationNotFound
from ..events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    UserMessageEvent,
)
from ..journal import READ_PAGE, Journal, LogPages, StoredRecord
from ..values.tables import NO_TABLE
from ..values.type_names import a_name
from .batch import Decided, Taken, events_of

__all__ = ["find_events", "look_up", "look_up_in_batch", "may_be_known", "note_decided"]


def may_be_known(command: Command | Query, state: Folded) -> bool:
    """False if the command names no ids, or only ids that must be new, as most commands do."""
    if not isinstance(command, FromOutside):
        return False  # owners and agents make the ids of what they write
    if command.expected is not None:
        return True
    if isinstance(command, Append):  # the commonest comes first
        event = command.event
        # Ids rise, so a new event's is greater.
        return event.id <= state.event_id_max or (
            event.kind == "user_message"
            and isinstance(event, UserMessageEvent)
            and event.message_id is not None
        )
    if isinstance(command, AppendAll):  # none of its events may have a message id
        return any(event.id <= state.event_id_max for event in command.events)
    if isinstance(command, Send):
        names_events = command.event_id is not None or command.replaces is not None
        return names_events or state.turns.may_know(command.message_id)
    return True


async def look_up(taken: Taken, working: WorkingState, journal: Journal) -> None:
    """Look up the ids that the command names: in memory, and older ones in the journal.

    Raises `ConversationNotFound` if another process has deleted the log.
    """
    command = taken.command
    taken.known_events = await find_events(_events_named_by(command), working, journal)
    match command:
        case Send(message_id=message_id, replaces=replaces):
            taken.known_message = await _find_message(message_id, working, journal)
            if replaces is not None:
                taken.known_target = await _find_message(replaces, working, journal)
        case Append(event=UserMessageEvent(message_id=str(message_id))):
            taken.known_message = await _find_message(message_id, working, journal)
        case Answer(event_id=str(event_id)) if given := taken.known_events.get(event_id):
            taken.known_answers = await _find_given(given, working, journal)
        case _:
            pass


async def _find_message(
    message_id: str, working: WorkingState, journal: Journal
) -> KnownMessage | None:
    # Earlier commands of the batch may make the table forget the message before this command is
    # decided: so a message that the table still has is returned, too.
    turns, name = working.state.turns, working.conversation_id
    if (known := turns.find(message_id)) is not None:
        return known
    if not turns.may_have_forgotten(message_id):
        return None
    found = await journal.find_messages(name, [message_id])
    if message_id not in found:
        return None
    seq = found[message_id]
    event = await _read_one(seq, name, journal)
    if not isinstance(event, UserMessageEvent | MessageQueuedEvent):
        raise InvariantViolation(
            f"seq {seq} of conversation {name} carries message id {message_id} and is "
            f"{a_name(event.kind)}"
        )
    return KnownMessage.of(message_id, seq, event)


async def find_events(
    event_ids: Sequence[str], working: WorkingState, journal: Journal
) -> Mapping[str, LoggedEvent]:
    """Return the events of these ids that the log has, from memory or the journal.

    Raises `ConversationNotFound` if another process has deleted the log.
    """
    ids = [event_id for event_id in event_ids if event_id <= working.state.event_id_max]
    if not ids:
        return {}
    recent = (working.find_recent(event_id) for event_id in ids)
    known = {logged.event.id: logged for logged in recent if logged is not None}
    older = [event_id for event_id in ids if event_id not in known]
    if not older:
        return known
    name = working.conversation_id
    found = await journal.find_events(name, older)
    seqs = sorted(found.values())
    while seqs:
        page = await journal.read(name, after=seqs[0] - 1, limit=min(len(seqs), READ_PAGE))
        if not page:  # deleted in another process, and begun anew there
            raise ConversationNotFound(name)
        logged = [decode_record(name, record) for record in page if record.event_id in found]
        known.update((one.event.id, one) for one in logged)
        seqs = [seq for seq in seqs if seq > page[-1].seq]
    return known


async def _find_given(
    given: LoggedEvent, working: WorkingState, journal: Journal
) -> Mapping[str, bool]:
    """Return the answers that this event gave; none if the calls that it answers are not found.

    Reads the log backwards from the answer: its request is usually a few events before it. The
    log is read even if the turn table has the answers, because earlier commands of the batch may
    make the table drop them.
    """
    event, name = given.event, working.conversation_id
    if not isinstance(event, ConfirmationGivenEvent):
        return NO_TABLE
    before = given.seq - 1
    while before:
        after = max(0, before - READ_PAGE)
        newest: StoredRecord | None = None
        async for page in LogPages(journal, name, after=after, upto=before):
            for record in page:
                if record.kind == "confirmation_requested":
                    newest = record
        if newest is not None:
            asked = decode_record(name, newest).event
            assert isinstance(asked, ConfirmationRequestedEvent), newest.kind
            return {
                call: event.confirmed and call not in event.rejected for call in asked.tool_call_ids
            }
        before = after
    return NO_TABLE


async def _read_one(seq: int, name: str, journal: Journal) -> Event:
    records = await journal.read(name, after=seq - 1, limit=1)
    if not records:  # deleted in another process, and begun anew there
        raise ConversationNotFound(name)
    return decode_record(name, records[0]).event


def look_up_in_batch(
    taken: Taken, decided: Decided, working: WorkingState, *, committed_seq: int
) -> None:
    """Look up ids among the events that this batch decided and memory has dropped already.

    They are not committed, so `look_up` could not find them in the journal. The first of them will
    follow the event at `committed_seq`.
    """
    command = taken.command
    forgotten = _forgotten_of(_events_named_by(command), working)
    if forgotten:
        events = _events_of(decided, committed_seq)
        here = {logged.event.id: logged for logged in events if logged.event.id in forgotten}
        taken.known_events = {**taken.known_events, **here}
    match command:
        case Send(message_id=message_id, replaces=replaces):
            if taken.known_message is None:
                taken.known_message = _find_in_batch(message_id, decided, working, committed_seq)
            if replaces is not None and taken.known_target is None:
                taken.known_target = _find_in_batch(replaces, decided, working, committed_seq)
        case Append(event=UserMessageEvent(message_id=str(message_id))):
            if taken.known_message is None:
                taken.known_message = _find_in_batch(message_id, decided, working, committed_seq)
        case _:
            pass


def note_decided(events: Sequence[Event], working: WorkingState, waiting: Iterable[Taken]) -> None:
    """Put the events just decided into the stamps of the commands that wait, if they name them."""
    first = working.state.seq - len(events) + 1
    by_id = {event.id: LoggedEvent(seq, event) for seq, event in enumerate(events, first)}
    for taken in waiting:
        named = [each for each in _events_named_by(taken.command) if each in by_id]
        if named:
            taken.known_events = {**taken.known_events, **{each: by_id[each] for each in named}}


def _forgotten_of(event_ids: Sequence[str], working: WorkingState) -> set[str]:
    """Return the ids that the log or the batch may have, but the working state has dropped."""
    event_id_max, recent = working.state.event_id_max, working.recent
    return {each for each in event_ids if each <= event_id_max and each not in recent}


def _find_in_batch(
    message_id: str, decided: Decided, working: WorkingState, committed_seq: int
) -> KnownMessage | None:
    turns = working.state.turns
    if turns.find(message_id) is None and turns.may_have_forgotten(message_id):
        for seq, event in _events_of(decided, committed_seq):
            if (
                isinstance(event, UserMessageEvent | MessageQueuedEvent)
                and event.message_id == message_id
            ):
                return KnownMessage.of(message_id, seq, event)
    return None


def _events_of(decided: Decided, committed_seq: int) -> Iterator[LoggedEvent]:
    """Return the events that are decided and not committed yet."""
    return map(LoggedEvent, count(committed_seq + 1), decided.events)


def _events_named_by(command: Command | Query) -> Sequence[str]:
    """Return the ids of the events that a command appends, or expects in the log."""
    named: list[str] = []
    match command:
        case Append() | AppendAll():
            named += [event.id for event in events_of(command)]
        case Change(change_id=str(change_id)):
            named.append(change_id)
        case Send(event_id=str(event_id)) | Answer(event_id=str(event_id)):
            named.append(event_id)
        case _:
            pass
    expected = command.expected if isinstance(command, FromOutside) else None
    if expected is not None and expected.event_id is not None:
        named.append(expected.event_id)
    return named
