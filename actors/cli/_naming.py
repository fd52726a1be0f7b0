"""The names of recorded conversations in a journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import InvalidConversationId
from ..recordings.transcripts import RecordedConversation
from ..values.text import check_new_conversation_id
from ._display import printable

__all__ = ["conversation_names", "is_text", "own_name"]

_STEM_LENGTH_MAX = 200


def conversation_names(
    found: Sequence[tuple[int, RecordedConversation]],
    files: Sequence[Path],
    taken: frozenset[str] = frozenset(),
) -> Sequence[str]:
    """Return an id for each conversation: its name if that can be an id, else its file and item.

    If the journal has had one of these ids before, the ids of all of them get the run as a suffix.
    """
    stems = [printable(file.stem)[:_STEM_LENGTH_MAX] for file in files]
    if len(set(stems)) < len(stems):
        stems = [f"{n}.{stem}" for n, stem in enumerate(stems, 1)]
    run = 1
    while True:
        suffix = "" if run == 1 else f"-run{run}"
        names = [f"{own_name(one) or f'{stems[n]}-{one.item}'}{suffix}" for n, one in found]
        if taken.isdisjoint(names):
            return names
        run += 1


def own_name(recorded: RecordedConversation) -> str | None:
    """Return the name that a recording gives a conversation, if a conversation can have it."""
    name = recorded.name
    if name is None:
        return None
    try:
        check_new_conversation_id(name)
    except InvalidConversationId:
        return None
    return name


def is_text(value: str) -> bool:
    """True unless an argument has bytes that are not text, which no name in a journal has."""
    return value.encode(errors="replace").decode() == value
