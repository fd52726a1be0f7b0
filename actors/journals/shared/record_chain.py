"""Checksums of stored records, each chained to the one before.

Owns the only way to compute them. A record's mark covers the mark before it, so reading a log
detects a record that is damaged, missing, doubled or out of place. The marks are CRC-32: they
protect against damage, not against forgery.
"""

from __future__ import annotations

from hashlib import blake2b
from zlib import crc32

INCARNATIONS_LOOKED_FOR = 8
"""If a row is lost or hidden, the search for its name covers this many of its incarnations."""


def log_number(conversation_id: str, incarnation: int) -> int:
    """Return the key under which a store keeps a log: 63 bits of a hash of name and incarnation.

    It is a function of the name, so that a damaged index cannot make a conversation look new. A
    name that is used again after its conversation was deleted gets another log.
    """
    text = f"{incarnation}\0{conversation_id}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def logs_of(conversation_id: str) -> list[int]:
    """Return the keys of the logs that a conversation may have whose row is lost."""
    return [log_number(conversation_id, each) for each in range(INCARNATIONS_LOOKED_FOR)]


def first_mark(log: int) -> int:
    """Return the mark that precedes a log's first record."""
    return crc32(b"%d" % log)


def next_mark(  # noqa: PLR0917 - called once an event; keywords would cost as much as the sum
    mark: int,
    seq: int,
    epoch: int,
    event_id: str,
    kind: str,
    message_id: str | None,
    payload: bytes,
) -> int:
    """Return the mark of a record, given the mark of the record before it."""
    facts = f"{seq}\0{epoch}\0{event_id}\0{kind}\0{message_id!s}\0"
    return crc32(payload, crc32(facts.encode(), mark))


def seal(*facts: object, content: bytes = b"") -> int:
    """Return the checksum of a row stored beside the logs, over its fields in order."""
    return crc32(content, crc32(repr(facts).encode()))
