"""Faults planted in the rules of turns, one at a time: the laws of `turn_laws` have to see each."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from tests.actors.test_core_mutants import _mutated
from tests.actors.turn_laws import MOVES, OFTEN, POLICIES, Move, Turns
from turnkeeper.actors import _turn_rules
from turnkeeper.actors._owner import Owner, Policy
from turnkeeper.actors.turns import TurnTable

_HISTORIES_MAX = 600
_BEGINNINGS: list[list[Move]] = [
    [],
    [("send", 1), ("agent", 3)],  # a call waits for a confirmation
    [("send", 1), ("agent", 4), ("agent", 9)],  # it says something, and writes on
    [("send", 1), ("send", 2), ("agent", 0), ("send", 2)],  # one has joined, one is about to
    [("send", 1), ("send", 6), ("send", 12), ("send", 18), ("send", 24)],  # the queue is full
]


def _play_histories() -> None:
    """Many histories, the same in every run, until one of them breaks a law."""
    names = (*OFTEN, *MOVES)
    for seed in range(_HISTORIES_MAX):
        draw = random.Random(seed)
        policy = Policy(
            on_overlap=draw.choice(POLICIES),
            unfinished=draw.choice(("end", "resume")),
            is_resumable=draw.random() < 0.7,
            system_prompt=draw.choice((None, "be kind")),
        )
        moves = [(draw.choice(names), draw.randrange(56)) for _ in range(draw.choice((4, 8, 24)))]
        Turns(policy, by_hand=seed % 2 == 0).play([*draw.choice(_BEGINNINGS), *moves])


_MUTANTS: list[tuple[type | ModuleType, str, str, str]] = [
    # (where, which function, the line, what it becomes)
    (_turn_rules, "_send", "known.digest !=", "known.digest =="),
    (_turn_rules, "_send", "is_duplicate=True", "is_duplicate=False"),
    (_turn_rules, "_send", "if turns.is_paused:", "if False:"),
    (_turn_rules, "_send", "steers=running.turn_id", "steers=None"),
    (_turn_rules, "_send", "if before is None:", "if before is not None:"),
    (_turn_rules, "_interrupt_with", "before = _interrupt(", "before = () and _interrupt("),
    (_turn_rules, "_begin_with", "len(before) + 2", "len(before) + 1"),
    (_turn_rules, "_begin_with", "if running is not None else ()", "if False else ()"),
    (_turn_rules, "_begin_with", "is_answer_over=True", "is_answer_over=False"),
    (_turn_rules, "first_prompt", "if owner.state.seq or prompt is None:", "if prompt is None:"),
    (_turn_rules, "_queue", ">= owner.policy", "> owner.policy"),
    (_turn_rules, "_queue", "waits_for=turns.waits_for", "waits_for=None"),
    (_turn_rules, "_queue", "seq = owner.state.seq + 1", "seq = owner.state.seq"),
    (_turn_rules, "_joining", "queued_event_id=waiting.id", "queued_event_id=None"),
    (_turn_rules, "_begin_step", "if turns.waits_for is not None:", "if False:"),
    (_turn_rules, "_begin_step", "if owner.state.admission.open_calls:", "if False:"),
    (_turn_rules, "_begin_step", "if waiting.steers == running.turn_id", "if True"),
    (_turn_rules, "_suspend", "is_suspended=True", "is_suspended=False"),
    (_turn_rules, "_suspend", "if not owner.policy.is_resumable:", "if False:"),
    (_turn_rules, "_turn_append", "is_answer_over=says", "is_answer_over=False"),
    (_turn_rules, "_turn_append", "is_suspended=command.suspends", "is_suspended=False"),
    (_turn_rules, "_turn_append", "check_running(", "(lambda *_: 0)("),
    (_turn_rules, "_repair_view", "if event_id in shown", "if True"),
    (_turn_rules, "_pause", "if turns.is_paused:", "if False:"),
    (_turn_rules, "_resume", "if not turns.is_paused:", "if False:"),
    (_turn_rules, "_resume", "if running is None:", "if running is None and False:"),
    (_turn_rules, "_resume", "if turns.awaiting:", "if False:"),
    (_turn_rules, "_resume", "unstarted=turns.confirmed", "unstarted=()"),
    (_turn_rules, "_confirm", "if turns.is_paused:", "if False:"),
    (_turn_rules, "_confirm", "if not command.confirmed:", "if command.confirmed:"),
    (_turn_rules, "_confirm", "if c in owner.state.admission.open_calls", "if True"),
    (_turn_rules, "_confirm", "if command.confirmed else ()", ""),
    (_turn_rules, "_go_on", "if owner.agent_of == running.turn_id:", "if False:"),
    (_turn_rules, "_go_on", "if owner.policy.is_resumable:", "if False:"),
    (_turn_rules, "_go_on", ", answered=answered", ""),
    (_turn_rules, "_end_turn", "if owner.state.turns.waits_for is not None:", "if False:"),
    (_turn_rules, "_end_turn", "events = _close(owner, running, stamp, why)", "events = ()"),
    (_turn_rules, "_end_turn", "check_running(", "(lambda o, *_: o.state.turns.running)("),
    (_turn_rules, "_cancel_turn", "or any(", "and any("),
    (_turn_rules, "_cancel_turn", "(StopTurn(running.turn_id),)", "()"),
    (_turn_rules, "_recover", "if turns.waits_for is not None:", "if False:"),
    (_turn_rules, "_recover", "and owner.policy.is_resumable", ""),
    (_turn_rules, "_recover", "(*events, *interrupted)", "events"),
    (_turn_rules, "_roll_back", "if in_view is None:", "if False:"),
    (_turn_rules, "_roll_back", "queued_again=True", "queued_again=False"),
    (_turn_rules, "_roll_back", "running.messages[1:]", "running.messages[2:]"),
    (_turn_rules, "_roll_back", "turn_id=stamp.new_id()", "turn_id=running.turn_id"),
    (_turn_rules, "_roll_back", "*(event.id for event in closing)", ""),
    (_turn_rules, "_roll_back", "if owner.state.admission.check(events) is None else None", ""),
    (_turn_rules, "_close", "if tool_call_id in unstarted:", "if False:"),
    (_turn_rules, "_close", "if tool_call_id in unstarted:", "if True:"),
    (_turn_rules, "_close", "{*turns.awaiting, *turns.confirmed}", "{*turns.awaiting}"),
    (_turn_rules, "_close", "{*turns.awaiting, *turns.confirmed}", "{*turns.confirmed}"),
    (_turn_rules, "_close", "if said:", "if False:"),
    (_turn_rules, "_then_next_queued", "next(iter(", "next(reversed("),
    (_turn_rules, "_then_next_queued", "(*effects, StartTurn(waiting.turn_id))", "(*effects,)"),
    (_turn_rules, "_then_next_queued", "(*effects, StartTurn", "(StartTurn"),
    (_turn_rules, "check_running", "or epoch != owner.epoch", ""),
    (_turn_rules, "check_running", "or running.turn_id != turn_id", ""),
    (Owner, "apply", "self.agent_of = None", "pass"),
    (Owner, "apply", "self.streamed.clear()", "pass"),
    (TurnTable, "fold", "self._queued.pop(event.message_id, None)", "pass"),
    (TurnTable, "fold", "if event.queued_again:", "if False:"),
    (TurnTable, "fold", "if not event.is_reminder:", "if True:"),
    (TurnTable, "fold", "(*running.messages, event)", "(event,)"),
    (TurnTable, "fold", "self.is_paused, self.awaiting, self.confirmed = False, (), ()", "pass"),
    (TurnTable, "_fold_hold", "if confirmed and self.is_paused", "if confirmed"),
    (TurnTable, "_fold_hold", "if confirmed and self.is_paused", "if self.is_paused"),
    (TurnTable, "_fold_hold", "self.awaiting = ()", "pass"),
    (TurnTable, "_fold_hold", "self.is_paused, self.confirmed = False, ()", "self.is_paused = 0"),
    (TurnTable, "_know", "if first is not None:", "if False:"),
]  # fmt: skip


def test_without_a_fault_every_history_keeps_the_laws() -> None:
    _play_histories()


@pytest.mark.parametrize(
    ("where", "name", "line", "fault"),
    _MUTANTS,
    ids=[f"{name}: {line} -> {fault}" for _, name, line, fault in _MUTANTS],
)
def test_the_laws_see_a_fault_in_the_rules(
    where: type | ModuleType, name: str, line: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, _mutated(getattr(where, name), line, fault))

    with pytest.raises(Exception) as caught:  # noqa: PT011 - a law may fail in any way
        _play_histories()

    assert not isinstance(caught.value, SyntaxError | NameError), caught.value
