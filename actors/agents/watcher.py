"""The port for an observer of conversations; see `docs/watching.md`.

`Conversations.watch` takes a `Watcher`. It is called in the event loop, between decisions: it may
not wait and may not raise. Its context managers are entered and left in the task that does the
work, so variables that they set reach the work and all that it starts. It sees nothing that is not
committed, except that a commit, a model call and a tool call have begun.

`integrations/otel.py` implements it; the default does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from turnkeeper.runtime import Runtime

from ..core.commands import Sent
from ..core.turn_table import RunningTurn
from ..events import ActionEvent, LoggedEvent, StepRequest
from ..models.base import Model, ModelResponse

__all__ = [
    "NoWatcher",
    "NoteCall",
    "NoteFailure",
    "NoteResponse",
    "NoteSent",
    "Watcher",
    "Watching",
]

NoteSent: TypeAlias = Callable[[Sent], None]
NoteFailure: TypeAlias = Callable[[BaseException], None]
NoteResponse: TypeAlias = Callable[[ModelResponse], None]
NoteCall: TypeAlias = Callable[[str], None]
"""Called with the kind of failure, as one word, if the call failed."""


class Watcher(Protocol):
    """Observes the conversations of one `Conversations`."""

    def opened(self, runtime: Runtime) -> None:
        """Note that the conversations are open, and in which runtime."""

    def owned(self, conversation_id: str, queued: int) -> None:
        """Note that an owner here has begun or committed; `queued` chat messages wait."""

    def released(self, conversation_id: str) -> None:
        """Note that the owner here has ended."""

    def committed(self, conversation_id: str, events: Sequence[LoggedEvent]) -> None:
        """Note events that were written here, in order and once."""

    def sending(self, conversation_id: str, message_id: str) -> AbstractContextManager[NoteSent]:
        """Surround `send`: it ends when the chat message is durable."""

    def committing(self, conversation_id: str, events: int) -> AbstractContextManager[object]:
        """Surround a write to the journal; `events` is the number of events."""

    def running(
        self, conversation_id: str, turn: RunningTurn, agent: object
    ) -> AbstractContextManager[NoteFailure]:
        """Surround a run of the agent. A turn has several if it is held or resumed."""

    def asking(
        self, conversation_id: str, model: Model, request: StepRequest
    ) -> AbstractContextManager[NoteResponse]:
        """Surround one attempt of `turn.ask` to get an answer of this `model`."""

    def calling(
        self, conversation_id: str, action: ActionEvent
    ) -> AbstractContextManager[NoteCall]:
        """Surround one tool call."""


def _ignore(_: object) -> None:
    pass


class _Nothing(AbstractContextManager[Callable[[object], None]]):
    """As `nullcontext(_ignore)`; its static methods save binding a method at each commit."""

    @staticmethod
    def __enter__() -> Callable[[object], None]:
        return _ignore

    @staticmethod
    def __exit__(*_: object) -> None:
        pass


_NOTHING: Final = _Nothing()


class NoWatcher:
    """Watches nothing."""

    def opened(self, runtime: Runtime) -> None:
        pass

    def owned(self, conversation_id: str, queued: int) -> None:
        pass

    def released(self, conversation_id: str) -> None:
        pass

    def committed(self, conversation_id: str, events: Sequence[LoggedEvent]) -> None:
        pass

    def sending(self, *_: object) -> AbstractContextManager[NoteSent]:
        return _NOTHING

    def committing(self, *_: object) -> AbstractContextManager[object]:
        return _NOTHING

    def running(self, *_: object) -> AbstractContextManager[NoteFailure]:
        return _NOTHING

    def asking(self, *_: object) -> AbstractContextManager[NoteResponse]:
        return _NOTHING

    def calling(self, *_: object) -> AbstractContextManager[NoteCall]:
        return _NOTHING


@dataclass(slots=True)
class Watching:
    """The watcher of one `Conversations`; it may be set after owners have begun."""

    watcher: Watcher = field(default_factory=NoWatcher)
    is_watched: bool = False
    """True once `begin` was called; until then nothing has to be gathered for `watcher`."""

    def begin(self, watcher: Watcher) -> None:
        """Report to this watcher from now on, and no longer to the one before it."""
        self.watcher = watcher
        self.is_watched = True
