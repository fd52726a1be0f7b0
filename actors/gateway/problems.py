"""Problem documents (RFC 9457): one table from every public error to a status and a type.

A document names the kind of problem and the advice that goes with it, and the facts that a program
needs to act. It never holds an error's own text, which names stored ids and may quote an argument.
The types are stable: clients compare them and need not parse sentences.

`OutcomeUnknown` is 504: the request may have taken effect; sending it again under the same key
tells. `Unavailable` and `OwnershipLost` are 503 with `Retry-After`: nothing happened. A log that
cannot be read is 500, which alerts operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from turnkeeper.runtime import TurnkeeperError

__all__ = ["OWN", "TABLE", "Problem", "ProblemRaised", "once_it_happened", "problem_of"]

TYPE_PREFIX = "urn:turnkeeper:"
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of problem, as a client sees it."""

    status: int
    name: str
    """The last part of the problem's type."""
    detail: str
    retry_after_s: int | None = None
    """Sent as `Retry-After` if the same request may succeed later."""
    facts: tuple[str, ...] = ()
    """The names of the error's attributes that the document shows."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return TYPE_PREFIX + self.name

    def document(self, facts: Mapping[str, object] | None) -> dict[str, object]:
        """Return the problem document: the members that RFC 9457 defines, and these facts."""
        title = self.name.replace("-", " ")
        own = {"type": self.type, "title": title, "status": self.status, "detail": self.detail}
        return {**(facts or {}), **own}


class ProblemRaised(Exception):
    """Ends a request with one of the gateway's own problems."""

    def __init__(
        self, problem: Problem, facts: Mapping[str, object] | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(problem.name)
        self.problem = problem
        self.facts = facts or {}
        self.retry_after_s = retry_after_s or problem.retry_after_s


def _retry(name: str, detail: str, *facts: str) -> Problem:
    return Problem(503, name, detail, RETRY_AFTER_S, facts)


_INVALID_ID = "new ids have 1 to 256 characters, no controls, no slash"
_LATER = "nothing happened; send the same request again"
_UNKNOWN = "it may have happened; send the same request again, under the same Idempotency-Key"

_NONE = Problem(404, "conversation-not-found", "there is no conversation of this id")
_FORBIDDEN = Problem(403, "forbidden", "who sent this request may not do it")
_ANOTHER = Problem(
    412, "precondition-failed", "this is not the conversation that the request expects"
)

TABLE: Mapping[str, Problem] = {
    # --- the five base classes, for an error without a row of its own
    "Refused": Problem(409, "refused", "the current state does not allow this request"),
    "OwnershipLost": _retry("owner-moved", f"another process owns the conversation; {_LATER}"),
    "Unavailable": _retry("unavailable", _LATER),
    "OutcomeUnknown": Problem(504, "outcome-unknown", _UNKNOWN, RETRY_AFTER_S),
    "InvariantViolation": Problem(500, "fault", "the server found a bug of its own; report it"),
    # --- the conversation that a request names, and its arguments
    "ConversationNotFound": _NONE,
    "NotYours": _NONE,  # a client cannot tell it from a conversation that does not exist
    "NotThisLog": _ANOTHER,
    "Forbidden": _FORBIDDEN,
    "RecordNotFound": Problem(
        404, "record-not-found", "the log has no event at this seq", facts=("seq", "head")
    ),
    "ConversationDeleted": Problem(
        410, "conversation-deleted", "the conversation was deleted meanwhile"
    ),
    "ConversationExists": Problem(
        409, "conversation-exists", "this id is in use; take another one"
    ),
    "InvalidInput": Problem(422, "invalid-input", "an argument is invalid; nothing was written"),
    "InvalidConversationId": Problem(422, "invalid-id", _INVALID_ID),
    "SearchIsOff": Problem(404, "search-is-off", "this server has no search index"),
    "ImportRefused": Problem(
        422, "import-refused", "a line of the import is invalid", facts=("line",)
    ),
    "NotAppendable": Problem(422, "not-appendable", "only the owner writes events of this kind"),
    # --- chat messages
    "TurnInProgress": Problem(
        409,
        "turn-in-progress",
        "a turn runs, and this request may not end it; nothing was written; wait for the turn's "
        "end, or interrupt it",
        facts=("turn_id",),
    ),
    "QueueFull": Problem(
        429,
        "queue-full",
        "too many messages wait; nothing was written; send this one again later",
        RETRY_AFTER_S,
        ("queued_messages_max",),
    ),
    "MessageIdConflict": Problem(
        409,
        "message-id-conflict",
        "this Idempotency-Key was used with other content; nothing was written; take a new one",
        facts=("message_id", "seq"),
    ),
    "ContentTooLong": Problem(
        413,
        "content-too-long",
        "the text is too long; nothing was written; send the rest as a file",
        facts=("length", "content_length_max"),
    ),
    "JsonTooDeep": Problem(
        422, "json-too-deep", "the JSON is nested too deeply; nothing was written"
    ),
    "JsonNumberTooLong": Problem(
        422,
        "json-number-too-long",
        "an integer has too many digits; nothing was written; write it as a string",
        facts=("digits_max",),
    ),
    "MetadataTooLong": Problem(
        413,
        "metadata-too-long",
        "the metadata is too long; nothing was written; keep large values elsewhere",
        facts=("length", "metadata_length_max"),
    ),
    "TooManyFiles": Problem(
        413,
        "too-many-files",
        "the message has too many files; nothing was written; send several messages",
        facts=("count", "files_max"),
    ),
    "FileTooLarge": Problem(
        413,
        "file-too-large",
        "a file is too large; nothing was written; send the address of a file kept elsewhere",
        facts=("size", "file_bytes_max"),
    ),
    "EventIdConflict": Problem(
        409,
        "event-id-conflict",
        "the log has these event ids for other events; nothing was written; use new event ids",
        facts=("seqs",),
    ),
    "AdmissionRefused": Problem(
        409, "not-admitted", "the log, as it is now, does not admit this event"
    ),
    "MessageNotFound": Problem(
        404, "message-not-found", "no message of this id has a turn here", facts=("message_id",)
    ),
    "TooManyLabels": Problem(
        409,
        "too-many-labels",
        "these would be too many labels; nothing was written; remove some first",
        facts=("labels_max",),
    ),
    "LabelTooLong": Problem(
        413,
        "label-too-long",
        "the name or the value of a label is too long; nothing was written",
        facts=("length", "length_max"),
    ),
    # --- turns
    "NotWhileTurnRuns": Problem(
        409,
        "not-while-turn-runs",
        "a turn runs and builds on this; nothing was written; interrupt it or wait for its end",
        facts=("turn_id",),
    ),
    "NothingToRetract": Problem(409, "nothing-to-retract", "none of these events is in the view"),
    "NotRetractable": Problem(
        409,
        "not-retractable",
        "the turn cannot leave the view as a whole; nothing was written",
        facts=("turn_id", "reason"),
    ),
    "NotReplaceable": Problem(
        409,
        "not-replaceable",
        "the message cannot be replaced; nothing was written; send the new one on its own",
        facts=("message_id", "reason"),
    ),
    "NotConfirmable": Problem(
        409,
        "not-confirmable",
        "these are not the calls that wait; nothing was written; read the log, and answer all in "
        "`awaiting`, if any",
        facts=("awaiting",),
    ),
    "StaleTurn": Problem(409, "stale-turn", "this turn no longer runs", facts=("turn_id",)),
    "TurnPaused": Problem(
        409, "turn-paused", "the turn goes on when it is resumed", facts=("turn_id",)
    ),
    "TurnSuspended": Problem(
        409, "turn-held", "the turn is held; nothing is lost", facts=("turn_id",)
    ),
    "TurnNotCompleted": Problem(
        504,
        "turn-not-completed",
        "the turn ended without a full answer; read the conversation",
        facts=("turn_id", "outcome"),
    ),
    "ContextTooLong": Problem(
        409,
        "context-too-long",
        "the history is too long for the model; send a shorter message",
        facts=("turn_id",),
    ),
    "CondenserTooSlow": _retry("condenser-too-slow", f"the condenser took too long; {_LATER}"),
    "AnswerTooLong": Problem(
        409,
        "answer-too-long",
        "the model's answer is too long; ask for less",
        facts=("turn_id", "answer_length_max"),
    ),
    "TooManyIterations": Problem(409, "too-many-steps", "the agent took too many steps"),
    "BudgetSpent": Problem(409, "budget-spent", "the turn has used up its budget"),
    "TokensSpent": Problem(409, "budget-spent", "the turn has used up its budget"),
    "EmptyResponse": Problem(502, "empty-response", "the model gave no answer"),
    "OpenCalls": Problem(
        409, "open-calls", "calls have no result yet; ask again later", facts=("tool_call_ids",)
    ),
    "OutsideTurn": Problem(500, "outside-turn", "the server's agent used a turn outside of it"),
    "ForeignLoop": Problem(500, "foreign-loop", "the server's agent left its event loop"),
    "RunsOverlap": Problem(409, "runs-overlap", "two runs of the agent overlap"),
    "ExternalCalls": Problem(
        500, "external-calls", "the agent called tools that run outside of it"
    ),
    # --- models and tools
    "ModelError": Problem(502, "model-error", "the model's provider refused the request"),
    "ModelRefusal": Problem(502, "model-refusal", "the model declined to answer"),
    "ContextOverflow": Problem(502, "context-overflow", "the history is too long for the model"),
    "MalformedHistory": Problem(
        502, "malformed-history", "the model's provider refused the history as malformed"
    ),
    "ModelUnavailable": _retry("model-unavailable", _LATER),
    "McpUnavailable": _retry("tools-unavailable", _LATER),
    "ResultNotKept": _retry(
        "result-not-kept", "nothing was written; append the result again", "tool_call_id"
    ),
    # --- owners
    "OwnedElsewhere": _retry("owned-elsewhere", f"another process owns the conversation; {_LATER}"),
    "Fenced": _retry("owner-moved", f"a newer owner has taken over; {_LATER}"),
    "LeaseExpired": _retry("owner-moved", f"this process lost its lease; {_LATER}"),
    "ConversationsClosed": _retry("closing", f"this server is closing; {_LATER}"),
    "Draining": _retry("draining", f"this server is about to stop; {_LATER}"),
    # --- the journal
    "JournalUnavailable": _retry("journal-unavailable", f"the journal cannot be used; {_LATER}"),
    "JournalOutcomeUnknown": Problem(504, "outcome-unknown", _UNKNOWN, RETRY_AFTER_S),
    "JournalRefused": Problem(
        500, "journal-refused", "the server cannot use its journal; its operator has to look at it"
    ),
    "CorruptLog": Problem(
        500,
        "corrupt-log",
        "the stored log is damaged; its operator has to repair it",
        facts=("seq",),
    ),
    # --- the runtime
    "MailboxFull": _retry("overloaded", _LATER),
    "AskCycle": Problem(409, "circle", "the request would wait for itself"),
    "ActorEnded": _retry("closing", _LATER),
    "NotDelivered": _retry("unavailable", _LATER),
    "NotStartedInTime": _retry("overloaded", _LATER),
    "TooManyRestarts": _retry(
        "unavailable", f"the conversation's owner failed too often; {_LATER}"
    ),
    "TooManyThreads": _retry("overloaded", _LATER),
    "NotAnsweredInTime": Problem(504, "outcome-unknown", _UNKNOWN, RETRY_AFTER_S),
    "ActorFailed": Problem(504, "outcome-unknown", _UNKNOWN, RETRY_AFTER_S),
}
"""The problem of each public error, by the name of its class."""

OWN: Mapping[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(400, "malformed", "the request cannot be read"),
        Problem(
            401,
            "unauthenticated",
            "the server does not know who sent this request; send credentials, such as a bearer "
            "token in the Authorization header",
            headers={"WWW-Authenticate": "Bearer"},
        ),
        _FORBIDDEN,
        Problem(
            403,
            "foreign-origin",
            "pages of this origin may not write here; if the page is this server's own, a proxy "
            "before it must pass on `Host` with its port; else its operator can allow the origin "
            "(`origins`, or `turnkeeper serve --allow-origin`)",
        ),
        Problem(
            404, "not-found", "there is nothing at this address; `openapi.json` lists all there are"
        ),
        Problem(
            405, "method-not-allowed", "this address takes only the methods in the header Allow"
        ),
        Problem(405, "read-only", "this server only reads", headers={"Allow": "GET, HEAD"}),
        Problem(408, "too-slow", "the body did not arrive in time"),
        Problem(
            409, "run-id-conflict", "this runId was used with other input; nothing was written"
        ),
        Problem(
            410,
            "gone",
            "the log no longer has the event of this cursor; read it from its beginning",
        ),
        _ANOTHER,
        Problem(413, "too-large", "the body is too large"),
        Problem(415, "not-json", "send Content-Type: application/json"),
        Problem(
            415,
            "encoded",
            "send the body as it is, without a Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        ),
        Problem(
            421,
            "unknown-host",
            "this server is not known by the name in `Host`; its operator can allow it (`hosts`, "
            "or `turnkeeper serve --allow-host`)",
        ),
        Problem(422, "invalid-request", "nothing was written; `errors` says what to correct"),
        Problem(422, "invalid-id", _INVALID_ID),
        Problem(422, "too-deep", "the body is nested too deeply"),
        Problem(429, "too-many-requests", "send less often"),
        Problem(431, "headers-too-large", "the headers are too large"),
        Problem(500, "internal", "the server failed; its own log says where"),
        _retry("draining", f"this server is about to stop; {_LATER}"),
        _retry("not-open", f"this server is starting or closing; {_LATER}"),
        _retry("not-writing", f"this server may not write now, and another one may; {_LATER}"),
        _retry("out-of-threads", f"calls that hang take up all threads of this server; {_LATER}"),
    )
}
"""The gateway's own problems, by name."""


def problem_of(error: TurnkeeperError) -> tuple[Problem, Mapping[str, object]]:
    """Return the problem for an error, and its facts."""
    for kind in type(error).__mro__:
        problem = TABLE.get(kind.__name__)
        if problem is not None:
            facts = {name: getattr(error, name) for name in problem.facts}
            return problem, facts
    return OWN["internal"], {}


@contextmanager
def once_it_happened() -> Iterator[None]:
    """Keep an error inside from saying that nothing happened: what was asked for has been done."""
    try:
        yield
    except TurnkeeperError as error:
        if problem_of(error)[0].status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ProblemRaised(TABLE["OutcomeUnknown"]) from error
        raise
