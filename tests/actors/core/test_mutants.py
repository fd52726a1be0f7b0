"""Faults planted in the conversation core, one at a time: the laws have to see each.

A fault is a line of the real source, replaced. When the line is no longer there the test fails, so
that the faults stay as real as the code.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from tests.actors.core import laws, logs
from tests.drawn import drawn
from turnkeeper.actors.core import admission, properties
from turnkeeper.actors.core.admission import Admission, _Trial
from turnkeeper.actors.core.properties import LogFacts, _Groups
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.view import View, ViewFold
from turnkeeper.actors.core.view_index import IndexedEvents
from turnkeeper.actors.models.messages import _AnthropicMessages, _FlatMessages, _Responses

# Nothing is shrunk and nothing kept: all that is asked is whether the laws see the fault at all.
_look = settings(max_examples=120, phases=[Phase.generate], database=None, derandomize=True)
_look_shortly = settings(_look, max_examples=20)  # the laws themselves have tests of their own


_drawn_logs = given(
    log=logs.admissible_logs,
    wild=logs.wild_logs(),
    proposed=logs.wild_logs(max_size=40, ids_max=8),
    moves=logs.moves(12),
    data=st.data(),
)


def _check(
    log: list[Any],
    wild: list[Any],
    proposed: list[Any],
    moves: list[logs.Move],
    data: st.DataObject,
) -> None:
    laws.check_admissible(log, reopened_at=len(log) // 2)
    laws.check_wild(wild, moves)
    laws.check_filtered(proposed)
    laws.check_crafted()
    laws.check_admission(log, data.draw(logs.candidates(log)))


_check_all_laws = _look(_drawn_logs(_check))
_check_all_laws_shortly = _look_shortly(_drawn_logs(_check))


_MUTANTS: list[tuple[object, str, str, str]] = [
    # (where, which function, the line, what it becomes)
    (ViewFold, "_condense", "self._request = False", "pass"),
    (ViewFold, "_condense", "events = self.events.copy()", "events = self.events"),
    (ViewFold, "_condense", 'id=f"{event.id}{SUMMARY_SUFFIX}"', "id=event.id"),
    (ViewFold, "_remove", "if event.id not in ids", "if event.id != event_ids[0]"),
    (ViewFold, "_replace_events", "self.restore(events)", "self.events.extend(events)"),
    (View, "derive", "kept.length <= self._length", "True"),
    (IndexedEvents, "fold", "self.settled.append(here)", "self.settled.append(here + 1)"),
    (IndexedEvents, "fold", "if tied_to != here or not was_index:", "if tied_to != here:"),
    (IndexedEvents, "_leave_out", "self.settled[:here]", "self.settled[: here + 1]"),
    (IndexedEvents, "_leave_out", "self.settled[-1] > tied_to", "False"),
    (View, "__init__", "self._length if isinstance", "self._length + 1 if isinstance"),
    (IndexedEvents, "fold", "was_index = not self.open_calls", "was_index = True"),
    (IndexedEvents, "fold", "self.is_loop_open = False", "pass"),
    (IndexedEvents, "_fold_action", "if action.thinking:", "if not action.thinking:"),
    (IndexedEvents, "_fold_action", "self.responses[response_id] = here", "pass"),
    (
        IndexedEvents,
        "_fold_result",
        "self.open_calls.pop(call_id, None)",
        "self.open_calls.popitem()",
    ),
    (_Groups, "add_action", "batch.append(event_id)", "batch[:] = [event_id]"),
    (_Groups, "add_action", "if has_thinking:", "if has_thinking and not self._loop:"),
    (LogFacts, "find_violations", "groups.end_loop()", "pass"),
    (_Groups, "add_result", "self._calls[call_id] = None", "pass"),
    (_Groups, "add_result", "and not self._answered[call_id]", ""),
    (_Groups, "add_result", "if self._called[call_id] and", "if"),
    (_Groups, "settle", "counts[call_id] -= 1", "pass"),
    (_Groups, "settle", "self.end_loop()", "pass"),
    (_Groups, "settle", "self._response_of.pop(member, None)", "pass"),
    (properties, "_find_pairs", "elif action_id in pending:", "elif not pending:"),
    (properties, "_close", "broken.append(n)", "pass"),
    (_Trial, "_judge_action", "if others:", "if False:"),
    (_Trial, "_judge_action", "or call_id in self._calls_left", ""),
    (_Trial, "_judge_result", "self._response = None", "pass"),
    (_Trial, "judge", "if self._open:", "if len(self._open) > 1:"),
    (admission, "find_torn", "parts.append(loop)", "pass"),
    (admission, "find_torn", 'if place_of["call", call_id] != "after":', "if False:"),
    (ViewFold, "_watch", "torn is not None", "False"),
    (ViewFold, "_replace_events", "self._is_suspect = self.is_suspect", "pass"),
    (IndexedEvents, "fold", "if not was_index:", "if False:"),
    (IndexedEvents, "_fold_action", "if self.open_calls or tied_to != here:", "if False:"),
    (IndexedEvents, "_fold_result", "if self.open_calls.pop(call_id, None) is None:", "if False:"),
    (admission, "_judge_retraction", "if view.events.open_calls:", "if False:"),
    (
        Admission,
        "_note_left",
        "self._calls_left = self._remember(self._calls_left, event.tool_call_id)",
        "pass",
    ),
    (_Responses, "_fold", "self._early[event.tool_call_id] = event", "pass"),
    (_Responses, "_takes", "return True", "return False"),
    (_FlatMessages, "result", "LLMMessages(self._messages)", "LLMMessages(self._messages[1:])"),
    (_AnthropicMessages, "_say", "self._blocks[:0] = thinking", "self._blocks.extend(thinking)"),
    (Folded, "_restore", "self.seq = folds.seq", "pass"),
    (Folded, "_restore", "unhandled_request=folds.unhandled_request", "unhandled_request=False"),
]

_DRAWN = drawn(_MUTANTS, 10)


def _mutated(function: Callable[..., object], line: str, fault: str) -> Callable[..., object]:
    """The function with a fault in it, in the module that it is from."""
    source = textwrap.dedent(inspect.getsource(function))
    assert line in source, f"{function.__qualname__} no longer has the line {line!r}"
    namespace = dict(vars(sys.modules[function.__module__]))
    code = "from __future__ import annotations\n" + source.replace(line, fault)
    exec(compile(code, f"<{function.__qualname__} with a fault>", "exec"), namespace)
    mutant: Callable[..., object] = namespace[function.__name__]
    return mutant


def test_every_fault_can_still_be_planted() -> None:
    for where, name, line, fault in _MUTANTS:
        _mutated(getattr(where, name), line, fault)


def test_without_a_fault_the_laws_hold() -> None:
    _check_all_laws_shortly()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("where", "name", "line", "fault"),
    _DRAWN,
    ids=[f"{name}: {line} -> {fault}" for _, name, line, fault in _DRAWN],
)
def test_the_laws_see_a_planted_fault(
    where: object, name: str, line: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, _mutated(getattr(where, name), line, fault))

    with pytest.raises(Exception) as caught:  # noqa: PT011 - a law may fail in any way
        _check_all_laws()

    assert not isinstance(caught.value, SyntaxError | NameError | HypothesisException), caught.value
