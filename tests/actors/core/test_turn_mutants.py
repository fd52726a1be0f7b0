"""Faults planted in the rules of turns, one at a time: the laws of `turn_laws` have to see each."""

from __future__ import annotations

import random
from types import FunctionType, ModuleType

import pytest

from tests.actors.core.test_mutants import _mutated
from tests.actors.core.turn_laws import MOVES, OFTEN, POLICIES, Move, Turns
from tests.drawn import drawn, examples
from turnkeeper.actors.core import decide, turn_rules
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.turn_table import KnownMessage, TurnTable
from turnkeeper.actors.core.working_state import ConversationSettings, WorkingState

_HISTORIES_MAX = 600
_BEGINNINGS: list[list[Move]] = [
    [],
    [("send", 1), ("agent", 3)],  # a call waits for a confirmation
    [("send", 1), ("agent", 4), ("agent", 9)],  # it says something, and writes on
    [("send", 1), ("send", 2), ("agent", 0), ("send", 2)],  # one has joined, one is about to
    # two steps have ended, the first may be forgotten, and a message rolls back
    [("send", 1), ("agent", 2), ("agent", 0), ("agent", 2), ("agent", 0), ("condense", 1)],
    [("send", 1), ("send", 6), ("send", 12), ("send", 18), ("send", 24)],  # the queue is full
    # the next step begins with a call open, and a message waits to join
    [("send", 1), ("agent", 2), ("send", 2), ("agent", 4)],
    # two calls wait for a confirmation, during a pause
    [("send", 1), ("agent", 11), ("pause", 0), ("confirm", 36)],
    [("send", 1), ("agent", 11), ("confirm", 37)],
    # three messages wait, and the first of them is replaced; in a pause, too
    [("send", 1), ("send", 6), ("send", 12), ("send", 18), ("replace", 12)],
    [("send", 1), ("send", 6), ("send", 12), ("pause", 0), ("cancel", 0), ("replace", 12)],
    [
        ("send", 1),
        ("agent", 1),
        ("end", 0),
        ("pause", 0),
        ("send", 6),
        ("replace", 6),
        ("resume", 0),
    ],
    # one has joined, one waits to; that is replaced, joins, and waits again
    [("send", 1), ("send", 2), ("replace", 0), ("send", 6), ("agent", 0), ("send", 3)],
    # two turns have ended, a third runs, and the first is replaced
    [("send", 1), ("end", 1), ("send", 1), ("end", 1), ("send", 1), ("agent", 2), ("replace", 12)],
    [("send", 1), ("replace", 54)],  # what was never sent
    # a call is answered by hand while it waits, and then rejected; or its turn is taken back
    [("send", 1), ("agent", 3), ("by hand", 0), ("confirm", 1)],
    [("send", 1), ("agent", 2), ("by hand", 0), ("end", 0), ("undo", 0)],
    [("send", 1), ("agent", 11), ("answer again", 0)],  # to others than wait
    # answers are given once more, and nearly the same
    [("send", 1), ("agent", 3), ("confirm", 0), ("answer again", 2)],
    [("send", 1), ("agent", 11), ("confirm", 37), ("answer again", 1), ("answer again", 3)],
    # a call is rejected, and its agent cannot be run again
    [("send", 1), ("agent", 3), ("crash", 0), ("confirm", 1)],
    # a call is answered by hand, and its turn rolled back
    [("send", 1), ("agent", 2), ("by hand", 0), ("send", 3)],
    # two turns have ended, and a part of what they said is forgotten
    [("send", 1), ("agent", 1), ("end", 0), ("send", 1), ("agent", 1), ("end", 0), ("condense", 0)],
]


