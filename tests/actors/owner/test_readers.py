"""The states of a reader: the one table of which may follow which."""

import pytest

from turnkeeper.actors.owner.log_cursor import READER_TRANSITIONS, ReaderState, Signal


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert set(READER_TRANSITIONS) == set(ReaderState)
    reached = {state for row in READER_TRANSITIONS.values() for state in row.values()}
    assert reached == set(ReaderState)


@pytest.mark.parametrize("state", ReaderState)
def test_signals_from_outside_can_come_in_every_state(state: ReaderState) -> None:
    """A reader reads when it is behind; everything else comes from other tasks, at any time."""
    assert set(Signal) - set(READER_TRANSITIONS[state]) <= {Signal.READ}


@pytest.mark.parametrize("state", ReaderState)
def test_a_deletion_is_final_and_a_closed_reader_never_reads_again(state: ReaderState) -> None:
    row = READER_TRANSITIONS[state]
    assert row[Signal.DELETE] is ReaderState.DELETED
    ended = {ReaderState.ENDING, ReaderState.CUT_OFF, ReaderState.DELETED}
    assert row[Signal.CLOSE] in ended
    if state in ended:
        assert set(row.values()) <= ended


def test_a_look_before_the_end_is_never_forgotten() -> None:
    """Invariant: only reading takes a reader out of `BEHIND`, and only into `CURRENT`."""
    row = READER_TRANSITIONS[ReaderState.BEHIND]
    assert [signal for signal, state in row.items() if state is ReaderState.CURRENT] == [
        Signal.READ
    ]
    for state, signals in READER_TRANSITIONS.items():
        if state in {ReaderState.BEHIND, ReaderState.CURRENT}:
            assert signals[Signal.LOOK] is ReaderState.BEHIND
        else:
            assert signals[Signal.LOOK] in {ReaderState.CUT_OFF, ReaderState.DELETED}
