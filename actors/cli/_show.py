"""Prints the contents of a journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from ..core.listing import ListedConversation
from ..core.steps import Step
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationSummaryEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    ConversationErrorEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    ObservationEvent,
    RetractionEvent,
    StepFinishedEvent,
    StepUnfinishedEvent,
    SystemPromptEvent,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from ..journal import ConversationInfo, Rejection
from ._display import many, printable

__all__ = [
    "conversation_json",
    "infos_json",
    "is_about",
    "print_chat",
    "print_infos",
    "print_rejection",
    "print_step",
    "rejection_json",
    "said_by",
    "step_json",
    "view_json",
]

_CALL_LENGTH_MAX = 300
_RESULT_LENGTH_MAX = 600
_WIDTH = 80
_NAME_WIDTH_MAX = 40
_TOOL_NAME_MAX = 64  # as long as a tool's name can be; a model may call one that there is not


def infos_json(
    infos: Sequence[ConversationInfo], rows: Sequence[ListedConversation]
) -> Mapping[str, object]:
    listed = {row.conversation_id: row for row in rows}
    return {
        "conversations": [
            {
                "conversation": info.conversation_id,
                "events": info.head,
                "epoch": info.epoch,
                "is_unfinished": info.is_unfinished,
                "updated_at": _time(info).isoformat(),
                **_listed_json(listed.get(info.conversation_id)),
            }
            for info in infos
        ]
    }


def _listed_json(row: ListedConversation | None) -> Mapping[str, object]:
    if row is None:
        return {}
    return {
        "title": row.title,
        "owner": row.owner,
        "labels": dict(row.labels),
        "status": row.status,
        "queued": row.queued,
        "waits_for": row.waits_for,
        "is_stale": row.is_stale,
    }


def print_infos(
    console: Console, infos: Sequence[ConversationInfo], rows: Sequence[ListedConversation]
) -> None:
    """Print a line for each conversation, never cut, so that a program can read it."""
    listed = {row.conversation_id: row for row in rows}
    longest = max([len("conversation"), *(len(printable(i.conversation_id)) for i in infos)])
    width = min(longest, _NAME_WIDTH_MAX)  # one long name does not push all rows to the right
    console.print(
        Text(f"{'conversation':<{width}}  events  epoch  last written", style="bold"),
        soft_wrap=True,
    )
    for info in infos:
        state = "  unfinished" if info.is_unfinished else ""
        line = (
            f"{printable(info.conversation_id):<{width}}  {info.head:>6}  {info.epoch:>5}  "
            f"{_time(info):%Y-%m-%d %H:%M:%S}Z{state}"
        )
        console.print(Text(line), soft_wrap=True)
        about = _about(listed.get(info.conversation_id))
        if about:
            shown = Text(f"  {about}", style="dim")
            shown.truncate(_WIDTH, overflow="ellipsis")
            console.print(shown, soft_wrap=True)


def _about(row: ListedConversation | None) -> str:
    """Return the status, the title, the labels and the user of a conversation, in one line."""
    if row is None:
        return ""
    asks = row.waits_for == "confirmation"
    waits = f" of {printable(', '.join(row.waiting_calls))}" if asks else ""
    queued = f", {row.queued} queued" if row.queued else ""
    stale = ", stale" if row.is_stale and row.status else ""
    parts = [f"{row.status.replace('_', ' ')}{waits}{queued}{stale}" if row.status else ""]
    if row.title:
        parts.append(f"“{printable(row.title)}”")
    parts += [printable(f"{name}={value}" if value else name) for name, value in row.labels.items()]
    if row.owner:
        parts.append(f"of {printable(row.owner)}")
    return "  ".join(part for part in parts if part)


def _time(info: ConversationInfo) -> datetime:
    return datetime.fromtimestamp(info.updated_at, UTC)


def is_about(info: ConversationInfo, row: ListedConversation | None, word: str) -> bool:
    """True if a conversation's name, title, user or labels have this word, in any case."""
    texts = [info.conversation_id]
    if row is not None:
        texts += [row.title, row.owner, *(f"{name}={value}" for name, value in row.labels.items())]
    return any(word.casefold() in text.casefold() for text in texts)


def conversation_json(conversation_id: str, log: Sequence[LoggedEvent]) -> Mapping[str, object]:
    return {
        "conversation": conversation_id,
        "events": [{"seq": seq, **event.model_dump(mode="json")} for seq, event in log],
    }


