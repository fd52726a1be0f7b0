"""The view is a function of the log: the laws of the conversation core, on drawn logs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.core import laws, logs
from tests.drawn import examples
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.events import EVENT_CLASSES, Event


def test_the_drawn_logs_hold_every_kind_of_event() -> None:
    """Else the laws below would say less than they seem to."""
    draw = random.Random(1)
    kinds: set[str] = set()
    for _ in range(60):
        moves = [
            (draw.choice(logs.MOVES), draw.randrange(12), draw.randrange(12)) for _ in range(40)
        ]
        kinds |= {event.kind for event in logs.Admissible().play(moves)}
    assert kinds == EVENT_CLASSES.keys() - {"condensation_summary"} | {"from_the_future"}


@pytest.mark.sweep
@settings(max_examples=examples(100))
@given(log=logs.admissible_logs, reopened_at=st.integers(1, 40))
def test_every_fold_of_an_admitted_log_is_its_rebuild_at_every_prefix(
    log: list[Event], reopened_at: int
) -> None:
    laws.check_admissible(log, reopened_at)


@pytest.mark.sweep
@settings(max_examples=examples(300))
@given(log=logs.wild_logs(), moves=logs.moves(12))
def test_a_log_from_elsewhere_is_repaired_into_one_that_a_model_accepts_and_that_goes_on(
    log: list[Event], moves: list[logs.Move]
) -> None:
    laws.check_wild(log, moves)


@pytest.mark.sweep
@settings(max_examples=examples(300))
@given(proposed=logs.wild_logs(max_size=60, ids_max=12))
def test_whatever_is_sent_what_admission_lets_through_is_a_log_whose_fold_is_its_rebuild(
    proposed: list[Event],
) -> None:
    laws.check_filtered(proposed)


@pytest.mark.sweep
@settings(max_examples=examples(300))
@given(proposed=logs.wild_logs(max_size=60, ids_max=3))
def test_an_id_that_admission_has_forgotten_may_be_used_again_and_does_no_harm(
    proposed: list[Event],
) -> None:
    laws.check_filtered(proposed, limits=Limits(finished_calls_max=0))


@pytest.mark.sweep
@settings(max_examples=examples(150))
@given(log=logs.admissible_logs, data=st.data())
def test_admission_is_what_replaying_the_whole_history_says(
    log: list[Event], data: st.DataObject
) -> None:
    laws.check_admission(log, data.draw(logs.candidates(log)))


@pytest.mark.sweep
@settings(max_examples=examples(100))
@given(log=logs.admissible_logs)
def test_every_event_survives_the_round_trip_through_json_exactly(log: list[Event]) -> None:
    laws.check_round_trip(log)
