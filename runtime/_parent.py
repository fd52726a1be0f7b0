"""A cell and its parent, as they see each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ._lifecycle import After
from ._messages import Ask
from ._supervision import RestartLog, Supervision

if TYPE_CHECKING:
    from ._incarnation import Incarnation

__all__ = ["Child", "Parent", "Verdict"]

Verdict: TypeAlias = tuple[After | None, float]
"""The decision about a failed child (None: it goes on as it is), and the delay before that."""


class Child(Protocol):
    """An actor or a supervisor, as its supervisor sees it."""

    name: str
    own_log: RestartLog | None
    backoff_log: RestartLog | None

    def asks_of(self, target: object) -> Iterator[Ask]: ...

    async def stop(self, reason: str, *, patient_until: float | None = None) -> None: ...

    def request_stop(self, reason: str) -> None: ...

    async def hold(self) -> None: ...

    async def release(self) -> None: ...


class Parent(Protocol):
    """A supervisor, as the cells below it see it."""

    supervision: Supervision
    within: Incarnation | None
    """The incarnation that it belongs to; None if that is the runtime."""

    def judge(self, child: Child, error: BaseException, *, has_started: bool = True) -> Verdict: ...

    def remove(self, child: Child) -> None: ...
