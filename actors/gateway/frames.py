"""Server-sent events, encoded once for all streams that write the same event or piece.

Live readers of a conversation get each event and piece as the same object, at about the same time.
So the newest frames are kept, by the identity of the object that they encode. A frame depends on
nothing else: an event that names another conversation is encoded for each reader separately, with
the id that this reader may know.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from ..events import ForkedFromEvent, LoggedEvent, TextDelta
from .names import Cursor
from .wire import Rename, logged_json, piece_json, sse

__all__ = ["Frames"]

KEPT_MAX: Final = 256
KEPT_BYTES_MAX: Final = 1 << 20

T = TypeVar("T", LoggedEvent, TextDelta)


class Frames:
    """The newest frames. Used from one event loop only."""

    def __init__(self) -> None:
        # Each entry holds the object that it encodes, so that no other object gets its identity.
        self._kept: OrderedDict[int, tuple[LoggedEvent | TextDelta, bytes]] = OrderedDict()
        self._bytes = 0
        self.encoded = 0
        """How many frames were encoded, rather than found."""

    def of_event(self, logged: LoggedEvent, rename: Rename) -> bytes:
        """Return the frame of an event; the frame's id is the cursor after the event."""

        def encode(logged: LoggedEvent) -> bytes:
            return sse(logged_json(logged, rename), cursor=Cursor.of(logged))

        if isinstance(logged.event, ForkedFromEvent):
            return encode(logged)
        return self._find(logged, encode)

    def of_piece(self, piece: TextDelta) -> bytes:
        """Return the frame of a piece of an answer."""
        return self._find(piece, _encode_piece)

    def _find(self, item: T, encode: Callable[[T], bytes]) -> bytes:
        found = self._kept.get(id(item))
        if found is not None:
            return found[1]
        frame = encode(item)
        self.encoded += 1
        self._kept[id(item)] = item, frame
        self._bytes += len(frame)
        while len(self._kept) > KEPT_MAX or self._bytes > KEPT_BYTES_MAX:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._bytes -= len(oldest)
        return frame


def _encode_piece(piece: TextDelta) -> bytes:
    return sse(piece_json(piece), event="piece")
