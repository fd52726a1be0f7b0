"""The errors of conversations.

Each is of one of the five kinds of `turnkeeper.runtime` (`Refused`, `OwnershipLost`, `Unavailable`,
`OutcomeUnknown`, `InvariantViolation`). Catch the kind to decide what to do next, the concrete type
to know the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal

from turnkeeper.runtime import OutcomeUnknown, OwnershipLost, Refused, Unavailable


class InvalidInput(Refused, ValueError):
    """The argument is invalid, or cannot be stored; nothing was written.

    `argument` names it and `rule` says what is allowed there, for clients over a network. Neither
    quotes the given value; the error's text may. Both are empty if only code can be at fault.
    """

    argument: str = ""
    rule: str = ""

    def __init__(self, *said: object, argument: str = "", rule: str = "") -> None:
        super().__init__(*said)
        self.argument = argument
        self.rule = rule


class InvalidConversationId(InvalidInput):
    """No conversation, or no new one, can have this id; nothing was written."""

    def __init__(self, conversation_id: str, found: str) -> None:
        super().__init__(f"{found}; nothing was written; choose another id")
        self.conversation_id = conversation_id


class ConversationsClosed(Refused, RuntimeError):
    """The `Conversations` are closing, or closed; what is in the log stays there.

    `conversation_id` is None if the call was about no single conversation.
    """

    def __init__(self, conversation_id: str | None = None) -> None:
        super().__init__(
            "these `Conversations` are closed; make new ones for the same journal; nothing was done"
            if conversation_id is None
            else f"conversation {conversation_id} is not served here any more: its Conversations "
            "are closed; its log is kept, and unfinished turns end when it is next opened"
        )
        self.conversation_id = conversation_id


class Draining(Unavailable):
    """This process is being drained and takes no more messages; another process may take them."""

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"conversation {conversation_id}: this process is being drained; nothing was written; "
            "send again to another process, or once the conversations are open again"
        )
        self.conversation_id = conversation_id


class ContextTooLong(Refused):
    """The history is too long for the model, and nothing more of it can be left out."""

    def __init__(self, conversation_id: str, turn_id: str) -> None:
        super().__init__(
            f"turn {turn_id} of conversation {conversation_id} cannot go on: its history is too "
            "long for the model, and nothing more can be forgotten or shortened; its chat message "
            "is in the log; send a shorter one, or use a model or a condenser with a larger limit"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class CondenserTooSlow(Unavailable):
    """A condenser has made no proposal within `condense_s`; the owner goes on without it.

    Its name and text are in the log, in a `ConversationErrorEvent`.
    """

    def __init__(self, conversation_id: str, condense_s: float) -> None:
        super().__init__(
            f"the condenser of conversation {conversation_id} proposed nothing within "
            f"{condense_s:g} s; the owner goes on without its proposal, and asks it again when the "
            "view has changed; give its own calls a timeout, or allow more with condense_s"
        )
        self.conversation_id = conversation_id
        self.condense_s = condense_s


class TurnInProgress(Refused):
    """A turn is running, and the call may not interrupt it; nothing was written.

    A chat message gets this with `on_overlap="reject"`, and so does `undo`.
    """

    def __init__(self, conversation_id: str, turn_id: str, attempted: str = "chat message") -> None:
        other = ", or send with another on_overlap" if attempted == "chat message" else ""
        super().__init__(
            f"{attempted} refused on conversation {conversation_id}: turn {turn_id} is running; "
            f"nothing was written; wait for its end, or interrupt it{other}"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class NotWhileTurnRuns(Refused):
    """The events would change the history that a running turn builds on; nothing was written."""

    def __init__(self, conversation_id: str, turn_id: str, attempted: str) -> None:
        super().__init__(
            f"{attempted} refused on conversation {conversation_id}: turn {turn_id} is running and "
            "builds on its history; nothing was written; wait for its end, or cancel it first"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class QueueFull(Refused):
    """The queue of chat messages is full; nothing was written."""

    def __init__(self, conversation_id: str, queued_messages_max: int) -> None:
        super().__init__(
            f"chat message refused on conversation {conversation_id}: {queued_messages_max} are "
            "queued already; nothing was written; send again when some of them have been answered"
        )
        self.conversation_id = conversation_id
        self.queued_messages_max = queued_messages_max


class MessageIdConflict(Refused):
    """The log has this `message_id` with other content or no turn; nothing was written."""

    def __init__(
        self, conversation_id: str, message_id: str, seq: int, *, has_turn: bool = True
    ) -> None:
        found = "with other content" if has_turn else "and was appended by hand, so it has no turn"
        super().__init__(
            f"chat message {message_id} refused on conversation {conversation_id}: seq {seq} has "
            f"this message_id {found}; nothing was written; send under a new id"
        )
        self.conversation_id = conversation_id
        self.message_id = message_id
        self.seq = seq


class EventIdConflict(Refused):
    """The log has these event ids already, and not for the same events; nothing was written.

    Its events have other content or another order, or it has only some of those that were given
    together. `seqs` has the seq of each.
    """

    def __init__(self, conversation_id: str, seqs: Mapping[str, int]) -> None:
        shown = [f"{event_id} at seq {seq}" for event_id, seq in islice(seqs.items(), 3)]
        known, left_out = ", ".join(shown), len(seqs) - len(shown)
        more = f" and {left_out} more" if left_out else ""
        super().__init__(
            f"append refused on conversation {conversation_id}: the log has these ids already, and "
            f"not for the same events in the same order: {known}{more}; nothing was written; leave "
            "out the events that the log has, and use new ids for the others"
        )
        self.conversation_id = conversation_id
        self.seqs = dict(seqs)


class NotAppendable(Refused):
    """Only the owner writes events of this type; nothing was written."""

    def __init__(self, conversation_id: str, event_type: str) -> None:
        super().__init__(
            f"append refused on conversation {conversation_id}: only its owner writes "
            f"events of type {event_type}; nothing was written; send chat messages, or append "
            "events that the model sees"
        )
        self.conversation_id = conversation_id
        self.event_type = event_type


class TooManyLabels(Refused):
    """With this change the conversation would have more labels than it may; nothing was written."""

    def __init__(self, conversation_id: str, labels_max: int) -> None:
        super().__init__(
            f"change refused on conversation {conversation_id}: it would have more than "
            f"{labels_max} labels; nothing was written; remove some, by setting them to None"
        )
        self.conversation_id = conversation_id
        self.labels_max = labels_max


class LabelTooLong(InvalidInput):
    """The name or the value of a label is longer than `Limits` allow; nothing was written."""

    def __init__(self, conversation_id: str, length: int, length_max: int) -> None:
        super().__init__(
            f"change refused on conversation {conversation_id}: a name or a value among its labels "
            f"has {length:,} characters, and {length_max:,} are allowed; nothing was written; keep "
            "long texts elsewhere"
        )
        self.conversation_id = conversation_id
        self.length = length
        self.length_max = length_max


class ContentTooLong(InvalidInput):
    """The text of the chat message is longer than `Limits` allow; nothing was written."""

    def __init__(self, conversation_id: str, length: int, content_length_max: int) -> None:
        super().__init__(
            f"chat message refused on conversation {conversation_id}: its text has {length:,} "
            f"characters, and {content_length_max:,} are allowed; nothing was written; send the "
            "rest as a file"
        )
        self.conversation_id = conversation_id
        self.length = length
        self.content_length_max = content_length_max


class JsonTooDeep(InvalidInput):
    """JSON is nested deeper than it may be; nothing was written."""

    def __init__(self) -> None:
        super().__init__(
            "the JSON is nested too deeply; nothing was written; use fewer levels",
            rule="must have fewer levels of nesting",
        )


class JsonNumberTooLong(InvalidInput):
    """JSON has an integer of more digits than it may have; nothing was written."""

    def __init__(self, digits_max: int) -> None:
        super().__init__(
            f"the JSON has an integer of more than {digits_max:,} digits; nothing was written; "
            "write it as a string",
            rule=f"must have no integer of more than {digits_max} digits; write it as a string",
        )
        self.digits_max = digits_max


class MetadataTooLong(InvalidInput):
    """The metadata of the chat message is longer than `Limits` allow; nothing was written."""

    def __init__(self, conversation_id: str, length: int, metadata_length_max: int) -> None:
        super().__init__(
            f"chat message refused on conversation {conversation_id}: its metadata has {length:,} "
            f"characters as JSON, and {metadata_length_max:,} are allowed; nothing was written; "
            "keep large values elsewhere, and their address here"
        )
        self.conversation_id = conversation_id
        self.length = length
        self.metadata_length_max = metadata_length_max


class TooManyFiles(InvalidInput):
    """The chat message has more files than `Limits` allow; nothing was written."""

    def __init__(self, conversation_id: str, count: int, files_max: int) -> None:
        super().__init__(
            f"chat message refused on conversation {conversation_id}: it has {count} files, and "
            f"{files_max} are allowed; nothing was written; send them in several messages"
        )
        self.conversation_id = conversation_id
        self.count = count
        self.files_max = files_max


class FileTooLarge(InvalidInput):
    """A file of the chat message is larger than `Limits` allow; nothing was written."""

    def __init__(self, conversation_id: str, size: int, file_bytes_max: int) -> None:
        super().__init__(
            f"chat message refused on conversation {conversation_id}: a file has {size:,} bytes, "
            f"and {file_bytes_max:,} are allowed; nothing was written; keep it elsewhere, and send "
            "its address"
        )
        self.conversation_id = conversation_id
        self.size = size
        self.file_bytes_max = file_bytes_max


class NothingToRetract(Refused):
    """None of the events to retract is in the view; nothing was written."""

    def __init__(self, conversation_id: str, turn_id: str | None) -> None:
        what = "no event was found" if turn_id is None else f"turn {turn_id} has none in the view"
        super().__init__(
            f"retraction refused on conversation {conversation_id}: {what}; nothing was written; "
            "retract events that the view still has"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class NotReplaceable(Refused):
    """A chat message cannot be replaced by another; nothing was written.

    `reason`: "joined", it is not the first message of its turn; "not_in_view", it has left the view
    (replaced, retracted, rolled back, withdrawn or condensed); "condensed", a condensation has
    forgotten a part of the turns that would be replaced; "by_hand", the message, or events tied to
    those turns, were appended by hand.
    """

    def __init__(
        self,
        conversation_id: str,
        message_id: str,
        reason: Literal["joined", "not_in_view", "condensed", "by_hand"],
    ) -> None:
        found = {
            "joined": "it has joined the turn of another message; replace that one",
            "not_in_view": "it is not in the view any more: replaced, taken back or condensed",
            "condensed": "a part of the turns to replace is condensed",
            "by_hand": "it, or events tied to its turn, were appended by hand",
        }
        super().__init__(
            f"chat message {message_id} of conversation {conversation_id} cannot be replaced: "
            f"{found[reason]}; nothing was written; send the new message without replaces, or "
            "fork the conversation at an earlier seq"
        )
        self.conversation_id = conversation_id
        self.message_id = message_id
        self.reason = reason


class NotRetractable(Refused):
    """A turn cannot leave the view as a whole; nothing was written.

    `reason`: "condensed", a condensation has forgotten a part of it or of what follows; "by_hand",
    it is tied to events that were appended by hand; "not_newest", a later turn has chat messages in
    the view.
    """

    def __init__(
        self,
        conversation_id: str,
        turn_id: str,
        reason: Literal["condensed", "by_hand", "not_newest"],
    ) -> None:
        elsewhere = "fork the conversation at an earlier seq, or retract events by id"
        found, advice = {
            "condensed": (
                "it is condensed in part, and the summary would still mention it",
                elsewhere,
            ),
            "by_hand": ("it is tied to events that were appended by hand", elsewhere),
            "not_newest": ("a later turn is in the view", "take back the later turns first"),
        }[reason]
        super().__init__(
            f"turn {turn_id} of conversation {conversation_id} cannot be taken back: "
            f"{found}; nothing was written; {advice}"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id
        self.reason = reason


class ResultNotKept(Unavailable):
    """The owner stopped while a result was parked; it is not in the log."""

    def __init__(self, conversation_id: str, tool_call_id: str) -> None:
        super().__init__(
            f"result for call {tool_call_id} was parked on conversation {conversation_id} when "
            "its owner stopped; nothing was written; append it again"
        )
        self.conversation_id = conversation_id
        self.tool_call_id = tool_call_id


class StaleTurn(Refused):
    """The command is from the agent of a turn that no longer runs; nothing was written."""

    def __init__(self, conversation_id: str, turn_id: str) -> None:
        super().__init__(
            f"command refused on conversation {conversation_id}: turn {turn_id} no longer runs; "
            "nothing was written; stop working on it"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class AnswerTooLong(Refused):
    """The agent's answer is longer than `answer_length_max`; its turn fails."""

    def __init__(self, conversation_id: str, turn_id: str, answer_length_max: int) -> None:
        super().__init__(
            f"an answer in turn {turn_id} of conversation {conversation_id} is longer than "
            f"{answer_length_max:,} characters; the turn fails, and what was streamed before is in "
            "the log; ask for less, or allow more with answer_length_max"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id
        self.answer_length_max = answer_length_max


class TurnPaused(Refused):
    """The conversation is paused, and the command waits for `resume`; nothing was written yet."""

    def __init__(self, conversation_id: str, turn_id: str) -> None:
        super().__init__(
            f"turn {turn_id} of conversation {conversation_id} is paused; nothing was written; "
            "it goes on when the conversation is resumed"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class TurnSuspended(Refused):
    """The turn is paused or waits for a confirmation; its agent is run again when it goes on.

    Raised inside an agent's run, to end the run; an agent lets it pass. If an agent catches it,
    every further call on its turn raises it again, and the end of the run does not end the turn.
    """

    def __init__(self, conversation_id: str, turn_id: str) -> None:
        super().__init__(
            f"turn {turn_id} of conversation {conversation_id} is paused or waits for a "
            "confirmation; nothing is lost; its agent is run again when the turn goes on; do not "
            "catch this error"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class NotConfirmable(Refused):
    """No call waits for a confirmation, or other calls than were named; nothing was written."""

    def __init__(self, conversation_id: str, awaiting: Sequence[str] = ()) -> None:
        super().__init__(
            f"these are not the calls that wait on conversation {conversation_id}; nothing was "
            "written; another caller may have answered, so read the log before you answer all that "
            f"wait, together: {', '.join(awaiting)}"
            if awaiting
            else f"nothing to confirm on conversation {conversation_id}: no call waits; nothing "
            "was written; another caller may have answered, so read the log"
        )
        self.conversation_id = conversation_id
        self.awaiting = tuple(awaiting)


class TurnNotCompleted(OutcomeUnknown):
    """The turn ended without a full answer; the chat message is in the log.

    `outcome` is how it ended, `reply` the text that had been said by then. Tools may have run.
    """

    def __init__(
        self, conversation_id: str, turn_id: str, outcome: str, detail: str, reply: str
    ) -> None:
        turn = f"turn {turn_id} of conversation {conversation_id}"
        kept = "its chat message and all that was said are in the log"
        super().__init__(
            f"{turn} failed; {kept}; the reason was {detail}"  # an error, which says what to do
            if outcome == "failed"
            else f"{turn} ended as {outcome}: {detail}; {kept}; read them, or send another one"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id
        self.outcome = outcome
        self.detail = detail
        self.reply = reply


class ConversationNotFound(Refused):
    """The conversation does not exist; reading it created nothing."""

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"no conversation {conversation_id} in the journal; nothing was created; "
            "send a chat message to begin it"
        )
        self.conversation_id = conversation_id


class NotYours(ConversationNotFound):
    """The conversation belongs to another user than the command expects; nothing was written.

    It is a `ConversationNotFound`, so that code which handles that does not reveal to the caller
    that the conversation exists.
    """

    def __init__(self, conversation_id: str) -> None:
        Refused.__init__(
            self,
            f"conversation {conversation_id} does not belong to the expected user; nothing was "
            "written; take another id, or let its user share it",
        )
        self.conversation_id = conversation_id


class Forbidden(Refused):
    """The process that owns the conversation does not allow this principal the command.

    Nothing was written. The process that took the request had allowed it, and forwarded it.
    """

    def __init__(self, conversation_id: str, principal: str) -> None:
        super().__init__(
            f"principal {principal} may not change conversation {conversation_id}, by the rules of "
            "the process that owns it; nothing was written; ask for permission there"
        )
        self.conversation_id = conversation_id
        self.principal = principal


class NotThisLog(Refused):
    """The log is not the one that the command expects; nothing was written."""

    def __init__(self, conversation_id: str, seq: int) -> None:
        super().__init__(
            f"conversation {conversation_id} does not have the expected event at seq {seq}: it was "
            "deleted, and perhaps begun again; nothing was written; read it from its beginning"
        )
        self.conversation_id = conversation_id
        self.seq = seq


class ConversationDeleted(Refused):
    """The conversation was deleted while it was read or waited for; its log is gone."""

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"conversation {conversation_id} was deleted while it was read or waited for; "
            "this call changed nothing; send a chat message to begin a new one under that id"
        )
        self.conversation_id = conversation_id


class ConversationExists(Refused):
    """The conversation exists already; nothing was changed."""

    def __init__(self, conversation_id: str, head: int) -> None:
        super().__init__(
            f"conversation {conversation_id} exists already and ends at seq {head}; "
            "nothing was changed; use another id, or delete it first"
        )
        self.conversation_id = conversation_id
        self.head = head


class MessageNotFound(Refused):
    """The conversation has no chat message of this id with a turn; nothing was changed.

    `to_replace`: a chat message was sent that should have replaced it.
    """

    def __init__(self, conversation_id: str, message_id: str, *, to_replace: bool = False) -> None:
        advice = (
            "as `replaces`, give the message_id of a chat message in this conversation, or leave "
            "it out to send a new one"
            if to_replace
            else "send the message, which is safe under the same id"
        )
        super().__init__(
            f"no chat message {message_id} with a turn in conversation {conversation_id}; nothing "
            f"was changed; {advice}"
        )
        self.conversation_id = conversation_id
        self.message_id = message_id


class RecordNotFound(Refused):
    """The log has no record at this seq; nothing was changed."""

    def __init__(self, conversation_id: str, seq: int, head: int) -> None:
        super().__init__(
            f"no record at seq {seq} of conversation {conversation_id}, which ends at seq {head}; "
            "nothing was changed; choose a seq that it has"
        )
        self.conversation_id = conversation_id
        self.seq = seq
        self.head = head


class ImportRefused(Refused):
    """A line of an export cannot be used; the conversations before it are imported.

    Perhaps some records of its own conversation are, too.
    """

    def __init__(self, line: int, found: str) -> None:
        super().__init__(
            f"import stopped at line {line}: {found}; the conversations before it are imported, "
            "and perhaps some records of its own; correct the file and import it again"
        )
        self.line = line
        self.found = found


class CorruptLog(Refused):
    """A stored log cannot be read; it was not changed, and it is never opened as if empty.

    `others` are further conversations that the same call found damaged.
    """

    def __init__(
        self, conversation_id: str, seq: int, found: str, *, others: Sequence[str] = ()
    ) -> None:
        shown = others[:10]
        left_out = len(others) - len(shown)
        more = f" and {left_out} more" if left_out else ""
        also = f"further damaged conversations: {', '.join(shown)}{more}; " if others else ""
        super().__init__(
            f"conversation {conversation_id} cannot be read at seq {seq}: {found}; "
            f"it was not changed; {also}"
            "run `turnkeeper verify`, then repair the journal, or restore a backup"
        )
        self.conversation_id = conversation_id
        self.seq = seq
        self.found = found
        self.others = tuple(others)


class JournalRefused(Refused):
    """The journal cannot be used as it is: not a journal, a newer schema, in use."""


class SearchIsOff(Refused):
    """The journal was opened without `search=True`, or has no index to read."""

    def __init__(self, journal: str) -> None:
        super().__init__(
            f"search refused: {journal} was opened without an index of words; nothing was read; "
            "open it for writing with search=True"
        )


class OwnedElsewhere(OwnershipLost):
    """Another process owns this; nothing was changed.

    With `is_file` it is a file, and that process is alive: its lock ends with it. Else it is a
    conversation, and that process may have been killed a moment ago: its lease has not run out.
    With `is_older` that process was asked, and cannot read the command: it runs an older version.
    """

    def __init__(
        self, owned: str, owner: str, *, is_file: bool = False, is_older: bool = False
    ) -> None:
        if is_file:
            whose = (
                "which is alive; nothing was changed; stop it, or let several processes share a "
                "PostgresJournal; if it hangs, take the file with "
                "SQLiteJournal(path, takeover=True)"
            )
        elif is_older:
            whose = (
                "which cannot read the command, since it runs an older version of turnkeeper; "
                "nothing was changed; replace that process, or try again later"
            )
        else:
            whose = (
                "whose lease has not run out; nothing was changed; send to that owner, or try "
                "again later"
            )
        super().__init__(f"{owned} is owned by {owner}, {whose}")
        self.owned = owned
        self.owner = owner
        self.is_file = is_file
        self.is_older = is_older


class Fenced(OwnershipLost):
    """A newer owner has claimed the conversation, or the head has moved; nothing was written.

    `found_epoch` and `head` are the conversation's in the journal. A `found_epoch` below `epoch`
    means that the journal has lost the claim, as a standby that was promoted may have. If the two
    are equal, `holder` is the address of the process that has the epoch, or empty if it was
    released; it is None if only the head is another.
    """

    def __init__(
        self,
        conversation_id: str,
        *,
        epoch: int,
        expected_seq: int,
        found_epoch: int,
        head: int,
        holder: str | None = None,
    ) -> None:
        if found_epoch > epoch:
            found = f"its epoch {epoch} is fenced by epoch {found_epoch}"
        elif found_epoch < epoch:
            found = f"its epoch {epoch} is not in the journal, which has epoch {found_epoch}"
        elif not epoch:
            found = "it has claimed no epoch"
        elif holder is None:
            found = f"its epoch {epoch} is the newest, but the log does not end there"
        else:
            found = f"its epoch {epoch} " + (f"is held by {holder}" if holder else "was released")
        super().__init__(
            f"the owner of conversation {conversation_id} is replaced: at seq {expected_seq} "
            f"{found}, head {head}; nothing was written; send again, to the newer owner if there "
            "is one"
        )
        self.conversation_id = conversation_id
        self.epoch = epoch
        self.expected_seq = expected_seq
        self.found_epoch = found_epoch
        self.head = head
        self.holder = holder


class LeaseExpired(OwnershipLost):
    """This process's lease ran out, so another process may own the conversation; nothing was done.

    Its owner here no longer starts effects, nor answers queries from memory.
    """

    def __init__(self, conversation_id: str, epoch: int) -> None:
        super().__init__(
            f"the owner of conversation {conversation_id} has ended: the lease behind its epoch "
            f"{epoch} has run out, so another process may own it; nothing was done; send again to "
            "open it here, or to the newer owner"
        )
        self.conversation_id = conversation_id
        self.epoch = epoch


class JournalUnavailable(Unavailable):
    """The journal cannot write or read at the moment; nothing was written."""


class JournalOutcomeUnknown(OutcomeUnknown):
    """The journal failed during a commit, which may have happened; send the same ids again."""
