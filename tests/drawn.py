"""A share of a sweep for the usual run, drawn from the commit.

Another commit draws another share, and all who run the same commit draw the same. `make sweep`
gives `--whole`, with which nothing is left out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

__all__ = ["commit", "drawn", "examples", "first_seed", "is_whole", "make_whole"]

T = TypeVar("T")

NO_COMMIT = "0" * 40
"""Outside a repository, as in a source archive, there is one draw."""

_is_whole = False


@cache
def commit() -> str:
    """Return the hash of the commit that is checked out."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git
        return NO_COMMIT
    return head.stdout.strip() or NO_COMMIT


def first_seed() -> int:
    """Return a seed that is fresh with each commit."""
    return int(commit()[:8], 16)


def make_whole() -> None:
    """Have `drawn` leave nothing out. Called once, before tests are collected."""
    global _is_whole  # noqa: PLW0603 - it is an option of the whole run, asked for at collection
    _is_whole = True


def is_whole() -> bool:
    """Return whether this run is `make sweep`."""
    return _is_whole


def drawn(population: Sequence[T], share: int, *, of: str = "") -> Sequence[T]:
    """Return `share` members of the population in their order, or all that there are.

    `of`: what is drawn for. Populations of one size are drawn alike, unless this differs.
    """
    if _is_whole or share >= len(population):
        return population
    random = Random(f"{commit()} {len(population)}{of}")
    return [population[at] for at in sorted(random.sample(range(len(population)), share))]


def examples(whole: int) -> int:
    """Return how many examples a property takes: all of them in `make sweep`, else a third."""
    return whole if _is_whole else whole // 3
