"""The clients of a stress get every message in, whatever happens to the worker meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from turnkeeper.actors.cli._crowd import ON_OVERLAP, RESEND_S, RESEND_S_MAX, Crowd
from turnkeeper.actors.cli._protocol import Accepted, Ended, Logged, Order, Refused, Send, Unserved

NEVER = 1e9


def crowd(
    conversations: int = 1,
    *,
    senders: int = 1,
    overlap: float = 0.0,
    rate: float = 1.0,
    duration_s: float = NEVER,
    seed: int = 1,
) -> Crowd:
    return Crowd(
        [f"c{n}" for n in range(conversations)],
        senders=senders,
        overlap=overlap,
        rate=rate,
        duration_s=duration_s,
        random=Random(seed),
    )


def sent(orders: Sequence[Order]) -> list[tuple[str, int]]:
    assert all(isinstance(order, Send) for order in orders)
    return [(order.conversation, order.exchange) for order in orders if isinstance(order, Send)]


def accepted(number: int, seq: int, *, is_duplicate: bool = False) -> Accepted:
    return Accepted(conversation="c0", exchange=number, seq=seq, is_duplicate=is_duplicate)


def refused(number: int) -> Refused:
    return Refused(conversation="c0", exchange=number, why="busy")


def unserved(number: int) -> Unserved:
    return Unserved(conversation="c0", exchange=number, error="JournalUnavailable", why="away")


def ended(number: int, outcome: str = "completed") -> Ended:
    return Ended(conversation="c0", exchange=number, outcome=outcome)


def test_messages_come_at_the_rate_and_for_the_duration() -> None:
    clients = crowd(1_000, rate=100.0, duration_s=20.0)

    first_half = len(clients.take_due(10.0))
    clients.take_due(100.0)

    assert 900 < first_half < 1_100
    assert 1_800 < clients.sent < 2_200
    assert clients.next_due is None


def test_every_conversation_has_its_turn_before_one_has_another() -> None:
    clients = crowd(50, rate=1.0)

    for used in range(1, 51):
        assert clients.next_due is not None
        clients.take_due(clients.next_due)
        assert len(clients.used) == used
    clients.take_due(10_000.0)
    assert len(clients.used) == 50


def test_a_sender_sends_on_when_acknowledged_and_latency_counts_from_when_it_was_due() -> None:
    clients = crowd(rate=1.0)
    due = clients.next_due
    assert due is not None
    assert sent(clients.take_due(due + 10.0)) == [("c0", 0)]

    assert sent(clients.note(accepted(0, 2), due + 10.0)) == [("c0", 1)]

    assert clients.latencies[0] == pytest.approx(10.0)
    clients.note(accepted(1, 5), due + 11.0)
    assert clients.latencies[1] < 11.0


def test_two_senders_do_not_wait_for_each_other() -> None:
    clients = crowd(senders=2, rate=1.0)

    assert sorted(sent(clients.take_due(50.0))) == [("c0", 0), ("c0", 1)]
    assert sent(clients.note(accepted(1, 3), 51.0)) == [("c0", 3)]
    assert sent(clients.note(accepted(0, 4), 52.0)) == [("c0", 2)]


def test_what_is_refused_or_cannot_be_served_is_sent_again_later_each_time() -> None:
    clients = crowd(rate=1.0, duration_s=0.9, seed=3)
    (first,) = sent(clients.take_due(5.0))
    now = 5.0
    for report, times in ((refused(0), 1), (unserved(0), 2), (refused(0), 4), (unserved(0), 8)):
        wait = times * RESEND_S
        assert clients.note(report, now) == ()
        assert clients.note(report, now) == ()
        assert clients.next_due == pytest.approx(now + wait)
        assert clients.take_due(now + wait / 2) == []

        now += wait + 0.001
        assert sent(clients.take_due(now)) == [first]
        assert clients.take_due(now) == []
    for _ in range(10):
        clients.note(unserved(0), now)
        assert clients.next_due is not None
        assert clients.next_due <= now + RESEND_S_MAX
        now = clients.next_due
        clients.take_due(now)
    assert clients.next_due is None


def test_an_answer_that_was_refused_for_the_policy_is_not_in_the_latency_of_those_behind_it() -> (
    None
):
    clients = crowd(rate=10.0)
    clients.take_due(1.0)
    clients.note(refused(0), 1.0)
    clients.take_due(20.0)

    clients.note(accepted(0, 2), 20.0)
    clients.note(accepted(1, 5), 20.5)

    assert clients.latencies[-1] == pytest.approx(0.5)


def test_a_new_worker_is_told_all_that_is_open_under_the_same_numbers() -> None:
    clients = crowd(senders=2, rate=1.0)
    clients.take_due(50.0)
    clients.note(accepted(0, 1), 50.0)
    clients.note(refused(1), 50.0)

    assert sorted(sent(clients.orders_for_new_worker())) == [("c0", 0), ("c0", 1), ("c0", 2)]
    # Already written by the worker that died: no breach, for it may have been on its way.
    clients.note(accepted(1, 2, is_duplicate=True), 51.0)
    clients.note(accepted(0, 1, is_duplicate=True), 51.0)
    assert clients.problems == []


def test_it_is_done_when_every_turn_has_ended() -> None:
    clients = crowd(rate=1.0, duration_s=0.9, seed=3)
    clients.take_due(5.0)
    are_done = [clients.is_done]
    clients.note(accepted(0, 2), 5.0)
    are_done.append(clients.is_done)
    clients.note(ended(0), 5.0)
    are_done.append(clients.is_done)

    assert are_done == [False, False, True]
    assert [receipts.is_finished for receipts in clients.used] == [True]
    clients.note(ended(0), 5.0)
    assert clients.open == 0


def test_overlapping_messages_go_where_a_turn_runs() -> None:
    alone, together = crowd(100, rate=1.0), crowd(100, overlap=1.0, rate=1.0)

    for clients in (alone, together):
        clients.take_due(50.0)

    assert len(alone.used) > 30
    assert len(together.used) == 1


def test_conversations_have_each_policy() -> None:
    clients = crowd(len(ON_OVERLAP), rate=1.0)

    orders = clients.take_due(100.0)

    assert {order.on_overlap for order in orders if isinstance(order, Send)} == set(ON_OVERLAP)


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ([accepted(0, 1, is_duplicate=True)], "was sent for the first time, and was in the log"),
        ([refused(0), accepted(0, 1, is_duplicate=True)], "was refused, and was in the log"),
        (
            [accepted(0, 1), accepted(0, 1)],
            "message 0, known at seq 1, was reported again at seq 1",
        ),
        (
            [accepted(0, 1), accepted(0, 2, is_duplicate=True)],
            "known at seq 1, was reported again at seq 2",
        ),
        (
            [accepted(0, 1), ended(0), ended(0, "failed")],
            "the turn of message 0 ended completed, then failed",
        ),
        (
            [
                Logged(conversation="c0", event_id="e", seq=3),
                Logged(conversation="c0", event_id="e", seq=4),
            ],
            "event e was reported at seq 3 and at 4",
        ),
    ],
)
def test_what_cannot_be_is_told(
    reports: Sequence[Accepted | Refused | Ended | Logged], told: str
) -> None:
    clients = crowd(rate=1.0)
    clients.take_due(5.0)

    for report in reports:
        clients.note(report, 5.0)

    (problem,) = clients.problems
    assert problem.startswith("conversation c0: ")
    assert told in problem
