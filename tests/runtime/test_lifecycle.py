"""The phases of a cell: each transition that the table has, and none besides."""

from itertools import product

import pytest

from turnkeeper.runtime._lifecycle import (
    AFTER,
    MAIL,
    TRANSITIONS,
    After,
    Mail,
    Phase,
    is_over,
    is_waiting,
    phase_after,
    transition,
)

# Written out once more, by hand: a change of the table has to be meant.
LEGAL = {
    Phase.STARTING: "LIVE CLEANING STOPPING ENDED",
    Phase.LIVE: "CLEANING STOPPING ENDED",
    Phase.CLEANING: "STARTING BACKOFF HELD REFUSING ENDED",
    Phase.BACKOFF: "STARTING CLEANING STOPPING ENDED",
    Phase.HELD: "STARTING CLEANING STOPPING ENDED",
    Phase.REFUSING: "CLEANING STOPPING ENDED",
    Phase.STOPPING: "ENDED",
    Phase.ENDED: "",
}


@pytest.mark.parametrize(("phase", "to"), list(product(Phase, Phase)))
def test_a_cell_takes_the_transitions_of_the_table_and_no_other(phase: Phase, to: Phase) -> None:
    if to.name in LEGAL[phase].split():
        assert transition(phase, to) is to
        assert TRANSITIONS[phase][to], "each transition says what leads there"
    else:
        with pytest.raises(AssertionError, match=f"from {phase.value} to {to.value}"):
            transition(phase, to)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_leads_to_the_end_and_the_end_leads_nowhere(phase: Phase) -> None:
    assert (Phase.ENDED in TRANSITIONS[phase]) == (phase is not Phase.ENDED)


@pytest.mark.parametrize("phase", [each for each in Phase if each is not Phase.STARTING])
def test_an_actor_becomes_live_only_by_starting(phase: Phase) -> None:
    assert Phase.LIVE not in TRANSITIONS[phase]


@pytest.mark.parametrize(("after", "has_mail"), list(product(After, (False, True))))
def test_what_follows_a_clean_up_is_in_the_table(after: After, *, has_mail: bool) -> None:
    to = phase_after(after, has_mail=has_mail)

    begun = Phase.STOPPING if after is After.END else Phase.CLEANING
    assert to in TRANSITIONS[begun]
    if after is After.PASSIVATE and has_mail:
        assert to is Phase.STARTING, "no mail is lost to a passivation"
    else:
        assert to is AFTER[after]


@pytest.mark.parametrize("phase", Phase)
def test_mail_is_taken_until_the_end_unless_the_actor_refuses_it(phase: Phase) -> None:
    expected = Mail.RETURNED if is_over(phase) else Mail.TAKEN
    assert MAIL[phase] is (Mail.REFUSED if phase is Phase.REFUSING else expected)


@pytest.mark.parametrize("phase", Phase)
def test_a_cell_that_no_runner_steps_can_be_woken_or_stopped(phase: Phase) -> None:
    if is_waiting(phase):
        assert not is_over(phase)
        assert {Phase.CLEANING, Phase.STOPPING} <= TRANSITIONS[phase].keys()
