"""The report of a replay: the account of its users and the audit of its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..journal import Journal
from ..recordings.audit import Audit, audit_journal
from ..recordings.transcripts import InputProblem
from ._replay import Replay
from ._users import User

__all__ = ["Report", "empty_report", "make_report"]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is reported at the end."""

    problems: Sequence[InputProblem]
    counts: Mapping[str, int]
    by_policy: Mapping[str, Mapping[str, int]]
    """The same counts for the users of each `on_overlap`."""
    broken: Sequence[str]
    """A sentence about each broken promise."""
    seed: int | None = None
    kills: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    """Why the replay was stopped before its end; empty or None if it was not."""

    @property
    def events_per_second(self) -> float:
        return self.counts["events"] / self.seconds if self.seconds else 0.0

    @property
    def exit_status(self) -> int:
        """Return 1 if a promise is broken or it was stopped, 2 if some input is not usable."""
        if self.broken or self.stopped is not None:
            return 1
        return 2 if self.problems else 0

    def as_json(self) -> dict[str, object]:
        return {
            **self.counts,
            "kills": self.kills,
            "seconds": round(self.seconds, 3),
            "events_per_second": round(self.events_per_second, 1),
            "seed": self.seed,
            "stopped": self.stopped,
            "problems": [problem.model_dump() for problem in self.problems],
            "broken": list(self.broken),
        }


def empty_report(problems: Sequence[InputProblem]) -> Report:
    """Return the report of a replay that had nothing to play."""
    return Report(problems=problems, counts=_counts((), Audit()), by_policy={}, broken=())


async def make_report(
    replay: Replay,
    journal: Journal,
    *,
    seed: int,
    stopped: str | None,
    problems: Sequence[InputProblem],
) -> Report:
    """Audit the journal, without owning it, against the receipts of a replay's users."""
    by_policy: dict[str, Mapping[str, int]] = {}
    audits = []
    for policy in dict.fromkeys(user.on_overlap for user in replay.users):
        users = [user for user in replay.users if user.on_overlap == policy]
        receipts = [replace(user.receipts, cuts_max=replay.kills) for user in users]
        audit = await audit_journal(journal, receipts)
        by_policy[policy] = _counts(users, audit)
        audits.append(audit)
    total = Audit.total(audits)
    return Report(
        problems=problems,
        counts=_counts(replay.users, total),
        by_policy=by_policy,
        broken=[*total.problems, *(p for user in replay.users for p in user.problems)],
        seed=seed,
        kills=replay.kills,
        seconds=replay.seconds,
        stopped=stopped,
    )


def _counts(users: Sequence[User], audit: Audit) -> Mapping[str, int]:
    return {
        **audit.counts(),
        "sent": sum(len(user.receipts.messages) for user in users),
        "overlapped": sum(user.overlapped for user in users),
        "rejected": sum(user.rejected for user in users),
    }
