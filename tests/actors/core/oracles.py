"""The rules of the conversation core once more, as plainly as they can be written.

Slow on purpose: each replays the whole history. What the tests hold against these is fast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    CondensationEvent,
    CondensationRequestEvent,
    CondensationSummaryEvent,
    Event,
    LLMConvertibleEvent,
    ObservationEvent,
    RetractionEvent,
    SystemPromptEvent,
    UserRejectEvent,
)

RESULTS = (ObservationEvent, AgentErrorEvent, UserRejectEvent)
View = list[LLMConvertibleEvent]


MARKER = "\n[the rest of this result was left out]"


def _cut(result: Any, length: Any) -> Any:  # noqa: ANN401 - any result
    return result.model_copy(update={"content": result.content[:length] + MARKER})


# --- the view ------------------------------------------------------------------------------------


def fold(log: Iterable[Event]) -> tuple[View, bool]:
    """The view without enforcement, and whether a condensation request is open."""
    view: View = []
    request = False
    for event in log:
        match event:
            case CondensationEvent():
                view = [
                    _cut(kept, event.shortened[kept.id])
                    if kept.id in event.shortened and isinstance(kept, RESULTS)
                    else kept
                    for kept in view
                    if kept.id not in event.forgotten_event_ids
                ]
                if event.summary is not None and event.summary_offset is not None:
                    summary = CondensationSummaryEvent(
                        id=f"{event.id}-summary",
                        timestamp=event.timestamp,
                        turn_id=event.turn_id,
                        content=event.summary,
                    )
                    view.insert(event.summary_offset, summary)
                request = False
            case RetractionEvent():
                view = [kept for kept in view if kept.id not in event.retracted_event_ids]
            case CondensationRequestEvent():
                request = True
            case SystemPromptEvent(goes_first=True):
                if view and isinstance(view[0], SystemPromptEvent):
                    view.pop(0)
                view.insert(0, event)
            case LLMConvertibleEvent():
                view.append(event)
            case _:
                pass
    return view, request


def ties(view: Sequence[LLMConvertibleEvent]) -> list[tuple[int, int]]:
    """Pairs of positions that no cut may come between."""
    found = []
    actions: dict[str, int] = {}
    results: dict[str, int] = {}
    for at, event in enumerate(view):
        if isinstance(event, ActionEvent):
            actions.setdefault(event.tool_call_id, at)
        elif isinstance(event, RESULTS):
            results.setdefault(event.tool_call_id, at)
    found += [(at, results[call]) for call, at in actions.items() if call in results]
    for at, event in enumerate(view):
        if isinstance(event, ActionEvent):
            found += [
                (other, at)
                for other in range(at)
                if isinstance(view[other], ActionEvent)
                and view[other].llm_response_id == event.llm_response_id  # type: ignore[attr-defined]
            ]
    in_loop = False
    for at, event in enumerate(view):
        if isinstance(event, ActionEvent) and event.thinking:
            in_loop = True
        elif isinstance(event, ActionEvent | ObservationEvent | AgentErrorEvent | UserRejectEvent):
            if in_loop:
                found.append((at - 1, at))
        else:
            in_loop = False
    return [(min(pair), max(pair)) for pair in found]


def indices(view: Sequence[LLMConvertibleEvent]) -> list[int]:
    """The manipulation indices."""
    answered = {event.tool_call_id for event in view if isinstance(event, RESULTS)}
    waits = [
        at
        for at, event in enumerate(view)
        if isinstance(event, ActionEvent) and event.tool_call_id not in answered
    ]
    tied = ties(view)
    return [
        index
        for index in range(len(view) + 1)
        if not any(at < index for at in waits)
        and not any(low < index <= high for low, high in tied)
    ]


def contract_indices(view: Sequence[LLMConvertibleEvent]) -> list[int]:
    """The manipulation indices of a well-formed view, in the words of the contract."""
    found = []
    for index in range(len(view) + 1):
        before, after = view[:index], view[index:]
        answered = {event.tool_call_id for event in before if isinstance(event, RESULTS)}
        waits = any(isinstance(e, ActionEvent) and e.tool_call_id not in answered for e in before)
        inside_batch = (
            bool(before and after)
            and isinstance(before[-1], ActionEvent)
            and isinstance(after[0], ActionEvent)
            and before[-1].llm_response_id == after[0].llm_response_id
        )
        loop = False
        for event in before:
            if isinstance(event, ActionEvent) and event.thinking:
                loop = True
            elif not isinstance(event, (ActionEvent, *RESULTS)):
                loop = False
        continues = bool(after) and (
            isinstance(after[0], RESULTS)
            or (isinstance(after[0], ActionEvent) and not after[0].thinking)
        )
        if not (waits or inside_batch or (loop and continues)):
            found.append(index)
    return found


def closure(view: Sequence[LLMConvertibleEvent], ids: set[str]) -> set[str]:
    """These events, and all that has to go with them."""
    ids = set(ids)
    while True:
        more = {
            view[there].id
            for pair in ties(view)
            for here, there in (pair, pair[::-1])
            if view[here].id in ids
        }
        if more <= ids:
            return ids
        ids |= more


# --- enforcement ---------------------------------------------------------------------------------


def enforce(log: Sequence[Event]) -> View:
    """The view of a log from anywhere: rule after rule, from the first again after each removal."""
    view, _ = fold(log)
    while True:
        for rule in (_uniqueness, _batches, _matching, _loops):
            ids = rule(log, view)
            if ids:
                view = [event for event in view if event.id not in ids]
                break
        else:
            return view


def _uniqueness(log: Sequence[Event], view: View) -> set[str]:
    gone = set()
    calls = {e.tool_call_id for e in view if isinstance(e, (ActionEvent, *RESULTS))}
    for call in calls:
        actions = [
            n for n, e in enumerate(view) if isinstance(e, ActionEvent) and e.tool_call_id == call
        ]
        results = [
            n for n, e in enumerate(view) if isinstance(e, RESULTS) and e.tool_call_id == call
        ]
        gone |= {view[n].id for n in results[1:]}
        before = [n for n in actions if results and n < results[0]]
        kept = (before[-1:] or actions[:1]) if actions else []
        gone |= {view[n].id for n in actions if n not in kept}
    return gone


def _settled(log: Sequence[Event], at: int, end: int, ids: set[str]) -> bool:
    """Whether one of these events was taken out of the view between two places of the log."""
    for event in log[at:end]:
        if isinstance(event, CondensationEvent) and ids & set(event.forgotten_event_ids):
            return True
        if isinstance(event, RetractionEvent) and ids & set(event.retracted_event_ids):
            return True
    return False


def _batches(log: Sequence[Event], view: View) -> set[str]:
    batches: list[tuple[str, int, set[str]]] = []
    for at, event in enumerate(log):
        if isinstance(event, ActionEvent):
            for n, (response, last, ids) in enumerate(batches):
                if response == event.llm_response_id and not _settled(log, last, at, ids):
                    batches[n] = (response, at, ids | {event.id})
                    break
            else:
                batches.append((event.llm_response_id, at, {event.id}))
    return _partly(view, [ids for _, _, ids in batches])


def _matching(log: Sequence[Event], view: View) -> set[str]:
    called = {event.tool_call_id for event in view if isinstance(event, ActionEvent)}
    answered = {event.tool_call_id for event in view if isinstance(event, RESULTS)}
    early = {event.tool_call_id for event in fold(log)[0] if isinstance(event, RESULTS)}
    pending = {id_ for id_, call in _pending(log).items() if call not in early}
    return {
        event.id
        for event in view
        if (isinstance(event, RESULTS) and event.tool_call_id not in called)
        or (
            isinstance(event, ActionEvent)
            and event.tool_call_id not in answered
            and event.id not in pending
        )
    }


def _pending(log: Sequence[Event]) -> dict[str, str]:
    """The actions at the end of the log whose results may still come, with their calls."""
    seen = [event for event in log if isinstance(event, LLMConvertibleEvent)]
    for start, first in enumerate(seen):
        if not isinstance(first, ActionEvent):
            continue
        response = first.llm_response_id
        begun_before = any(
            isinstance(e, ActionEvent) and e.llm_response_id == response for e in seen[:start]
        )
        at = log.index(first)
        if begun_before and not _begins_anew(log, at, response):
            continue
        calls: set[str] = set()
        ids: set[str] = set()
        for event in seen[start:]:
            if isinstance(event, ActionEvent) and event.llm_response_id == response:
                if _settled(log, at, log.index(event), ids):
                    break
                calls.add(event.tool_call_id)
                ids.add(event.id)
            elif not (isinstance(event, RESULTS) and event.tool_call_id in calls):
                break
        else:
            answered = {e.tool_call_id for e in seen[start:] if isinstance(e, RESULTS)}
            return {
                e.id: e.tool_call_id
                for e in seen[start:]
                if isinstance(e, ActionEvent) and e.tool_call_id not in answered
            }
    return {}


def _begins_anew(log: Sequence[Event], at: int, response: str) -> bool:
    """Whether all earlier actions of this response are settled when the one at `at` comes."""
    ids: set[str] = set()
    last = 0
    for n, event in enumerate(log[:at]):
        if isinstance(event, ActionEvent) and event.llm_response_id == response:
            if ids and _settled(log, last, n, ids):
                ids = set()
            ids.add(event.id)
            last = n
    return _settled(log, last, at, ids)


def _loops(log: Sequence[Event], view: View) -> set[str]:
    loops: list[set[str]] = []
    is_open = False
    for at, event in enumerate(log):
        if isinstance(event, ActionEvent) and event.thinking:
            loops.append({event.id})
            is_open = True
        elif isinstance(event, (ActionEvent, *RESULTS)):
            # A result that is none of an open call is not a member.
            answers = isinstance(event, ActionEvent) or event.tool_call_id in open_calls(log[:at])
            if is_open and answers:
                loops[-1].add(event.id)
        elif isinstance(event, LLMConvertibleEvent) or (
            is_open and _settled([event], 0, 1, loops[-1])
        ):
            is_open = False
    return _partly(view, loops)


def _partly(view: View, groups: Sequence[set[str]]) -> set[str]:
    present = {event.id for event in view}
    return {id_ for group in groups if not group <= present for id_ in group & present}


# --- admission -----------------------------------------------------------------------------------


def open_calls(log: Sequence[Event]) -> list[str]:
    """The calls of the view that have no result there, in order."""
    view, _ = fold(log)
    answered = {event.tool_call_id for event in view if isinstance(event, RESULTS)}
    calls = [event.tool_call_id for event in view if isinstance(event, ActionEvent)]
    return list(dict.fromkeys(call for call in calls if call not in answered))


def running_response(log: Sequence[Event]) -> str | None:
    """The response that may still get calls."""
    view, _ = fold(log)
    last = view[-1] if view else None
    if isinstance(last, ActionEvent) and last.tool_call_id in open_calls(log):
        return last.llm_response_id
    return None


def admit(log: Sequence[Event], event: Event) -> str | None:
    """The name of the violation that this event would be after this log."""
    view, _ = fold(log)
    actions = [e for e in log if isinstance(e, ActionEvent)]
    waiting = open_calls(log)
    match event:
        case ActionEvent():
            if event.tool_call_id in {e.tool_call_id for e in actions}:
                return "duplicate_tool_call"
            responses = {e.llm_response_id for e in actions if e.tool_call_id in waiting}
            if responses - {event.llm_response_id}:
                return "interleaved_response"
            goes_on = running_response(log) == event.llm_response_id
            known = event.llm_response_id in {e.llm_response_id for e in actions}
            return "interleaved_response" if known and not goes_on else None
        case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
            if event.tool_call_id in waiting:
                return None
            known = event.tool_call_id in {e.tool_call_id for e in actions}
            return "duplicate_tool_result" if known else "unmatched_tool_result"
        case CondensationSummaryEvent():
            return "summary_in_log"
        case LLMConvertibleEvent():
            return "interleaved_message" if waiting else None
        case CondensationEvent():
            return None if _may_forget(view, waiting, event) else "illegal_condensation"
        case RetractionEvent():
            ids = set(event.retracted_event_ids)
            summaries = {e.id for e in view if isinstance(e, CondensationSummaryEvent)}
            fits = ids <= {e.id for e in view} - summaries and closure(view, ids) == ids
            return None if fits and not waiting else "illegal_retraction"
        case _:
            return None


def _may_forget(view: View, waiting: Sequence[str], event: CondensationEvent) -> bool:
    ids = set(event.forgotten_event_ids) & {e.id for e in view}
    if closure(view, ids) != ids:
        return False
    if any(isinstance(e, ActionEvent) and e.tool_call_id in waiting and e.id in ids for e in view):
        return False
    lengths = {e.id: len(e.content) for e in view if isinstance(e, RESULTS) and e.id not in ids}
    for event_id, length in event.shortened.items():
        if event_id not in lengths or int(str(length)) + len(MARKER) >= lengths[event_id]:
            return False
    if event.summary is None or event.summary_offset is None:
        return True
    left = [e.id for e in view if e.id not in ids]
    before, after = left[: event.summary_offset], left[event.summary_offset :]
    if any(view[a].id in before and view[b].id in after for a, b in ties(view)):
        return False
    if any(
        e.id in before and e.tool_call_id in waiting for e in view if isinstance(e, ActionEvent)
    ):
        return False
    # A tool loop that may still go on must not be cut off from what continues it.
    return not (_ends_in_loop(view) and view[-1].id in before)


def _ends_in_loop(view: View) -> bool:
    for event in reversed(view):
        if isinstance(event, ActionEvent) and event.thinking:
            return True
        if not isinstance(event, (ActionEvent, *RESULTS)):
            return False
    return False


# --- what the providers accept -------------------------------------------------------------------

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")


def check_openai(messages: Sequence[Any]) -> None:
    """Assert what the OpenAI chat API checks in a request's messages."""
    waiting: list[str] = []
    for message in messages:
        role = message["role"]
        if role == "tool":
            assert message["tool_call_id"] in waiting, "a result without its call before it"
            waiting.remove(message["tool_call_id"])
            assert isinstance(message["content"], str | list | tuple)
            continue
        assert not waiting, f"calls without results: {waiting}"
        assert role in ("system", "user", "assistant")
        if role == "assistant":
            assert message.get("content") or message.get("tool_calls"), "an empty answer"
            for call in message.get("tool_calls", ()):
                assert call["type"] == "function"
                assert _NAME.fullmatch(call["function"]["name"])
                assert _CALL_ID.fullmatch(call["id"])
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                waiting.append(call["id"])
            assert len(set(waiting)) == len(waiting), "one call id twice"
        elif isinstance(message["content"], str):
            pass
        else:
            assert message["content"], "no content parts"
    assert not waiting, f"calls without results: {waiting}"