def view_json(conversation_id: str, seq: int, view: Sequence[LoggedEvent]) -> Mapping[str, object]:
    """Return a view; an event that condensation made has no seq."""
    return {
        "conversation": conversation_id,
        "at": seq,
        "view": [{"seq": at or None, **event.model_dump(mode="json")} for at, event in view],
    }


def step_json(number: int, step: Step) -> Mapping[str, object]:
    """Return the facts of a model call."""
    return {
        "step": number,
        "seq": step.seq,
        "turn_id": step.turn_id,
        "outcome": step.outcome,
        "model": step.model,
        "view_seq": step.view_seq,
        "response_id": step.response_id,
        "usage": step.usage.model_dump(mode="json"),
    }


def print_step(console: Console, number: int, of: int, step: Step) -> None:
    """Print the facts of a model call, in a line or two."""
    usage = step.usage
    facts = [f"step {number} of {of}", step.outcome, f"view at seq {step.view_seq}"]
    facts += [printable(step.model)] if step.model else []
    if usage.input_tokens or usage.output_tokens:
        facts.append(f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out")
    facts += [f"{usage.latency_s:.1f} s"] if usage.latency_s else []
    facts += [f"response {printable(step.response_id)}"] if step.response_id else []
    console.print(Text(", ".join(facts), style="bold"))


def rejection_json(rejection: Rejection) -> Mapping[str, object]:
    return {
        "at": datetime.fromtimestamp(rejection.at, UTC).isoformat(),
        "violation": rejection.violation,
        "reason": rejection.reason,
        "event": rejection.payload.decode(errors="replace"),
    }


def print_rejection(console: Console, rejection: Rejection) -> None:
    """Print a rejected event: its time, the reason, and the start of its payload."""
    at = datetime.fromtimestamp(rejection.at, UTC)
    head = f"{at:%Y-%m-%d %H:%M:%S}Z  {rejection.violation}: {rejection.reason}"
    console.print(Text(printable(head), style="bold"), soft_wrap=True)
    payload = _cut(rejection.payload.decode(errors="replace"), _RESULT_LENGTH_MAX)
    console.print(Text(f"    {printable(payload)}"), soft_wrap=True)


def print_chat(console: Console, events: Sequence[LoggedEvent], log: Sequence[LoggedEvent]) -> None:
    """Print events as a chat: seq, time, author, text; a line announces each new day.

    The results of calls that ran side by side name their calls: they come in any order. The calls
    are looked for in the whole log, because `events` may be a part without them.
    """
    day = ""
    actions = [(seq, event) for seq, event in log if isinstance(event, ActionEvent)]
    calls = Counter(event.llm_response_id for _, event in actions)
    together = {
        event.tool_call_id: f"{_cut(event.tool_name, _TOOL_NAME_MAX)} (seq {seq}): "
        for seq, event in actions
        if calls[event.llm_response_id] > 1
    }
    width = max([3, *(len(str(seq)) for seq, _ in events)])
    for seq, event in events:
        if isinstance(event, CondensationSummaryEvent):
            head = " " * (width + 10)  # made by a condensation: it has no seq and no time
        else:
            at = event.timestamp
            if f"{at:%Y-%m-%d}" != day:
                day = f"{at:%Y-%m-%d}"
                console.print(Text(f"{day}, times in UTC", style="dim"))
            head = f"{seq:>{width}}  {at:%H:%M:%S}"
        call = ""
        if isinstance(event, ObservationEvent | AgentErrorEvent | UserRejectEvent):
            call = together.get(event.tool_call_id, "")
        _print_event(console, head, event, call)


def _print_event(console: Console, head: str, event: Event, call: str) -> None:
    style, author, said = said_by(event)
    said = call + said
    head = f"{head}  {author:<9}  "
    text = Text(printable(said).rstrip() or "(empty)", style=style)
    for number, line in enumerate(text.wrap(console, max(20, console.width - len(head)))):
        shown = Text(head if number == 0 else " " * len(head), style=style or "bold") + line
        shown.rstrip()
        console.print(shown, soft_wrap=True)


def said_by(event: Event, *, is_whole: bool = False) -> tuple[str, str, str]:
    """Return a style, the author in at most nine letters, and the text, cut unless it is whole."""
    call_length_max, result_length_max, value_length_max = (
        (None, None, None) if is_whole else (_CALL_LENGTH_MAX, _RESULT_LENGTH_MAX, 80)
    )
    match event:
        case SystemPromptEvent():
            return "dim", "system", event.content
        case UserMessageEvent():
            images = "".join(
                f"\n[image {_cut(image.url, value_length_max)}]" for image in event.images
            )
            return "", "user", _signed(event) + images
        case MessageQueuedEvent():
            return "dim", "queued", _signed(event)
        case AgentMessageEvent():
            return "", "agent", event.content + (" [interrupted]" if event.interrupted else "")
        case ActionEvent():
            values = (f"{key}={_compact(value)}" for key, value in event.arguments.items())
            call = _cut(f"{event.tool_name}({', '.join(values)})", call_length_max)
            return "cyan", "call", f"{event.text}\n{call}" if event.text else call
        case ObservationEvent():
            kind = "error" if event.is_error else "result"
            return "cyan", kind, _cut(event.content, result_length_max)
        case AgentErrorEvent():
            return "yellow", "error", event.content
        case UserRejectEvent():
            return "yellow", "rejected", event.content
        case CondensationEvent():
            forgotten = f"{len(event.forgotten_event_ids)} events leave the view"
            summary = f": {event.summary}" if event.summary else ""
            return "dim", "condensed", forgotten + summary
        case CondensationSummaryEvent():
            return "", "summary", event.content
        case TurnEndedEvent():
            return "dim", "turn", f"{event.outcome}{f' ({event.detail})' if event.detail else ''}"
        case ConversationErrorEvent():
            return "red", "failure", f"{event.error}: {event.detail}"
        case _:
            in_short = _said_in_short(event)
            if in_short is not None and not is_whole:
                return in_short
            rest = event.model_dump(mode="json", exclude={"id", "timestamp", "turn_id", "kind"})
            fields = " ".join(_fields(rest, value_length_max))
            if in_short is None:
                return "dim", "event", f"{event.kind} {fields}".rstrip()
            style, by, said = in_short
            return style, by, f"{said}\n{fields}".rstrip()


def _said_in_short(event: Event) -> tuple[str, str, str] | None:
    """Do the same as `said_by` for events that matter little to a reader of the chat."""
    match event:
        case TurnStartedEvent():
            return "dim", "turn", "started"
        case StepFinishedEvent():
            return "dim", "step", _told_usage(event.usage)
        case StepUnfinishedEvent():
            return "dim", "step", f"{event.outcome}, {_told_usage(event.usage)}"
        case ConfirmationRequestedEvent():
            calls = len(event.tool_call_ids)
            return "yellow", "question", f"{many(calls, 'call')} to confirm"
        case ConfirmationGivenEvent():
            some = f", {len(event.rejected)} rejected" if event.rejected else ""
            return "yellow", "answer", f"confirmed{some}" if event.confirmed else "rejected"
        case RetractionEvent():
            retracted = many(len(event.retracted_event_ids), "event")
            return "dim", "retracted", f"{retracted} taken out of the view"
        case _:
            return None


def _told_usage(usage: TokenUsage) -> str:
    """Return the model, the tokens and the time of a model call, as far as they are known."""
    tokens = usage.input_tokens or usage.output_tokens
    parts = [
        usage.model or "model call",
        f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out" if tokens else "",
        f"{usage.latency_s:.2f} s" if usage.latency_s else "",
    ]
    return ", ".join(part for part in parts if part)


def _signed(event: UserMessageEvent | MessageQueuedEvent) -> str:
    said = event.content if event.author is None else f"{event.author}: {event.content}"
    return said + "".join(f"\n[file {file.name}]" for file in event.files)


def _fields(rest: Mapping[str, object], length_max: int | None) -> Iterator[str]:
    for key, value in _filled(rest).items():
        yield f"{key}={_cut(_compact(value), length_max)}"


def _filled(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields without those that are empty or zero, and the same within each."""
    shown = {
        key: _filled(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
    }
    return {key: value for key, value in shown.items() if value or value is False}


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str, length_max: int | None) -> str:
    if length_max is None or len(text) <= length_max:
        return text
    return f"{text[:length_max]}… (and {len(text) - length_max:,} characters)"
