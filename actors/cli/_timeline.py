"""A conversation as one page of HTML: a timeline of each turn above its chat.

The page needs nothing else: no script, no font, no picture, no network. All content of the
conversation is plain text in it, and a policy in its head tells browsers to load and run nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html import escape
from typing import Final

from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    LoggedEvent,
    MessageQueuedEvent,
    PausedEvent,
    ResumedEvent,
    StepFinishedEvent,
    StepUnfinishedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from ._display import many, printable
from ._show import said_by

__all__ = ["timeline"]

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --line: #d1d9e0; --quiet: #59636e; --back: #f6f8fa;
  --model: #8250df; --tool: #bc4c00; --wait: #9a6700; --bad: #cf222e }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #3d444d; --quiet: #9198a1;
  --back: #151b23; --model: #ab7df8; --tool: #db6d28; --wait: #d29922; --bad: #f85149 }} }}
body {{ font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem }}
h1 {{ font-size: 1.3rem; margin: 0 }} h2 {{ font-size: 1rem; margin: 0 0 .5rem }}
.quiet, .seq, .time {{ color: var(--quiet); font-weight: normal }}
section {{ border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: 1rem 0 }}
.bars {{ background: var(--back); border-radius: 6px; padding: .4rem .6rem; margin-bottom: .6rem }}
.row {{ display: grid; grid-template-columns: 11rem 1fr 4.5rem; gap: .6rem; align-items: center;
  font-size: .85rem }}
.row span {{ overflow: hidden; text-overflow: ellipsis; white-space: nowrap }}
.row span:last-child {{ text-align: right; color: var(--quiet) }}
.lane {{ position: relative; height: .7rem }}
.bar {{ position: absolute; top: 0; bottom: 0; min-width: 2px; border-radius: 3px }}
.model {{ background: var(--model) }} .tool {{ background: var(--tool) }}
.wait {{ background: var(--wait) }}
.event {{ display: grid; grid-template-columns: 3rem 5rem 5.5rem 1fr; gap: .6rem;
  border-top: 1px solid var(--line); padding: .3rem 0 }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem; overflow: auto }}
.dim .text, .dim .by {{ color: var(--quiet) }} .red .text {{ color: var(--bad) }}
.cyan .text {{ font-family: ui-monospace, monospace; font-size: .85rem }}
@media (max-width: 40rem) {{ .event {{ grid-template-columns: 2.2rem 4.5rem 1fr; row-gap: 0 }}
  .event .text {{ grid-column: 1 / -1 }} .row {{ grid-template-columns: 6rem 1fr 4rem }} }}
</style>
</head>
<body>
"""
_SHOWN_WHOLE: Final = 100_000
"""How many characters of a text the page keeps."""


@dataclass(frozen=True, slots=True)
class _Bar:
    """Something that took time."""

    kind: str
    label: str
    begin: datetime
    end: datetime


@dataclass(slots=True)
class _Section:
    """A turn with all events that were logged while it ran, or the events between two turns."""

    turn_id: str | None
    events: list[LoggedEvent] = field(default_factory=list)
    bars: list[_Bar] = field(default_factory=list)
    outcome: str = ""


def timeline(conversation_id: str, log: Sequence[LoggedEvent]) -> str:
    """Return the page."""
    name = _text(conversation_id)
    sections = _sections(log)
    turns = sum(section.turn_id is not None for section in sections)
    times = [event.timestamp for _, event in log]
    about = f"{many(len(log), 'event')}, {many(turns, 'turn')}"
    if times:
        about += f", from {min(times):%Y-%m-%d %H:%M:%S} to {max(times):%Y-%m-%d %H:%M:%S} UTC"
    parts = [_HEAD.format(title=name), f'<h1>{name}</h1>\n<p class="quiet">{about}</p>\n']
    number = 0
    for section in sections:
        number += section.turn_id is not None
        parts.extend(_drawn(section, number))
    parts.append("</body>\n</html>\n")
    return "".join(parts)


def _sections(log: Sequence[LoggedEvent]) -> Sequence[_Section]:
    """Cut a log at the starts and ends of its turns, and find the bars of each section."""
    sections: list[_Section] = []
    here: _Section | None = None
    open_bars: dict[str, tuple[str, str, datetime]] = {}
    for logged in log:
        event = logged.event
        if here is None or isinstance(event, TurnStartedEvent):
            here = _Section(event.turn_id if isinstance(event, TurnStartedEvent) else None)
            sections.append(here)
        here.events.append(logged)
        here.bars.extend(_bars(logged, open_bars))
        if isinstance(event, TurnEndedEvent):
            here.outcome, here = event.outcome, None
    return sections