def check_anthropic(messages: Sequence[Any]) -> None:
    """Assert what the Anthropic messages API checks in a request's messages."""
    waiting: list[str] = []
    used: set[str] = set()
    for n, message in enumerate(messages):
        assert message["role"] == ("user", "assistant")[n % 2], "the sides do not take turns"
        blocks = message["content"]
        assert blocks, "an empty message"
        kinds = [block["type"] for block in blocks]
        for block in blocks:
            if block["type"] == "text":
                assert block["text"].strip(), "an empty text"
        if message["role"] == "user":
            results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            assert sorted(results) == sorted(waiting), "calls and results differ"
            assert kinds[: len(results)] == ["tool_result"] * len(results), "results come first"
            assert all(block.get("content", "x") for block in blocks)
            waiting = []
            continue
        assert not waiting
        if "thinking" in kinds:
            assert kinds[0] in ("thinking", "redacted_thinking"), "thinking comes first"
        for block in blocks:
            if block["type"] == "tool_use":
                assert _NAME.fullmatch(block["name"])
                assert _CALL_ID.fullmatch(block["id"])
                assert isinstance(block["input"], dict)
                assert block["id"] not in used, "one call id twice"
                used.add(block["id"])
                waiting.append(block["id"])
    assert not waiting, f"calls without results: {waiting}"
