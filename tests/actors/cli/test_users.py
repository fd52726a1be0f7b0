"""The users of a replay get every message in, whatever happens to the worker meanwhile."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors import OnOverlap
from turnkeeper.actors.cli._protocol import (
    Accepted,
    Ended,
    Held,
    Logged,
    Order,
    Refused,
    Release,
    Send,
)
from turnkeeper.actors.cli._users import User, plan_kills, plan_users
from turnkeeper.actors.recordings.transcripts import RecordedConversation, parse_recorded

ACT: Sequence[OnOverlap] = ("queue", "interrupt", "steer", "rollback", "reject")
SEEDS = 400


def record(exchanges: int) -> RecordedConversation:
    messages = []
    for n in range(exchanges):
        messages.append({"role": "user", "content": f"question {n}"})
        messages.append({"role": "assistant", "content": f"answer {n}"})
    return parse_recorded(json.dumps([messages]).encode(), "a.json").conversations[0]


def plan(
    exchanges: int, on_overlap: OnOverlap = "queue", overlap: float = 1.0, seed: int = 0
) -> User:
    (user,) = plan_users(
        [("a", record(exchanges), on_overlap)], overlap=overlap, random=Random(seed)
    )
    return user


def accepted(exchange: int, seq: int, *, is_duplicate: bool = False) -> Accepted:
    return Accepted(conversation="a", exchange=exchange, seq=seq, is_duplicate=is_duplicate)


def ended(exchange: int, outcome: str = "completed") -> Ended:
    return Ended(conversation="a", exchange=exchange, outcome=outcome)


def held(exchange: int) -> Held:
    return Held(conversation="a", exchange=exchange)


def refused(exchange: int) -> Refused:
    return Refused(conversation="a", exchange=exchange, why="busy")


def sent(orders: Sequence[Order]) -> list[int]:
    return [order.exchange for order in orders if isinstance(order, Send)]


def released(orders: Sequence[Order]) -> list[int]:
    return [order.exchange for order in orders if isinstance(order, Release)]


# --- one thing at a time -------------------------------------------------------------------------


def test_without_overlap_the_next_message_waits_for_the_answer() -> None:
    user = plan(2, overlap=0.0)

    assert sent(user.orders_for_new_worker()) == [0]
    assert sent(user.note(accepted(0, 2))) == []
    assert sent(user.note(ended(0))) == [1]
    assert user.overlapped == 0


def test_overlapping_messages_are_sent_as_soon_as_the_one_before_is_durable() -> None:
    user = plan(3)

    assert sent(user.orders_for_new_worker()) == [0]
    assert sent(user.note(accepted(0, 2))) == [1]
    assert sent(user.note(accepted(1, 3))) == [2]


def test_an_agent_is_held_until_the_overlapping_message_is_accepted() -> None:
    user = plan(2)
    user.orders_for_new_worker()
    user.note(accepted(0, 2))

    assert released(user.note(held(0))) == []
    assert released(user.note(accepted(1, 3))) == [0]


def test_an_agent_is_held_also_when_it_is_there_before_the_message_is_acknowledged() -> None:
    user = plan(2)
    user.orders_for_new_worker()

    assert user.note(held(0)) == []
    assert sent(user.note(accepted(0, 2))) == [1]
    assert released(user.note(accepted(1, 3))) == [0]


def test_an_agent_that_nobody_overlaps_any_more_is_released_at_once() -> None:
    user = plan(2)
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(accepted(1, 3))

    assert released(user.note(held(0))) == [0]


@pytest.mark.parametrize("on_overlap", ["interrupt", "rollback"])
def test_who_cuts_a_turn_off_waits_until_there_is_something_of_it(on_overlap: OnOverlap) -> None:
    user = plan(2, on_overlap)
    user.orders_for_new_worker()

    assert sent(user.note(accepted(0, 2))) == []
    assert sent(user.note(held(0))) == [1]


def test_a_refused_message_is_sent_again_when_the_turn_before_has_ended() -> None:
    user = plan(2, "reject")
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(held(0))

    assert released(user.note(refused(1))) == [0]
    assert sent(user.note(ended(0))) == [1]
    assert (user.rejected, user.overlapped) == (1, 1)


def test_a_refusal_while_no_turn_runs_is_a_breach_and_ends_the_user() -> None:
    user = plan(2, overlap=0.0)
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(ended(0))

    assert user.note(refused(1)) == []
    assert user.is_done
    assert user.problems == [
        "conversation a: message 1 was refused, and no turn ran: busy",
    ]


def test_a_refused_message_that_was_written_is_a_breach() -> None:
    user = plan(2, "reject")
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(refused(1))
    user.note(ended(0))

    user.note(accepted(1, 5, is_duplicate=True))

    assert user.problems == ["conversation a: message 1 was refused, but was written"]


def test_a_new_worker_is_told_all_that_has_not_ended_under_the_same_numbers() -> None:
    user = plan(3)
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(accepted(1, 3))

    assert sent(user.orders_for_new_worker()) == [0, 1, 2]


def test_a_refused_message_whose_second_acceptance_was_not_heard_is_no_breach() -> None:
    user = plan(2, "reject")
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(refused(1))
    user.note(ended(0))

    assert sent(user.orders_for_new_worker()) == [1]
    user.note(accepted(1, 5, is_duplicate=True))

    assert user.problems == []


@pytest.mark.parametrize(
    "report", [accepted(0, 9, is_duplicate=True), accepted(0, 2, is_duplicate=False)]
)
def test_a_message_that_is_known_elsewhere_or_not_at_all_is_a_breach(report: Accepted) -> None:
    user = plan(2)
    user.orders_for_new_worker()
    user.note(accepted(0, 2))

    user.note(report)

    assert user.problems == [
        f"conversation a: message 0, known at seq 2, was written again at {report.seq}"
    ]


def test_an_event_that_is_told_at_two_places_is_a_breach() -> None:
    user = plan(1)
    user.note(Logged(conversation="a", event_id="e", seq=3))
    user.note(Logged(conversation="a", event_id="e", seq=3))
    user.note(Logged(conversation="a", event_id="e", seq=4))

    assert user.problems == ["conversation a: event e was reported at seq 3 and at 4"]


def test_a_turn_that_ends_twice_in_different_ways_is_a_breach() -> None:
    user = plan(1)
    user.orders_for_new_worker()
    user.note(accepted(0, 2))
    user.note(ended(0))
    user.note(ended(0, "interrupted"))

    assert user.problems == [
        "conversation a: the turn of message 0 ended completed, then interrupted"
    ]


# --- all of it, against a worker that dies -------------------------------------------------------


@dataclass
class Worker:
    """A model of the worker: a durable log, and a memory that is lost when it dies."""

    user: User
    random: Random
    log: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: int | None = None
    outcomes: dict[int, str] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    reports: list[Accepted | Refused | Held | Ended] = field(default_factory=list)
    watched: set[int] = field(default_factory=set)
    is_held: bool = False
    is_released: bool = False

    def start(self) -> None:
        self.orders, self.reports, self.watched = [], [], set()
        if self.running is not None:
            self.end("interrupted")
        self.orders.extend(self.user.orders_for_new_worker())

    def end(self, outcome: str) -> None:
        assert self.running is not None
        self.outcomes[self.running] = outcome
        if self.running in self.watched:
            self.reports.append(ended(self.running, outcome))
        self.begin(self.waiting.pop(0) if self.waiting else None)

    def begin(self, exchange: int | None) -> None:
        self.running = exchange
        self.is_held = self.is_released = False

    def can_act(self) -> bool:
        return self.running is not None and (not self.is_held or self.is_released)

    def act(self) -> None:
        assert self.running is not None
        if self.running in self.user.part.held and not self.is_held:
            self.is_held = True
            self.reports.append(held(self.running))
        else:
            self.end("completed")

    def obey(self) -> None:
        order = self.orders.pop(0)
        if isinstance(order, Release):
            self.is_released |= order.exchange == self.running
        elif isinstance(order, Send):
            self.take(order)

    def take(self, order: Send) -> None:
        n = order.exchange
        is_known = n in self.log
        if not is_known:
            if self.running is not None and order.on_overlap == "reject":
                self.reports.append(refused(n))
                return
            self.log.append(n)
            if self.running is not None and order.on_overlap in ("queue", "steer"):
                self.waiting.append(n)
            else:
                if self.running is not None:
                    self.end("interrupted")
                self.begin(n)
        self.reports.append(accepted(n, self.log.index(n) + 1, is_duplicate=is_known))
        self.watched.add(n)
        if n in self.outcomes:
            self.reports.append(ended(n, self.outcomes[n]))

    def deliver(self) -> None:
        self.orders.extend(self.user.note(self.reports.pop(0)))


def run(user: User, random: Random, deaths: int) -> Worker:
    worker = Worker(user, random)
    worker.start()
    for _ in range(100 * (deaths + 1) * len(user.part.recorded.exchanges)):
        if user.is_done:
            break
        moves = [
            *([worker.obey] if worker.orders else []),
            *([worker.act] if worker.can_act() else []),
            *([worker.deliver] if worker.reports else []),
        ]
        assert moves, f"all wait for each other: {user}"
        if deaths and random.random() < 0.2:
            deaths -= 1
            # What is in the pipe is read before the next worker starts.
            for _ in range(random.randint(0, len(worker.reports))):
                worker.deliver()
            worker.start()
        else:
            random.choice(moves)()
    return worker


@pytest.mark.parametrize("on_overlap", ACT)
def test_every_message_gets_in_once_and_in_order_however_often_the_worker_dies(
    on_overlap: OnOverlap,
) -> None:
    for seed in range(SEEDS):
        random = Random(seed)
        exchanges, deaths = random.randint(1, 8), random.randint(0, 5)
        overlap = random.choice([0.0, 0.5, 1.0])
        user = plan(exchanges, on_overlap, overlap, seed)

        worker = run(user, random, deaths)

        assert user.is_done, seed
        assert user.receipts.is_finished, seed
        assert user.problems == [], seed
        assert worker.log == list(range(exchanges)), seed
        assert user.receipts.messages == {n: n + 1 for n in range(exchanges)}, seed
        assert user.receipts.ended == worker.outcomes, seed
        if not deaths:
            assert user.overlapped == len(user.overlapping) == round(overlap * (exchanges - 1))


# --- the plan ------------------------------------------------------------------------------------


@given(overlap=st.floats(0, 1), seed=st.integers(0, 100))
def test_the_share_of_overlapping_messages_is_exact(overlap: float, seed: int) -> None:
    recorded = [(f"c{n}", record(n), ACT[n % len(ACT)]) for n in range(1, 6)]

    users = plan_users(recorded, overlap=overlap, random=Random(seed))

    assert sum(len(user.overlapping) for user in users) == round(overlap * (0 + 1 + 2 + 3 + 4))
    for user in users:
        assert set(user.part.held) == {n - 1 for n in user.overlapping}


def test_the_same_seed_gives_the_same_plan() -> None:
    recorded = [(f"c{n}", record(5), ACT[n % len(ACT)]) for n in range(6)]

    def made(seed: int) -> tuple[object, object]:
        random = Random(seed)
        users = plan_users(recorded, overlap=0.5, random=random)
        return [user.part.held for user in users], plan_kills(3, users, random)

    assert made(7) == made(7)
    assert made(7) != made(8)


@given(kills=st.integers(0, 20), seed=st.integers(0, 100))
def test_kills_come_in_order_and_within_what_is_sent(kills: int, seed: int) -> None:
    users = plan_users([("a", record(3), "queue")], overlap=0.0, random=Random(seed))

    planned = plan_kills(kills, users, Random(seed))

    assert len(planned) == kills
    assert planned == sorted(planned)
    assert all(1 <= kill.acknowledged <= 3 for kill in planned)