def _bars(logged: LoggedEvent, begun: dict[str, tuple[str, str, datetime]]) -> Iterator[_Bar]:
    """Yield the bars that end with this event; note in `begun` those that begin with it."""
    event = logged.event
    at = event.timestamp

    def end(key: str) -> Iterator[_Bar]:
        if (bar := begun.pop(key, None)) is not None:
            yield _Bar(*bar, at)

    match event:
        case StepFinishedEvent() | StepUnfinishedEvent():
            model = event.usage.model or (event.request.model if event.request else None)
            label = f"model {model}" if model else "model"
            if event.usage.latency_s:
                yield _Bar("model", label, at - timedelta(seconds=event.usage.latency_s), at)
        case ActionEvent():
            begun[f"call {event.tool_call_id}"] = ("tool", event.tool_name, at)
        case MessageQueuedEvent():
            begun.setdefault(f"message {event.message_id}", ("wait", "message waits", at))
        case UserMessageEvent():
            yield from end(f"message {event.message_id}")
        case ConfirmationRequestedEvent():
            begun["confirmation"] = ("wait", "waits for confirmation", at)
            _hold(event.tool_call_ids, begun)
        case ConfirmationGivenEvent():
            yield from end("confirmation")
            _release(begun, at)
        case PausedEvent():
            begun["pause"] = ("wait", "paused", at)
        case ResumedEvent():
            yield from end("pause")
        case _ if isinstance(event, RESULT_CLASSES):
            yield from end(f"call {event.tool_call_id}")
        case _:
            pass


def _hold(calls: Sequence[str], begun: dict[str, tuple[str, str, datetime]]) -> None:
    """Set calls aside that do not run before the user has confirmed them."""
    for call in calls:
        if (bar := begun.pop(f"call {call}", None)) is not None:
            begun[f"held {call}"] = bar


def _release(begun: dict[str, tuple[str, str, datetime]], at: datetime) -> None:
    """Let the calls that were set aside begin."""
    for key in [key for key in begun if key.startswith("held ")]:
        kind, label, _ = begun.pop(key)
        begun[key.replace("held", "call", 1)] = (kind, label, at)


def _drawn(section: _Section, number: int) -> Iterator[str]:
    times = [event.timestamp for _, event in section.events]
    took_s = (max(times) - min(times)).total_seconds()
    # A message may have waited since long before its turn began.
    begin = min([*times, *(bar.begin for bar in section.bars)])
    length_s = (max(times) - begin).total_seconds()
    yield "<section>\n"
    if section.turn_id is not None:
        outcome = _text(section.outcome.replace("_", " ") or "goes on")
        yield (
            f'<h2>Turn {number} <span class="quiet">{min(times):%Y-%m-%d %H:%M:%S}, '
            f"{_seconds(took_s)}, {outcome}</span></h2>\n"
        )
    if section.bars:
        yield '<div class="bars">\n'
        for bar in sorted(section.bars, key=lambda bar: bar.begin):
            yield _drawn_bar(bar, begin, length_s)
        yield "</div>\n"
    for logged in section.events:
        yield _drawn_event(logged)
    yield "</section>\n"


def _drawn_bar(bar: _Bar, begin: datetime, length_s: float) -> str:
    seconds = (bar.end - bar.begin).total_seconds()
    left = 100 * (bar.begin - begin).total_seconds() / length_s if length_s else 0.0
    wide = 100 * seconds / length_s if length_s else 100.0
    label = _text(bar.label)
    return (
        f'<div class="row"><span title="{label}">{label}</span><div class="lane">'
        f'<div class="bar {bar.kind}" style="left:{left:.2f}%;width:{wide:.2f}%"></div></div>'
        f"<span>{_seconds(seconds)}</span></div>\n"
    )


def _drawn_event(logged: LoggedEvent) -> str:
    style, by, said = said_by(logged.event, is_whole=True)
    if len(said) > _SHOWN_WHOLE:
        said = f"{said[:_SHOWN_WHOLE]}… (and {len(said) - _SHOWN_WHOLE:,} characters)"
    return (
        f'<div class="event {_STYLES.get(style, "")}"><span class="seq">{logged.seq}</span>'
        f'<span class="time">{logged.event.timestamp:%H:%M:%S}</span>'
        f'<span class="by">{by}</span><div class="text">{_text(said)}</div></div>\n'
    )


_STYLES: Final[Mapping[str, str]] = {"dim": "dim", "cyan": "cyan", "red": "red", "yellow": "red"}


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1_000 * seconds:.0f} ms"
    if seconds < 100:  # noqa: PLR2004 - two digits before the point are enough
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min"


def _text(text: str) -> str:
    """Return text escaped for HTML: none of it is markup, and control characters are visible."""
    return escape(printable(text))
