"""The names of recorded conversations in a journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..recordings.transcripts import RecordedConversation
from ._display import printable

__all__ = ["conversation_names", "is_text"]

_STEM_LENGTH_MAX = 200


def conversation_names(
    found: Sequence[tuple[int, RecordedConversation]],
    files: Sequence[Path],
    taken: frozenset[str] = frozenset(),
) -> Sequence[str]:
    """Return an id for each: file and item, and the run if the journal has had one before."""
    stems = [printable(file.stem)[:_STEM_LENGTH_MAX] for file in files]
    if len(set(stems)) < len(stems):
        stems = [f"{n}.{stem}" for n, stem in enumerate(stems, 1)]
    run = 1
    while True:
        suffix = "" if run == 1 else f"-run{run}"
        names = [f"{stems[n]}-{one.item}{suffix}" for n, one in found]
        if taken.isdisjoint(names):
            return names
        run += 1


def is_text(value: str) -> bool:
    """False if an argument had bytes that are not text; no name in a journal has such bytes."""
    return value.encode(errors="replace").decode() == value
