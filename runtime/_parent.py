"""A cell and its parent, as they see each other."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from ._lifecycle import After
from ._supervision import RestartLog, Supervision

__all__ = ["Child", "Parent", "Verdict"]

Verdict: TypeAlias = tuple[After | None, float]
"""The decision about a failed child (None: it goes on as it is), and the delay before that."""


class Child(Protocol):
    """An actor or a supervisor, as its supervisor sees it."""

    name: str
    own_log: RestartLog | None
    backoff_log: RestartLog | None

    async def stop(self, reason: str, *, patient_until: float | None = None) -> None: ...

    def request_stop(self, reason: str) -> None: ...

    async def hold(self) -> None: ...

    async def release(self) -> None: ...


class Parent(Protocol):
    """A supervisor, as the cells below it see it."""

    supervision: Supervision

    def judge(self, child: Child, error: BaseException, *, has_started: bool = True) -> Verdict: ...

    def remove(self, child: Child) -> None: ...
