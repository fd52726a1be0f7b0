"""Large parts of a payload, which are stored beside the log.

An image or a huge result is one long string in an event's JSON. `split` cuts such strings out byte
for byte, so that `join` returns exactly the same payload, whatever it holds. Equal parts are
stored once, also across conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

PART_BYTES_MIN = 32 << 10

_STRING = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)


def split(payload: bytes) -> tuple[bytes, str, Sequence[tuple[bytes, bytes]]]:
    """Return the rest of a payload, the places of its parts, and the parts with their digests."""
    kept: list[bytes] = []
    places: list[tuple[int, str]] = []
    parts: list[tuple[bytes, bytes]] = []
    at = length = 0
    for start, end in _long_strings(payload):
        kept.append(payload[at:start])
        length += start - at
        part = payload[start:end]
        digest = blake2b(part, digest_size=16).digest()
        places.append((length, digest.hex()))
        parts.append((digest, part))
        at = end
    kept.append(payload[at:])
    return b"".join(kept), json.dumps(places), parts


def _long_strings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the contents of long JSON strings; if it is not JSON, maybe none."""
    at = payload.find(b'"')
    # A string that never closes ends the search: it cannot be JSON, and each further try would
    # read to the end.
    while at >= 0 and (match := _STRING.match(payload, at)):
        start, end = match.span(1)
        if end - start >= PART_BYTES_MIN:
            yield start, end
        at = payload.find(b'"', match.end())


def join(kept: bytes, places: str, fetch: Callable[[bytes], bytes]) -> bytes:
    """Return the original payload. Raises `ValueError` or `TypeError` if `places` is malformed."""
    pieces: list[bytes] = []
    at = 0
    for place, digest in json.loads(places):
        pieces += (kept[at:place], fetch(bytes.fromhex(digest)))
        at = place
    pieces.append(kept[at:])
    return b"".join(pieces)
