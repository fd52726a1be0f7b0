"""Checksums of stored records, each chained to the one before.

Owns the one way to compute them. A record's mark covers the mark before it, so a record that is
damaged, missing, doubled or out of place is found when its log is read. The marks are against
damage, not against forgery.
"""

from __future__ import annotations

from hashlib import blake2b

MARK_BYTES = 8


def conversation_number(conversation_id: str) -> int:
    """The key under which a store keeps a conversation: 63 bits of a hash of its id.

    A function of the id, so that a lost index entry cannot make a conversation look new.
    """
    return _hash63(f"conversation\0{conversation_id}")


def log_number(conversation_id: str, incarnation: int) -> int:
    """The key under which a store keeps a log; a name that is used again gets another log."""
    return _hash63(f"log\0{incarnation}\0{conversation_id}")


def first_mark(log: int) -> bytes:
    """What stands before a log's first record."""
    return blake2b(b"%d" % log, digest_size=MARK_BYTES).digest()


def next_mark(  # noqa: PLR0917 - called once an event; keywords would cost as much as the hash
    mark: bytes,
    seq: int,
    epoch: int,
    event_id: str,
    kind: str,
    message_id: str | None,
    payload: bytes,
) -> bytes:
    """The mark of a record, from the mark of the record before it."""
    facts = f"{seq}\0{epoch}\0{event_id}\0{kind}\0{message_id}\0"
    return blake2b(mark + facts.encode() + payload, digest_size=MARK_BYTES).digest()


def seal(*facts: object, content: bytes = b"") -> bytes:
    """The checksum of what is stored beside the logs, over its fields in order."""
    return blake2b(repr(facts).encode() + content, digest_size=MARK_BYTES).digest()


def _hash63(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
