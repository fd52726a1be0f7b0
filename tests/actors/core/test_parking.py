"""Results that come before their calls: parked, bounded, timed."""

from __future__ import annotations

from tests.actors.core.logs import Maker
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.parking import Parking
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.events import Event


def _refused(event: Event, state: Folded | None = None) -> AdmissionRefused:
    violation = (state or Folded()).admission.check((event,))
    assert violation is not None
    return AdmissionRefused("c", violation)


def _join(parking: Parking[str], refusal: AdmissionRefused, ticket: str) -> bool:
    parked = parking.find((refusal.violation.event,))
    assert parked is not None
    return parking.join(parked, refusal, ticket)


def test_results_that_come_before_their_calls_follow_them_when_these_have_come() -> None:
    """Pattern a08: S U R(1) R(2) A{1,2}."""
    make = Maker()
    state = Folded()
    parking = Parking[str]()
    for event in (make.system(), make.user()):
        state.fold(event)
    for call_id in ("1", "2"):
        refused = _refused(make.result(call_id), state)
        assert parking.park(refused, f"asker of {call_id}", now=0.0) is None

    assert parking.take_ready(state.admission.open_calls) == ()
    for call_id in ("2", "1"):
        state.fold(make.action(call_id))
    ready = parking.take_ready(state.admission.open_calls)

    assert [parked.ticket for parked in ready] == ["asker of 1", "asker of 2"]
    for parked in ready:
        state.fold(parked.event)
    assert not state.admission.open_calls
    assert len(parking) == 0


def test_a_second_result_for_one_parked_call_is_a_duplicate() -> None:
    make = Maker()
    parking = Parking[None]()
    assert parking.park(_refused(make.result("1")), None, now=0.0) is None
    second = parking.park(_refused(make.error("1")), None, now=0.0)
    assert second is not None
    assert second.violation.name == "duplicate_tool_result"


def test_a_parked_result_that_is_sent_again_waits_for_both_senders_within_the_bound() -> None:
    make = Maker()
    parking = Parking[str](results_max=2)
    refused = _refused(make.result("1"))
    assert parking.park(refused, "first", now=0.0) is None
    assert _join(parking, refused, "second")
    assert not _join(parking, refused, "third")
    assert [parked.ticket for parked in parking.take_ready({"1"})] == ["first", "second"]
    assert len(parking) == 0


def test_a_parked_result_that_is_sent_again_takes_no_place_of_another() -> None:
    make = Maker()
    parking = Parking[str](results_max=2)
    again, other, third = (_refused(make.result(str(n))) for n in range(3))
    assert parking.park(again, "first", now=0.0) is None
    assert _join(parking, again, "second")
    assert parking.park(other, "other", now=0.0) is None
    assert parking.park(third, "third", now=0.0) is third


def test_all_senders_of_a_parked_result_are_refused_at_once_when_the_first_is_overdue() -> None:
    """Else it could still get into the log after the first had been told that it was refused."""
    make = Maker()
    parking = Parking[str](wait_s=10.0)
    again, other = _refused(make.result("1")), _refused(make.result("2"))
    parking.park(again, "first", now=100.0)
    parking.park(other, "other", now=103.0)
    _join(parking, again, "second")

    assert parking.next_deadline == 110.0
    overdue = parking.take_overdue(110.0)

    assert [parked.ticket for parked in overdue] == ["first", "second"]
    assert parking.next_deadline == 113.0


def test_what_is_not_an_early_result_stays_refused() -> None:
    make = Maker()
    parking = Parking[None]()
    state = Folded()
    state.fold(make.action("1"))
    refused = _refused(make.user(), state)
    assert parking.park(refused, None, now=0.0) is refused
    assert len(parking) == 0


def test_parking_is_bounded_in_number() -> None:
    make = Maker()
    parking = Parking[None](results_max=2)
    refused = [_refused(make.result(str(n))) for n in range(3)]
    kept = [parking.park(refusal, None, now=0.0) for refusal in refused]
    assert kept == [None, None, refused[2]]


def test_parking_is_bounded_in_time() -> None:
    make = Maker()
    parking = Parking[str](wait_s=10.0)
    assert Parking[str]().next_deadline is None
    early, late = _refused(make.result("1")), _refused(make.result("2"))
    parking.park(early, "one", now=100.0)
    parking.park(late, "two", now=105.0)

    assert parking.next_deadline == 110.0
    assert parking.take_overdue(109.9) == ()
    (overdue,) = parking.take_overdue(110.0)
    assert (overdue.ticket, overdue.refusal) == ("one", early)
    assert parking.next_deadline == 115.0
    assert [parked.ticket for parked in parking.take_all()] == ["two"]
    assert len(parking) == 0
