"""What the tests with real processes share: a small stress, its check, and a database."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from urllib.parse import urlencode

from turnkeeper.actors.cli._crowd import Crowd
from turnkeeper.actors.cli._protocol import StartStress
from turnkeeper.actors.cli._replay import Worker
from turnkeeper.actors.cli._stress_report import StressReport, make_stress_report
from turnkeeper.actors.cli._stress_run import Outage, Stress
from turnkeeper.actors.cli.stress_worker import is_postgres, open_journal
from turnkeeper.runtime import Ports

from .. import postgres

MORTAL_WORKER = Path(__file__).parent / "mortal_worker.py"
NEVER = 1 << 30

_runs = count(1)


@dataclass(slots=True)
class Dying(Stress):
    """A stress whose workers die by themselves, each at its own point, and the last one at none."""

    points: Sequence[tuple[str, int]] = ()
    """Of each worker: where it dies, and the how-manieth time that it passes there."""
    died_at: list[str] = field(default_factory=list)
    backend: str = "asyncio"

    how: str = "kill"

    def _will_restart(self, worker: Worker) -> bool:
        if worker.is_killed or worker.status == -signal.SIGKILL:
            self.died_at.append(self._next_point[0])
            if not worker.is_killed:
                self.outages.append(Outage(self._now()))
            self.worker = self.next_worker
            return True
        return False

    def _is_kill_due(self, at: float, now: float) -> bool:
        """Kill a worker whose disk is broken no earlier than it has refused a message for it."""
        has_refused = self.crowd.unserved["JournalUnavailable"] > 0
        return has_refused and Stress._is_kill_due(self, at, now)

    @property
    def _next_point(self) -> tuple[str, int]:
        lives = len(self.died_at)
        return self.points[lives] if lives < len(self.points) else ("", NEVER)

    @property
    def next_worker(self) -> Sequence[str]:
        point, nth = self._next_point
        worker = (sys.executable, "-P", str(MORTAL_WORKER))
        return (*worker, point, str(nth), self.how, self.backend)


def small_stress(
    db: str,
    *,
    points: Sequence[tuple[str, int]] = (),
    backend: str = "asyncio",
    conversations: int = 5,
    rate: float = 150.0,
    duration_s: float = 0.6,
    seed: int = 1,
    how: str = "kill",
    kills: Sequence[float] = (),
    changed: Callable[[Stress], None] = lambda _: None,
) -> Dying:
    """Some conversations under load, for less than a second if nothing breaks."""
    run = f"run-{os.getpid()}-{next(_runs)}"
    stress = Dying(
        start=StartStress(
            db=db,
            is_own_journal=not is_postgres(db) and not Path(db).exists(),
            seed=seed,
            pace_s=0.02,
            view_events_max=16,
        ),
        crowd=Crowd(
            [f"{run}-{n}" for n in range(conversations)],
            senders=2,
            overlap=0.5,
            rate=rate,
            duration_s=duration_s,
            random=Random(seed),
        ),
        planned_kills=kills,
        ports=Ports(),
        changed=changed,
        worker=(),
        points=points,
        how=how,
        backend=backend,
    )
    stress.worker = stress.next_worker
    return stress


async def check(stress: Stress) -> StressReport:
    """Hold the journal against what was acknowledged."""
    async with open_journal(stress.start.db, read_only=True) as journal:
        report = await make_stress_report(
            stress, journal, options={}, stopped=None, checked=lambda: None
        )
    counts = report.account.counts
    assert report.account.broken == []
    assert counts["acknowledged"] == counts["found"] > counts["sent"] > 0
    assert stress.crowd.is_done
    assert 0 < counts["turns"] <= counts["sent"]  # who steers joins another's turn
    assert counts["calls"] == counts["calls_answered_once"]
    assert counts["views_checked"] > counts["conversations"]
    return report


@contextmanager
def database() -> Iterator[str]:
    """Give the URL of a database that no other test uses; drop it at the end."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    name = f"turnkeeper_test_{os.getpid()}_{next(_runs)}"
    server = postgres.conninfo()
    parameters = {key: str(value) for key, value in conninfo_to_dict(server).items()}
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield f"postgresql:///?{urlencode(parameters | {'dbname': name})}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