def _play_histories(count: int = _HISTORIES_MAX) -> None:
    """Many histories, the same in every run, until one of them breaks a law."""
    names = (*OFTEN, *MOVES)
    for seed in range(count):
        draw = random.Random(seed)
        settings = ConversationSettings(
            on_overlap=draw.choice(POLICIES),
            unfinished=draw.choice(("end", "resume")),
            is_resumable=draw.random() < 0.7,
            system_prompt=draw.choice((None, "be kind")),
        )
        moves = [(draw.choice(names), draw.randrange(56)) for _ in range(draw.choice((4, 8, 24)))]
        Turns(settings, by_hand=seed % 2 == 0).play([*draw.choice(_BEGINNINGS), *moves])


_MUTANTS: list[tuple[type | ModuleType, str, str, str]] = [
    # (where, which function, the line, what it becomes)
    (turn_rules, "_find_known", "known.digest !=", "known.digest =="),
    (turn_rules, "_send", "is_duplicate=True", "is_duplicate=False"),
    (turn_rules, "_send", "if turns.is_paused or", "if"),
    (turn_rules, "_send", "steers=running.turn_id", "steers=None"),
    (turn_rules, "_send", "if not _roll_back(", "if _roll_back("),
    (turn_rules, "_interrupt_with", "    _interrupt(", "    () and _interrupt("),
    (turn_rules, "_begin_with", "draft.seq,", "draft.seq - 1,"),
    (turn_rules, "_begin_with", "if running is not None else ()", "if False else ()"),
    (turn_rules, "_begin_with", "is_answer_over=True", "is_answer_over=False"),
    (turn_rules, "begin_log", "if not draft.working.state.seq and", "if"),
    (turn_rules, "_queue", ">= working.settings", "> working.settings"),
    (turn_rules, "_queue", "None if ends_hold else turns.waits_for", "None"),
    (turn_rules, "_queue", "draft.seq,", "draft.seq - 1,"),
    (turn_rules, "_join", "queued_event_id=waiting.id", "queued_event_id=None"),
    (turn_rules, "_begin_step", "if turns.waits_for is not None or", "if"),
    (turn_rules, "_begin_step", "if not working.state.admission.open_calls:", "if True:"),
    (turn_rules, "_begin_step", "if waiting.steers is None:", "if False:"),
    (turn_rules, "_suspend", "is_suspended=True", "is_suspended=False"),
    (turn_rules, "_suspend", "if not working.settings.is_resumable:", "if False:"),
    (turn_rules, "_turn_append", "is_answer_over=says", "is_answer_over=False"),
    (turn_rules, "_turn_append", "is_suspended=command.suspends", "is_suspended=False"),
    (turn_rules, "_turn_append", "check_running(", "(lambda *_: 0)("),
    (turn_rules, "_repair_view", "if event_id in shown", "if True"),
    (turn_rules, "_pause", "if state.turns.is_paused:", "if False:"),
    (turn_rules, "_resume", "if not turns.is_paused:", "if False:"),
    (turn_rules, "_resume", "if running is None:", "if running is None and False:"),
    (turn_rules, "_resume", "if turns.awaiting:", "if False:"),
    (turn_rules, "_resume", "unstarted=turns.confirmed", "unstarted=()"),
    (turn_rules, "_answer", "if turns.is_paused:", "if False:"),
    (turn_rules, "_answer", "if tool_call_id in rejected:", "if tool_call_id not in rejected:"),
    (turn_rules, "_answer", "if c in working.state.admission.open_calls", "if True"),
    (turn_rules, "_answer", "unanswered if c not in rejected", "unanswered"),
    (turn_rules, "_answer", "_has_answers(working, answers, given) and (", "0 and ("),
    (turn_rules, "_answer", "rejected=rejected if is_mixed else ()", "rejected=()"),
    (turn_rules, "_answer", "answers.keys() != set(awaiting)", "False"),
    (turn_rules, "_has_answers", "or given != {", "or 0 and given != {"),
    (turn_rules, "_has_answers", "event.content == _reason(", "True or _reason("),
    (TurnTable, "find_answers", "if {a.seq} == seqs", "if call in tool_call_ids"),
    (turn_rules, "_go_on", "if working.agent_of == running.turn_id:", "if False:"),
    (turn_rules, "_go_on", "if working.settings.is_resumable:", "if False:"),
    (turn_rules, "_go_on", ", answered=answered", ""),
    (turn_rules, "_end_turn", "if working.state.turns.waits_for is not None:", "if False:"),
    (turn_rules, "_end_turn", "    _close(draft", "    () and _close(draft"),
    (turn_rules, "_end_turn", "check_running(", "(lambda o, *_: o.state.turns.running)("),
    (turn_rules, "_cancel_turn", "or any(", "and any("),
    (turn_rules, "_cancel_turn", "StopTurn(running.turn_id), ", ""),
    (turn_rules, "_interrupt_turn", "command.turn_id not in {None, running.turn_id}", "False"),
    (turn_rules, "_interrupt_turn", "    _interrupt(", "    () and _interrupt("),
    (turn_rules, "_interrupt_turn", "StopTurn(running.turn_id), ", ""),
    (decide, "_undo", "if running is not None:", "if False:"),
    (decide, "_undo", "turn_ids[-1]", "turn_ids[0]"),
    (decide, "_undo", "or command.turn_id not in {None, *turn_ids}", ""),
    (decide, "_undo", "if command.turn_id not in {None, turn_id}:", "if False:"),
    (decide, "_undo", "if state.is_condensed_from(min(of_turn)):", "if False:"),
    (decide, "_undo", "if state.admission.check(draft.events) is not None:", "if False:"),
    (Folded, "_note_left", "condensed & kept", "condensed - kept"),
    (turn_rules, "_recover", "if turns.waits_for is not None:", "if False:"),
    (
        turn_rules,
        "_recover",
        "working.hands_turns_over",
        'working.settings.unfinished == "resume"',
    ),
    (turn_rules, "_recover", "    _interrupt(", "    () and _interrupt("),
    (turn_rules, "_roll_back", "if in_view is None:", "if False:"),
    (turn_rules, "_queue_again", "queued_again=True", "queued_again=False"),
    (turn_rules, "_queue_again", "running.messages[1:]", "running.messages[2:]"),
    (turn_rules, "_queue_again", "turn_id=draft.stamp.new_id()", "turn_id=running.turn_id"),
    (turn_rules, "_queue_again", "**_parts(message)", '**_parts(message) | {"replaces": None}'),
    (turn_rules, "_take_out", "    _queue_again(", "    () and _queue_again("),
    (turn_rules, "_replace", ') == "reject":', ') == "queue":'),
    (turn_rules, "_replace", "if target is None:", "if False:"),
    (turn_rules, "_replace", "steers=waiting.steers", "steers=None"),
    (turn_rules, "_replace", "is_exchanged=True", "is_exchanged=False"),
    (turn_rules, "_replace", "place=target.place,\n            is", "is"),
    (turn_rules, "_replace", "command, place=target.place)", "command)"),
    (turn_rules, "_replace", "if running is None and turns.is_paused:", "if turns.is_paused:"),
    (turn_rules, "_replace", "    _retract_from(", "    () and _retract_from("),
    (turn_rules, "_retract_from", "for event in view[:at]", "for event in ()"),
    (turn_rules, "_retract_from", "if state.is_condensed_from(at):", "if False:"),
    (turn_rules, "_take_out", "        _close(trial", "        () and _close(trial"),
    (turn_rules, "_take_out", "(*event_ids, *closing)", "event_ids"),
    (turn_rules, "_retract_from", "view[at:] if e.turn_id and", "view if e.turn_id and"),
    (turn_rules, "_retract_from", "if e.turn_id and", "if"),
    (turn_rules, "_join", "**_parts(waiting)", '**_parts(waiting) | {"replaces": None}'),
    (KnownMessage, "of", "seq if place is None else place", "seq"),
    (TurnTable, "fold", "or event.place is not None:", ":"),
    (TurnTable, "_know", ", place=first.place", ""),
    (turn_rules, "_take_out", "draft.working.state.admission.check(trial.events)", "None"),
    (turn_rules, "_close", "if tool_call_id in unstarted:", "if False:"),
    (turn_rules, "_close", "if tool_call_id in unstarted:", "if True:"),
    (turn_rules, "_close", "{*turns.awaiting, *turns.confirmed}", "{*turns.awaiting}"),
    (turn_rules, "_close", "{*turns.awaiting, *turns.confirmed}", "{*turns.confirmed}"),
    (turn_rules, "_close", "if said:", "if False:"),
    (turn_rules, "_close", "if working.asked is not None:", "if False:"),
    (turn_rules, "decide_piece", "attempt, before, offset = attempt + 1", "attempt, before, offset = 1"),  # noqa: E501 - as its neighbours
    (turn_rules, "decide_piece", "answer.half, answer.length", "answer.half, 0"),
    (WorkingState, "apply", "if event.kind in _STEP_ENDS:", "if False:"),
    (Folded, "_count_answer", "or response != self._answered_response", ""),
    (turn_rules, "_then_next_queued", "next(iter(", "next(reversed("),
    (turn_rules, "_then_next_queued", "(*effects, StartTurn(waiting.turn_id))", "(*effects,)"),
    (turn_rules, "_then_next_queued", "(*effects, StartTurn", "(StartTurn"),
    (turn_rules, "check_running", "or epoch != working.epoch", ""),
    (turn_rules, "check_running", "or running.turn_id != turn_id", ""),
    (WorkingState, "apply", "self.agent_of = None", "pass"),
    (WorkingState, "apply", "self.partial_answer = _NO_ANSWER", "pass"),
    (TurnTable, "fold", "self._queued.pop(event.message_id, None)", "pass"),
    (TurnTable, "fold", "if event.queued_again or", "if"),
    (TurnTable, "fold", "if not event.is_reminder:", "if True:"),
    (TurnTable, "fold", "(*running.messages, event)", "(event,)"),
    (TurnTable, "fold", "self.is_paused, self.awaiting, self.confirmed = False, (), ()", "pass"),
    (TurnTable, "_fold_hold", "if event.confirmed and self.is_paused", "if event.confirmed"),
    (TurnTable, "_fold_hold", "if event.confirmed and self.is_paused", "if self.is_paused"),
    (TurnTable, "_fold_hold", "self.awaiting if c not in rejected", "self.awaiting"),
    (TurnTable, "_fold_hold", "self.awaiting = ()", "pass"),
    (TurnTable, "_fold_hold", "self.is_paused, self.confirmed = False, ()", "self.is_paused = 0"),
    (TurnTable, "_know", "seq=first.seq, ", ""),
]  # fmt: skip

_DRAWN = drawn(_MUTANTS, 15)


def test_every_fault_can_still_be_planted() -> None:
    for where, name, line, fault in _MUTANTS:
        _mutated(getattr(where, name), line, fault)


@pytest.mark.sweep
def test_without_a_fault_every_history_keeps_the_laws() -> None:
    _play_histories(examples(_HISTORIES_MAX))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("where", "name", "line", "fault"),
    _DRAWN,
    ids=[f"{name}: {line} -> {fault}" for _, name, line, fault in _DRAWN],
)
def test_the_laws_see_a_fault_in_the_rules(
    where: type | ModuleType, name: str, line: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(where, name)
    faulty = _mutated(function, line, fault)
    if isinstance(function, FunctionType):
        # By its code: a table of the rules or the folds may hold the function itself.
        monkeypatch.setattr(function, "__code__", faulty.__code__)
    else:
        monkeypatch.setattr(where, name, faulty)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - a law may fail in any way
        _play_histories()

    assert not isinstance(caught.value, SyntaxError | NameError), caught.value
