"""Decisions about failures: pure, without tasks.

A supervisor decides by exception, looking inside exception groups. It counts restarts with OTP's
arithmetic: more than N within a sliding window of T seconds are too many. It spaces them by a
backoff that grows, jitters, and starts over after a quiet period. `_supervisor.py` carries the
decisions out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from random import Random

__all__ = [
    "DEFAULT_SUPERVISION",
    "Backoff",
    "Directive",
    "RestartLog",
    "Strategy",
    "Supervision",
    "check_kind",
    "check_number",
    "check_seconds",
    "check_whole",
    "leaves",
]


def check_number(
    name: str,
    number: object,
    allowed: str,
    *,
    least: float = 0,
    most: float = math.inf,
    is_whole: bool = False,
) -> None:
    """Raise `ValueError` unless this is a number in a range; `allowed` says so in words."""
    is_number = isinstance(number, int if is_whole else int | float)
    # The type is compared first: a text cannot be compared with a number.
    if not is_number or isinstance(number, bool) or not least <= number <= most:  # type: ignore[operator]
        raise ValueError(f"{name} is {number!r}; it takes {allowed}")


def check_whole(name: str, number: object, *, least: int = 1) -> None:
    """Raise `ValueError` unless this is a whole number from `least` on."""
    check_number(name, number, f"a whole number from {least} on", least=least, is_whole=True)


def check_seconds(name: str, seconds: object) -> None:
    """Raise `ValueError` unless this is 0 or more; the clock would never get past NaN."""
    check_number(name, seconds, "0 seconds or more")


def check_kind(name: str, given: object, kind: type) -> None:
    """Raise `TypeError` if a setting has the wrong type, now and not at an actor's failure."""
    if not isinstance(given, kind):
        raise TypeError(f"{name} is {given!r}; it takes a {kind.__name__}")


class Directive(Enum):
    RESUME = "resume"
    """Go on with the next message, state as it is. An actor that failed to start is restarted."""
    RESTART = "restart"
    """Go on with a new actor; its mail is kept, in order."""
    STOP = "stop"
    """Stop it; its mail is handed back."""
    ESCALATE = "escalate"
    """Fail the supervisor itself with the error, for its own supervisor to decide."""


Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delays before restarts in a row.

    The first is `first_s` seconds, and each is `factor` times the one before, up to `max_s`.
    """

    first_s: float = 0.05
    factor: float = 2.0
    max_s: float = 10.0
    jitter: float = 0.2
    """The share of the delay that is random: with 0.2, from 80 to 120 percent of the delay."""
    reset_s: float = 60.0
    """The seconds without a failure after which the delays start over."""

    def __post_init__(self) -> None:
        for name in ("first_s", "max_s", "reset_s"):
            check_seconds(name, getattr(self, name))
        check_number("factor", self.factor, "0 or more")
        check_number("jitter", self.jitter, "a share, from 0 to 1", most=1)

    def delay_s(self, attempt: int, random: Random) -> float:
        """Return the delay before restart number `attempt`, counted from 0."""
        # The exponent is bounded because a float overflows at 1024 doublings.
        try:
            plain = min(self.first_s * self.factor ** min(attempt, 64), self.max_s)
        except OverflowError:  # with a factor of 2**16 or more
            plain = self.max_s if self.first_s else 0.0
        return plain * (1 + self.jitter * (2 * random.random() - 1))


@dataclass(frozen=True, slots=True)
class Supervision:
    """The decisions of a supervisor about failures.

    The first of `rules` whose type matches the error decides, else `otherwise`. `Refused` raised
    by a handler is an answer and not a failure, so no rule applies to it.

    `strategy` says which actors restart: with "one_for_one" the one that failed, with "one_for_all"
    all actors of the supervisor, with "rest_for_one" the one that failed and those that were
    started after it. More than `restarts_max` restarts within `window_s` seconds are escalated.
    `backoff` sets the delay before each restart.
    """

    rules: tuple[tuple[type[BaseException], Directive], ...] = ()
    otherwise: Directive = Directive.RESTART
    strategy: Strategy = "one_for_one"
    restarts_max: int = 5
    window_s: float = 30.0
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        # Checked here, because a failure would be too late: its supervisor could not decide.
        for rule in self.rules:
            _check_rule(rule)
        _check_directive("otherwise", self.otherwise)
        if self.strategy not in get_args(Strategy):
            raise ValueError(
                f"strategy is {self.strategy!r}; it takes one of {', '.join(get_args(Strategy))}"
            )
        check_number("restarts_max", self.restarts_max, "0 or more")
        check_seconds("window_s", self.window_s)
        if not isinstance(self.backoff, Backoff):
            raise TypeError(f"backoff is {self.backoff!r}; it takes a Backoff")

    def directive(self, error: BaseException) -> Directive:
        """Return the decision of the first rule that matches the error, or one inside a group."""
        found = tuple(leaves(error))
        for kind, directive in self.rules:
            if isinstance(error, kind) or any(isinstance(leaf, kind) for leaf in found):
                return directive
        return self.otherwise


def _check_rule(rule: object) -> None:
    pair = rule if isinstance(rule, tuple) else ()
    kinds = pair[0] if pair and isinstance(pair[0], tuple) else pair[:1]
    if len(pair) != 2 or not all(  # noqa: PLR2004 - a pair
        isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds
    ):
        raise TypeError(
            f"rules has {rule!r}; it takes pairs of an error's type and a Directive, "
            "as in rules=((ValueError, Directive.STOP),)"
        )
    _check_directive("the directive of a rule", pair[1])


def _check_directive(what: str, directive: object) -> None:
    if not isinstance(directive, Directive):
        raise TypeError(
            f"{what} is {directive!r}; it takes one of "
            f"{', '.join(f'Directive.{one.name}' for one in Directive)}"
        )


DEFAULT_SUPERVISION: Final = Supervision()


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside a group, however deep; an error that is no group yields itself."""
    found = [error]
    while found:
        one = found.pop()
        if isinstance(one, BaseExceptionGroup):
            found.extend(reversed(one.exceptions))
        else:
            yield one


@dataclass(slots=True)
class RestartLog:
    """The times of recent restarts, as far back as the window reaches."""

    supervision: Supervision
    attempt: int = 0
    _times: deque[float] = field(default_factory=deque)
    _last: float = float("-inf")

    def count_restart(self, now: float) -> bool:
        """Count a restart at `now`; return True if it is one more than the window allows."""
        times = self._times
        times.append(now)
        while times[0] < now - self.supervision.window_s:
            times.popleft()
        return len(times) > self.supervision.restarts_max

    def next_delay_s(self, now: float, random: Random) -> float:
        """Return the delay before a restart that is due now; the next delay is longer."""
        backoff = self.supervision.backoff
        if now - self._last > backoff.reset_s:
            self.attempt = 0
        delay = backoff.delay_s(self.attempt, random)
        self.attempt += 1
        # Quiet is counted from when the restart takes effect, not from the failure.
        self._last = now + delay
        return delay

    def forget(self) -> None:
        """Start over: the counted restarts have been escalated."""
        self._times.clear()
        self.attempt = 0
