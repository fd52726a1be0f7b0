"""The suite that every journal passes.

Authors of other journals inherit it:

    class TestMyJournal(JournalContract):
        def make_journal(self, place, *, takeover=False):
            return MyJournal(place / "chats", takeover=takeover)

Run it with pytest and anyio's plugin. The suite needs pytest, which this library does not install.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import anyio
import pytest

from turnkeeper.runtime import InvariantViolation, OwnershipLost, Refused

from ..errors import (
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    EventIdConflict,
    Fenced,
    InvalidConversationId,
    InvalidInput,
    MessageIdConflict,
    OwnedElsewhere,
    RecordNotFound,
    SearchIsOff,
)
from ..journal import (
    LISTED_KINDS,
    LISTING_AGE_MAX,
    READ_BYTES,
    Claim,
    FoundMessage,
    Journal,
    Listing,
    ListOrder,
    ListQuery,
    ListRow,
    Record,
    Rejection,
    SearchQuery,
    Snapshot,
    StoredRecord,
)
from ..values.words import SNIPPET_LENGTH_MAX
from .shared import limits, searching

__all__ = ["JournalContract", "make_record", "read_all"]


def make_record(event_id: str, payload: bytes = b"{}", *, message_id: str | None = None) -> Record:
    """Return a record that differs from others only in its id, unless a payload is given."""
    return Record(event_id, "note", payload, message_id)


async def read_all(journal: Journal, conversation_id: str, *, limit: int = 512) -> list[str]:
    """Return the event ids of a whole log, read page by page, and check that seqs have no gaps."""
    ids: list[str] = []
    while page := await journal.read(conversation_id, after=len(ids), limit=limit):
        assert len(page) <= limit
        for record in page:
            assert record.seq == len(ids) + 1
            ids.append(record.event_id)
    return ids


async def _read_pages(
    journal: Journal, name: str, after: int, limit: int, bytes_max: int = READ_BYTES
) -> list[Record]:
    """Return the rest of a log, read page by page, and check that each page ends where it must."""
    records: list[Record] = []
    while page := await journal.read(name, after=after, limit=limit, bytes_max=bytes_max):
        *before, _ = sizes = [len(record.payload) for record in page]
        assert len(page) <= limit
        assert not before[1:] or sum(before) < bytes_max  # no longer than it may be
        after += len(page)
        if not (len(page) == limit or (len(page) > 1 and sum(sizes) >= bytes_max)):
            assert not await journal.read(name, after=after, limit=limit)  # and no shorter
        records += [Record(*record[2:]) for record in page]
    return records


async def _append(
    journal: Journal, conversation_id: str, claim: Claim, ids: Sequence[str], *, at: int = 1
) -> Sequence[int]:
    return await journal.append(
        conversation_id,
        [make_record(event_id) for event_id in ids],
        epoch=claim.epoch,
        expected_seq=at,
        is_unfinished=False,
    )


async def _fork(journal: Journal, name: str, fork: str, at: int, *ids: str) -> Claim:
    records = [make_record(event_id) for event_id in ids]
    return await journal.fork(name, fork, at=at, records=records, is_unfinished=False)


def _ids(prefix: str, first: int, last: int) -> list[str]:
    return [f"{prefix}{seq}" for seq in range(first, last + 1)]


@pytest.mark.anyio
class JournalContract:
    """The suite: inherit it, and implement `make_journal`."""

    def make_journal(self, place: Path, *, takeover: bool = False) -> Journal:
        """Return a journal over the store at this place, which is an empty folder at first.

        A second one for the same place stands for a process that starts while the first one still
        runs, or after it. `takeover` allows it to take conversations from a live owner.
        """
        raise NotImplementedError

    def make_searching_journal(self, place: Path) -> Journal:
        """Return a journal over the store at this place that keeps an index of words."""
        raise NotImplementedError

    # --- what is written is what is read ----------------------------------------------------------

    async def test_appended_records_are_read_back_exactly_and_in_order(
        self, tmp_path: Path
    ) -> None:
        payloads = [b"{}", b"", '{"text": "Grüße 🐢 \\u0000"}'.encode(), b"x" * 1_000_000]
        image = b'{"url": "data:' + b"A" * 100_000 + b'", "text": "\\"' + b"y" * 50_000 + b'"}'
        payloads += [image, image]
        records = [make_record(f"e{n}", payload) for n, payload in enumerate(payloads)]
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")

            seqs = await journal.append(
                "c", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False
            )

            assert list(seqs) == list(range(1, len(records) + 1))
            assert list(await journal.read("c")) == [
                StoredRecord(seq, claim.epoch, record.event_id, record.kind, record.payload)
                for seq, record in enumerate(records, 1)
            ]

    async def test_reading_pages_gives_each_record_once(self, tmp_path: Path) -> None:
        ids = [f"e{n}" for n in range(10)]
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "c", await journal.claim("c"), ids)

            assert await read_all(journal, "c", limit=3) == ids
            assert [record.seq for record in await journal.read("c", after=7, limit=2)] == [8, 9]
            assert list(await journal.read("c", after=10)) == []
            assert list(await journal.read("c", after=99)) == []

    async def test_a_page_of_large_records_ends_at_a_number_of_bytes(self, tmp_path: Path) -> None:
        """A page is held in memory at once, so its limit in records does not bound it."""
        large = b'{"text": "' + b"x" * (READ_BYTES * 3 // 8) + b'"}'
        rows = b'["' + b'", "'.join([b"y" * 10_000] * (READ_BYTES // 25_000)) + b'"]'
        whole = b'{"text": "' + b"z" * READ_BYTES + b'"}'
        image = b'["' + b'", "'.join([b"i" * 9_000] * (READ_BYTES // 9_000 + 1)) + b'"]'
        small = b"{}"
        kinds = [small, large, large, large, rows, rows, rows, large, rows, small, small]
        kinds += [whole, small, image, image, small, small, whole]
        records = [make_record(f"e{n}", payload) for n, payload in enumerate(kinds)]
        async with self.make_journal(tmp_path) as journal:
            epoch = (await journal.claim("c")).epoch
            await journal.append("c", records, epoch=epoch, expected_seq=1, is_unfinished=False)
            await _fork(journal, "c", "f", len(records) - 1, "f")

            for limit in (512, 3):
                assert await _read_pages(journal, "c", 0, limit) == records
            for bytes_max in (READ_BYTES // 8, 1, 0):
                assert await _read_pages(journal, "c", 0, 512, bytes_max) == records
            for after in range(1, len(records)):
                page = await journal.read("c", after=after)
                assert [record.seq for record in page[:2]] == [after + 1, after + 2][: len(page)]
                assert len(page) > 1 or after == len(records) - 1
            forked = [*records[:-1], make_record("f")]
            assert await _read_pages(journal, "f", 0, 512) == forked
            assert await _read_pages(journal, "f", 0, 512, READ_BYTES // 8) == forked

    async def test_a_fork_with_large_records_can_be_sent_again(self, tmp_path: Path) -> None:
        large = b'{"text": "' + b"x" * READ_BYTES + b'"}'
        own = [make_record(f"f{n}", large) for n in range(3)]
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "c", await journal.claim("c"), ["e1"])
            claim = await journal.fork("c", "f", at=1, records=own, is_unfinished=False)

            again = await journal.fork("c", "f", at=1, records=own, is_unfinished=False)

            assert again == claim

    async def test_everything_is_there_after_reopening(self, tmp_path: Path) -> None:
        rejection = Rejection(4e9, "interleaved_message", "call 1 is open", b"{}")
        async with self.make_journal(tmp_path) as journal:
            first = await journal.claim("c")
            await journal.append(
                "c",
                [make_record("e1", message_id="m1")],
                epoch=first.epoch,
                expected_seq=1,
                is_unfinished=True,
            )
            await journal.reject("c", [rejection], epoch=first.epoch)
            await journal.write_snapshot("c", Snapshot(1, "v1", b"folds"), epoch=first.epoch)

        async with self.make_journal(tmp_path) as journal:
            assert await read_all(journal, "c") == ["e1"]
            assert (await journal.info("c")).is_unfinished
            assert dict(await journal.find_messages("c", ["m1"])) == {"m1": 1}
            assert dict(await journal.find_events("c", ["e1", "e2"])) == {"e1": 1}
            assert list(await journal.rejections("c")) == [rejection]
            assert await journal.read_snapshot("c") == Snapshot(1, "v1", b"folds")
            second = await journal.claim("c")
            assert second.epoch > first.epoch
            assert second.head == 1

    async def test_conversations_do_not_share_ids_or_seqs(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            names = ["a", "A", "a ", "a:b", "…" * 200]
            for conversation_id in names:
                claim = await journal.claim(conversation_id)
                await journal.append(
                    conversation_id,
                    [make_record("e1", message_id="m1")],
                    epoch=claim.epoch,
                    expected_seq=1,
                    is_unfinished=False,
                )

            for info in await journal.list():
                assert await read_all(journal, info.conversation_id) == ["e1"]
            assert [info.conversation_id for info in await journal.list()] == sorted(names)

    @pytest.mark.parametrize("odd", ["", "a\0b", "a\tb", "a\x9fb", "\ud800", "i" * 257])
    async def test_an_id_that_cannot_be_kept_or_seen_is_refused_alone(
        self, tmp_path: Path, odd: str
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append(journal, "c", claim, ["e1"])
            with pytest.raises(InvalidInput):
                await journal.claim(odd)
            with pytest.raises(InvalidInput):
                await _fork(journal, "c", odd, 1, "f2")
            with pytest.raises(InvalidInput):
                await _fork(journal, "c", "f", 1, odd)
            for record in (make_record(odd), make_record("e2", message_id=odd)):
                with pytest.raises(InvalidInput):
                    await journal.append(
                        "c", [record], epoch=claim.epoch, expected_seq=2, is_unfinished=False
                    )

            assert [info.conversation_id for info in await journal.list()] == ["c"]
            assert list(await _append(journal, "c", claim, ["e2"], at=2)) == [2]

    @pytest.mark.parametrize("odd", ["a/b", "/", ".", "..", "a\tb", "\x9f", "", "a\0b", "i" * 257])
    async def test_a_conversation_begins_under_no_odd_name_and_goes_on_under_one(
        self, tmp_path: Path, odd: str
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "c", await journal.claim("c"), ["e1"])
            with pytest.raises(InvalidConversationId) as refused:
                await journal.claim(odd)
            assert refused.value.conversation_id == odd
            with pytest.raises(InvalidConversationId):
                await _fork(journal, "c", odd, 1, "f2")
            if odd in {"", "a\0b", "i" * 257}:
                with pytest.raises(InvalidConversationId):
                    await journal.claim(odd, any_name=True)
                return

            imported = await journal.claim(odd, any_name=True)
            with pytest.raises(InvalidConversationId):
                await journal.claim(odd)  # nothing was written under it
            await _append(journal, odd, imported, ["e1"])
            claim = await journal.claim(odd)
            await _append(journal, odd, claim, ["e2"], at=2)
            await _fork(journal, odd, "f", 2, "f3")
            assert await read_all(journal, odd) == ["e1", "e2"]
            await journal.delete(odd, epoch=claim.epoch)
            with pytest.raises(InvalidConversationId):
                await journal.claim(odd)

    async def test_an_event_beyond_the_limit_is_refused_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "PAYLOAD_BYTES_MAX", 10)
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")

            async def send(size: int) -> Sequence[int]:
                return await journal.append(
                    "c",
                    [make_record("e1", b"x" * size)],
                    epoch=claim.epoch,
                    expected_seq=1,
                    is_unfinished=False,
                )

            with pytest.raises(InvalidInput, match="11 bytes"):
                await send(11)
            assert list(await send(10)) == [1]

    # --- epochs and seqs --------------------------------------------------------------------------

    async def test_each_claim_gives_a_higher_epoch_and_the_head(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            first = await journal.claim("c")
            await _append(journal, "c", first, ["e1", "e2"])

            second = await journal.claim("c")

            assert (first.head, second.head) == (0, 2)
            assert second.epoch > first.epoch >= 1

    async def test_an_older_epoch_is_fenced_and_writes_nothing(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            old = await journal.claim("c")
            new = await journal.claim("c")

            with pytest.raises(Fenced) as caught:
                await _append(journal, "c", old, ["e1"])

            assert (caught.value.epoch, caught.value.found_epoch) == (old.epoch, new.epoch)
            assert list(await _append(journal, "c", new, ["e2"])) == [1]
            assert await read_all(journal, "c") == ["e2"]

    @pytest.mark.parametrize("at", [0, 1, 2, 4, 100])
    async def test_an_append_at_another_seq_is_fenced_and_writes_nothing(
        self, tmp_path: Path, at: int
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append(journal, "c", claim, ["e1", "e2"])

            with pytest.raises(Fenced) as caught:
                await _append(journal, "c", claim, ["e3"], at=at)

            assert caught.value.head == claim.head + len(["e1", "e2"])
            assert await read_all(journal, "c") == ["e1", "e2"]

    async def test_an_append_without_a_claim_is_fenced_and_creates_nothing(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            for epoch in (0, 1):
                with pytest.raises(Fenced):
                    await _append(journal, "c", Claim(epoch, head=0), ["e1"])

            assert list(await journal.list()) == []

    async def test_an_append_of_nothing_is_an_error_and_moves_nothing(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            with pytest.raises(ValueError, match="zero records"):
                await _append(journal, "c", claim, [])

            assert list(await _append(journal, "c", claim, ["e1"])) == [1]

    # --- ids --------------------------------------------------------------------------------------

    async def test_known_ids_are_answered_with_their_seqs_whatever_the_epoch(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            old = await journal.claim("c")
            await _append(journal, "c", old, ["e1", "e2", "e3"])
            new = await journal.claim("c")

            assert list(await _append(journal, "c", old, ["e2", "e3"], at=2)) == [2, 3]
            assert list(await _append(journal, "c", new, ["e1"], at=1)) == [1]
            assert list(await _append(journal, "c", new, ["e3", "e1"], at=4)) == [3, 1]
            assert await read_all(journal, "c") == ["e1", "e2", "e3"]
            assert list(await _append(journal, "c", new, ["e4"], at=4)) == [4]

    async def test_known_ids_of_other_records_are_refused_and_fenced_under_an_older_epoch(
        self, tmp_path: Path
    ) -> None:
        """Their caller would be told of records that the log does not have."""
        async with self.make_journal(tmp_path) as journal:
            old = await journal.claim("c")
            await _append(journal, "c", old, ["e1"])
            new = await journal.claim("c")
            await _append(journal, "c", new, ["e2", "e3"], at=2)

            async def append_others(claim: Claim, records: Sequence[Record]) -> None:
                await journal.append(
                    "c", records, epoch=claim.epoch, expected_seq=2, is_unfinished=False
                )

            for other in (
                make_record("e3", b'"another"'),
                make_record("e3", message_id="m"),
                make_record("e3")._replace(kind="another"),
            ):
                records = [make_record("e2"), other]
                with pytest.raises(Fenced):
                    await append_others(old, records)
                with pytest.raises(EventIdConflict) as caught:
                    await append_others(new, records)
                assert caught.value.seqs == {"e2": 2, "e3": 3}
            assert await read_all(journal, "c") == ["e1", "e2", "e3"]

    async def test_an_append_with_some_known_ids_is_refused_with_their_seqs(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append(journal, "c", claim, ["e1", "e2"])

            with pytest.raises(EventIdConflict) as caught:
                await _append(journal, "c", claim, ["e3", "e2"], at=3)

            assert caught.value.seqs == {"e2": 2}
            assert await read_all(journal, "c") == ["e1", "e2"]

    async def test_an_id_twice_in_one_append_is_refused(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            with pytest.raises(EventIdConflict):
                await _append(journal, "c", claim, ["e1", "e1"])
            with pytest.raises(MessageIdConflict):
                await journal.append(
                    "c",
                    [make_record("e1", message_id="m"), make_record("e2", message_id="m")],
                    epoch=claim.epoch,
                    expected_seq=1,
                    is_unfinished=False,
                )

            assert list(await _append(journal, "c", claim, ["e1"])) == [1]

    async def test_a_known_message_id_is_refused_with_its_seq(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await journal.append(
                "c",
                [make_record("e1"), make_record("e2", message_id="m1")],
                epoch=claim.epoch,
                expected_seq=1,
                is_unfinished=False,
            )

            with pytest.raises(MessageIdConflict) as caught:
                await journal.append(
                    "c",
                    [make_record("e3", message_id="m1")],
                    epoch=claim.epoch,
                    expected_seq=3,
                    is_unfinished=False,
                )

            assert (caught.value.message_id, caught.value.seq) == ("m1", 2)
            assert dict(await journal.find_messages("c", ["m0", "m1"])) == {"m1": 2}
            assert await read_all(journal, "c") == ["e1", "e2"]

    # --- many at once -----------------------------------------------------------------------------

    async def test_many_tasks_append_to_many_conversations_at_once(self, tmp_path: Path) -> None:
        names = [f"c{n}" for n in range(40)]
        async with self.make_journal(tmp_path) as journal:

            async def converse(name: str) -> None:
                claim = await journal.claim(name)
                for seq in range(1, 9):
                    await _append(journal, name, claim, [f"{name}-{seq}"], at=seq)

            async with anyio.create_task_group() as group:
                for name in names:
                    group.start_soon(converse, name)

            for name in names:
                assert await read_all(journal, name) == [f"{name}-{seq}" for seq in range(1, 9)]

    async def test_appends_sent_ahead_keep_their_order(self, tmp_path: Path) -> None:
        landed: list[int] = []
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")

            async def send(seq: int, sending: anyio.Event) -> None:
                sending.set()
                landed.extend(await _append(journal, "c", claim, [f"e{seq}"], at=seq))

            async with anyio.create_task_group() as group:
                for seq in range(1, 31):
                    sending = anyio.Event()
                    group.start_soon(send, seq, sending)
                    await sending.wait()  # a backend starts tasks in any order

            assert sorted(landed) == list(range(1, 31))
            assert await read_all(journal, "c") == [f"e{seq}" for seq in range(1, 31)]

    async def test_a_bad_append_does_not_touch_its_neighbours(self, tmp_path: Path) -> None:
        """In one group: a fenced one, one with a known id, one that cannot be encoded."""
        refusals: list[type[Exception]] = []
        async with self.make_journal(tmp_path) as journal:
            claims = {name: await journal.claim(name) for name in ("a", "b", "c", "d", "e")}
            await _append(journal, "c", claims["c"], ["e1"])
            stale = claims["b"]
            claims["b"] = await journal.claim("b")

            async def append(name: str, claim: Claim, ids: Sequence[str], at: int) -> None:
                try:
                    await _append(journal, name, claim, ids, at=at)
                except (OwnershipLost, Refused) as error:
                    refusals.append(type(error))

            async with anyio.create_task_group() as group:
                group.start_soon(append, "a", claims["a"], ["e1", "e2"], 1)
                group.start_soon(append, "b", stale, ["e1"], 1)
                group.start_soon(append, "c", claims["c"], ["e2", "e1"], 2)
                group.start_soon(append, "d", claims["d"], ["e1"], 1)
                group.start_soon(append, "e", claims["e"], ["e1"], 7)

            assert sorted(refusals, key=str) == [EventIdConflict, Fenced, Fenced]
            assert await read_all(journal, "a") == ["e1", "e2"]
            assert await read_all(journal, "d") == ["e1"]
            assert await read_all(journal, "c") == ["e1"]
            for name in ("b", "e"):
                with pytest.raises(ConversationNotFound):
                    await journal.info(name)
            for name, at in (("a", 3), ("b", 1), ("c", 2), ("d", 2), ("e", 1)):
                assert list(await _append(journal, name, claims[name], ["last"], at=at)) == [at]

    async def test_cancelling_the_caller_leaves_the_append_to_finish(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            sending = anyio.Event()

            async def send() -> None:
                sending.set()
                await _append(journal, "c", claim, ["e1"])

            async with anyio.create_task_group() as group:
                group.start_soon(send)
                await sending.wait()
                group.cancel_scope.cancel()

            # The next call comes after it.
            assert (await journal.claim("c")).head == 1
            assert await read_all(journal, "c") == ["e1"]

    async def test_a_claim_lands_or_shuts_out_what_was_in_flight(self, tmp_path: Path) -> None:
        """After the claim has returned, the log does not change any more by the old epoch."""
        outcomes: list[object] = []
        claims: list[Claim] = []
        async with self.make_journal(tmp_path) as journal:
            old = await journal.claim("c")

            async def send(seq: int) -> None:
                try:
                    outcomes.append(list(await _append(journal, "c", old, [f"e{seq}"], at=seq)))
                except Fenced:
                    outcomes.append("fenced")

            async def claim() -> None:
                claims.append(await journal.claim("c"))

            async with anyio.create_task_group() as group:
                for seq in range(1, 4):
                    group.start_soon(send, seq)
                    await anyio.lowlevel.checkpoint()
                group.start_soon(claim)
                await anyio.lowlevel.checkpoint()
                for seq in range(4, 7):
                    group.start_soon(send, seq)

            landed = [outcome for outcome in outcomes if outcome != "fenced"]
            assert len(landed) == claims[0].head
            new = [f"n{seq}" for seq in range(claims[0].head + 1, 9)]
            await _append(journal, "c", claims[0], new, at=claims[0].head + 1)
            assert (await read_all(journal, "c"))[claims[0].head :] == new

    # --- looking ----------------------------------------------------------------------------------

    async def test_what_is_not_there_is_said_and_not_created(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            await journal.claim("claimed, never written")
            for name in ("never seen", "claimed, never written"):
                with pytest.raises(ConversationNotFound):
                    await journal.read(name)
                with pytest.raises(ConversationNotFound):
                    await journal.info(name)
                with pytest.raises(ConversationNotFound):
                    await journal.find_messages(name, ["m"])
                with pytest.raises(ConversationNotFound):
                    await journal.read_snapshot(name)
                assert list(await journal.rejections(name)) == []

            assert list(await journal.list()) == []

    async def test_list_gives_all_conversations_and_find_abandoned_the_unfinished_ones(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            for name, is_unfinished in (("b", True), ("a", False), ("c", False)):
                claim = await journal.claim(name)
                for seq, flag in ((1, not is_unfinished), (2, is_unfinished)):
                    await journal.append(
                        name,
                        [make_record(f"e{seq}")],
                        epoch=claim.epoch,
                        expected_seq=seq,
                        is_unfinished=flag,
                    )

            infos = await journal.list()
            assert [info.conversation_id for info in infos] == ["a", "b", "c"]
            assert [info.head for info in infos] == [2, 2, 2]
            unfinished = await journal.find_abandoned()
            assert [info.conversation_id for info in unfinished] == ["b"]
            assert await journal.info("b") == unfinished[0]

    async def test_rejections_are_kept_oldest_first(self, tmp_path: Path) -> None:
        kept = [
            Rejection(4e9 + number, "unmatched_tool_result", f"reason {number}", b"{}")
            for number in (1, 2, 3)
        ]
        async with self.make_journal(tmp_path) as journal:
            epoch = (await journal.claim("c")).epoch
            old = [Rejection(1.0, "v", "longer ago than any is kept", b"{}")]
            for some in (old, kept[:1], kept[1:]):
                await journal.reject("c", some, epoch=epoch)

            assert list(await journal.rejections("c")) == kept
            assert list(await journal.rejections("d")) == []

    async def test_a_rejection_of_an_owner_that_was_replaced_is_fenced(
        self, tmp_path: Path
    ) -> None:
        """It would stand beside the log of another owner, or of another conversation."""
        kept, late = (Rejection(4e9, "v", reason, b"{}") for reason in ("kept", "late"))
        async with self.make_journal(tmp_path) as journal:
            with pytest.raises(Fenced):
                await journal.reject("c", [late], epoch=1)  # never claimed
            old = await journal.claim("c")
            await journal.reject("c", [kept], epoch=old.epoch)
            new = await journal.claim("c")
            for epoch in (old.epoch, new.epoch + 1):
                with pytest.raises(Fenced):
                    await journal.reject("c", [late], epoch=epoch)

            assert list(await journal.rejections("c")) == [kept]

            await _append(journal, "c", new, ["e1"])
            await journal.delete("c", epoch=new.epoch)
            with pytest.raises(Fenced):
                await journal.reject("c", [late], epoch=new.epoch)
            assert list(await journal.rejections("c")) == []

    async def test_the_newest_snapshot_is_the_one_that_is_read(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append(journal, "c", claim, ["e1", "e2"])
            assert await journal.read_snapshot("c") is None

            for snapshot in (Snapshot(1, "v1", b"first"), Snapshot(2, "v2", b"second")):
                await journal.write_snapshot("c", snapshot, epoch=claim.epoch)

            assert await journal.read_snapshot("c") == Snapshot(2, "v2", b"second")

    # --- forks and deletion -----------------------------------------------------------------------

    async def test_a_fork_has_its_parents_records_and_goes_its_own_way(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            parent = await journal.claim("p")
            await _append(journal, "p", parent, [f"p{seq}" for seq in range(1, 201)])

            claim = await _fork(journal, "p", "f", 130, "f131", "f132")
            await _append(journal, "f", claim, ["f133"], at=133)
            await _append(journal, "p", parent, ["p201"], at=201)

            assert claim == Claim(claim.epoch, 132)
            assert claim.epoch > parent.epoch
            prefix = [f"p{seq}" for seq in range(1, 131)]
            assert await read_all(journal, "f", limit=50) == [*prefix, "f131", "f132", "f133"]
            assert (await read_all(journal, "p"))[130:] == [f"p{n}" for n in range(131, 202)]
            assert [info.head for info in await journal.list()] == [133, 201]

        async with self.make_journal(tmp_path) as journal:
            expected = [*prefix, "f131", "f132", "f133"]
            assert (await journal.claim("f")).head == len(expected)
            assert await read_all(journal, "f", limit=7) == expected

    async def test_ids_are_unique_in_a_fork_with_its_prefix(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            parent = await journal.claim("p")
            for seq in (1, 2, 3):
                await journal.append(
                    "p",
                    [make_record(f"e{seq}", message_id=f"m{seq}")],
                    epoch=parent.epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                )
            with pytest.raises(EventIdConflict):
                await _fork(journal, "p", "f", 2, "e1")
            fork = await _fork(journal, "p", "f", 2, "f3")

            with pytest.raises(EventIdConflict) as caught:
                await _append(journal, "f", fork, ["f4", "e2"], at=4)
            assert caught.value.seqs == {"e2": 2}
            with pytest.raises(MessageIdConflict):
                await journal.append(
                    "f",
                    [make_record("f4", message_id="m1")],
                    epoch=fork.epoch,
                    expected_seq=4,
                    is_unfinished=False,
                )
            # The fork may use ids that its parent used only after the fork.
            await journal.append(
                "f",
                [make_record("e3", message_id="m3")],
                epoch=fork.epoch,
                expected_seq=4,
                is_unfinished=False,
            )
            again = await journal.append(
                "f",
                [make_record("e1", message_id="m1"), make_record("f3")],
                epoch=fork.epoch,
                expected_seq=1,
                is_unfinished=False,
            )
            assert list(again) == [1, 3]
            assert dict(await journal.find_messages("f", ["m1", "m2", "m3"])) == {
                "m1": 1,
                "m2": 2,
                "m3": 4,
            }
            assert dict(await journal.find_events("f", ["e1", "e3", "f3"])) == {
                "e1": 1,
                "e3": 4,
                "f3": 3,
            }

    async def test_forking_again_under_the_same_ids_gives_the_same_fork(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "p", await journal.claim("p"), ["e1", "e2"])
            first = await _fork(journal, "p", "f", 1, "f2")

            assert await _fork(journal, "p", "f", 1, "f2") == first
            with pytest.raises(ConversationExists):
                await _fork(journal, "p", "f", 1, "other")
            with pytest.raises(ConversationExists):
                await _fork(journal, "p", "f", 2, "f2")
            assert await read_all(journal, "f") == ["e1", "f2"]

    async def test_a_fork_that_differs_in_more_than_its_ids_is_another_fork(
        self, tmp_path: Path
    ) -> None:
        """In contents, in order, in the log it is of, or with its records further behind."""
        async with self.make_journal(tmp_path) as journal:
            for name in "pq":
                await _append(journal, name, await journal.claim(name), ["e1", "e2"])
            first = await _fork(journal, "p", "f", 2, "f3", "f4")
            await _append(journal, "f", first, ["f5"], at=5)
            f3, f4 = make_record("f3"), make_record("f4")
            for source, records in (
                ("p", [f3, make_record("f4", b'{"other":1}')]),
                ("p", [make_record("f3", message_id="m"), f4]),
                ("p", [f4, f3]),
                ("p", [f4]),
                ("p", [f3, f4, make_record("f5"), make_record("f6")]),
                ("q", [f3, f4]),
            ):
                with pytest.raises(ConversationExists):
                    await journal.fork(source, "f", at=2, records=records, is_unfinished=False)
            again = await _fork(journal, "p", "f", 2, "f3", "f4")

            assert again == (first.epoch, 5)
            assert await read_all(journal, "f") == ["e1", "e2", "f3", "f4", "f5"]
            # Of a fork too, in the part that it shares.
            for at in (1, 3):
                claim = await _fork(journal, "f", f"g{at}", at, "g")
                assert await _fork(journal, "f", f"g{at}", at, "g") == claim

    async def test_a_fork_made_again_writes_nothing_under_the_epoch_of_a_rival(
        self, tmp_path: Path
    ) -> None:
        """After an unknown outcome it is made again, and its epoch is the rival's by then."""
        async with self.make_journal(tmp_path) as first:
            await _append(first, "p", await first.claim("p"), ["e1"])
            await _fork(first, "p", "f", 1, "f2")
            async with self.make_journal(tmp_path, takeover=True) as second:
                rival = await second.claim("f", takeover=True)
                with suppress(OwnershipLost):  # the rival may have taken more than the fork
                    again = await _fork(first, "p", "f", 1, "f2")
                    snapshot = Snapshot(2, "v", b"of the first")
                    kept = [Rejection(4e9, "v", "r", b"{}")]
                    for refused in (
                        _append(first, "f", again, ["of the first"], at=3),
                        first.reject("f", kept, epoch=again.epoch),
                        first.write_snapshot("f", snapshot, epoch=again.epoch),
                        first.delete("f", epoch=again.epoch),
                    ):
                        with pytest.raises(Fenced) as caught:
                            await refused
                        assert caught.value.holder
                        assert caught.value.holder in str(caught.value)

                assert list(await _append(second, "f", rival, ["f3"], at=3)) == [3]
                assert await read_all(second, "f") == ["e1", "f2", "f3"]
                assert await second.read_snapshot("f") is None
                assert list(await second.rejections("f")) == []

    async def test_a_fork_of_what_is_not_there_is_refused(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            with pytest.raises(ConversationNotFound):
                await _fork(journal, "p", "f", 1, "f2")
            await _append(journal, "p", await journal.claim("p"), ["e1"])
            for at in (-1, 0, 2):
                with pytest.raises(RecordNotFound):
                    await _fork(journal, "p", "f", at, "f2")

            with pytest.raises(ConversationNotFound):
                await journal.read("f")

    async def test_a_fork_of_a_log_that_was_deleted_and_begun_anew_is_refused(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("p")
            await _append(journal, "p", claim, ["e1", "e2"])

            async def fork(fork_id: str, at: int, at_event_id: str) -> None:
                await journal.fork(
                    "p",
                    fork_id,
                    at=at,
                    records=[make_record("f")],
                    is_unfinished=False,
                    at_event_id=at_event_id,
                )

            await fork("f", 2, "e2")
            await journal.delete("p", epoch=claim.epoch)
            await _append(journal, "p", await journal.claim("p"), ["n1", "e2", "n3"])
            for at_event_id, at in (("e1", 1), ("e2", 3), ("e2", 1)):
                with pytest.raises(ConversationDeleted):
                    await fork("g", at, at_event_id)

            assert [r.event_id for r in await journal.read("f")] == ["e1", "e2", "f"]
            with pytest.raises(ConversationNotFound):
                await journal.read("g")

    async def test_a_deleted_conversation_is_gone_and_its_name_begins_above_its_epoch(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            old = await journal.claim("c")
            await _append(journal, "c", old, ["e1", "e2"])
            await journal.reject("c", [Rejection(4e9, "v", "r", b"{}")], epoch=old.epoch)
            await journal.write_snapshot("c", Snapshot(2, "v", b"folds"), epoch=old.epoch)

            with pytest.raises(Fenced):
                await journal.delete("c", epoch=old.epoch + 1)
            deletion = await journal.delete("c", epoch=old.epoch)

            assert (deletion.kept, list(deletion.forks)) == (0, [])
            with pytest.raises(ConversationNotFound):
                await journal.read("c")
            with pytest.raises(ConversationNotFound):
                await journal.delete("c", epoch=old.epoch)
            assert list(await journal.list()) == []
            assert list(await journal.rejections("c")) == []
            with pytest.raises(Fenced):
                await _append(journal, "c", old, ["e3"], at=1)

        async with self.make_journal(tmp_path) as journal:
            new = await journal.claim("c")
            assert new.epoch > old.epoch
            assert new.head == 0
            await _append(journal, "c", new, ["e1"])
            # A late write of the previous owner belongs to the log that is gone.
            for seq in (1, 2):
                with pytest.raises(Fenced):
                    await journal.write_snapshot("c", Snapshot(seq, "v", b""), epoch=old.epoch)
            with pytest.raises(InvariantViolation):
                await journal.write_snapshot("c", Snapshot(2, "v", b""), epoch=new.epoch)
            assert await journal.read_snapshot("c") is None
            assert await read_all(journal, "c") == ["e1"]

    async def test_what_was_folded_from_a_deleted_log_does_not_fit_a_fork_of_its_name(
        self, tmp_path: Path
    ) -> None:
        """The records of the fork's prefix have epochs as low as those of the deleted log."""
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "p", await journal.claim("p"), ["p1", "p2"])
            old = await journal.claim("c")
            await _append(journal, "c", old, ["c1", "c2"])
            await journal.delete("c", epoch=old.epoch)
            new = await _fork(journal, "p", "c", 2, "c3")

            for seq in (1, 2, 3):
                with pytest.raises(Fenced):
                    await journal.write_snapshot("c", Snapshot(seq, "v", b""), epoch=old.epoch)
                with pytest.raises(Fenced):
                    await journal.write_listing("c", Listing(seq, "bob"), epoch=old.epoch)
            assert await journal.read_snapshot("c") is None
            assert (await _listing(journal, "c")).owner == ""

            await journal.write_snapshot("c", Snapshot(1, "v", b"folds"), epoch=new.epoch)
            assert await journal.read_snapshot("c") == Snapshot(1, "v", b"folds")

    async def test_deleting_keeps_what_forks_need_and_says_so(self, tmp_path: Path) -> None:
        """The forks: f of p at 100, g of p at 50, h of f at 120, i of f at 70."""
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "p", await journal.claim("p"), _ids("p", 1, 150))
            await _fork(journal, "p", "f", 100, *_ids("f", 101, 140))
            await _fork(journal, "p", "g", 50, *_ids("g", 51, 60))
            await _fork(journal, "f", "h", 120, *_ids("h", 121, 130))
            await _fork(journal, "f", "i", 70, *_ids("i", 71, 75))
            logs = {name: await read_all(journal, name) for name in "fghip"}

            async def delete(name: str) -> tuple[int, list[str]]:
                claim = await journal.claim(name)
                deletion = await journal.delete(name, epoch=claim.epoch)
                del logs[name]
                for left, ids in logs.items():
                    assert await read_all(journal, left) == ids
                return deletion.kept, list(deletion.forks)

            assert await delete("p") == (100, ["f", "g", "h", "i"])
            assert await delete("f") == (120, ["h"])
            assert await delete("i") == (0, [])
            # A name may be used again beside the records that are kept of its first log.
            await _append(journal, "p", await journal.claim("p"), _ids("p", 1, 10))
            logs["p"] = _ids("p", 1, 10)
            assert await delete("h") == (0, [])
            assert await delete("g") == (0, [])
            assert await delete("p") == (0, [])

    async def test_deleting_a_fork_leaves_the_conversation_that_it_was_forked_from(
        self, tmp_path: Path
    ) -> None:
        """Also the last fork, and one of a fork: what it shared is its parent's as before."""
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("p")
            await _append(journal, "p", claim, _ids("p", 1, 10))
            await _fork(journal, "p", "f", 6, "f7")
            await _fork(journal, "p", "g", 10, "g11")
            await _fork(journal, "f", "h", 7, "h8")
            for name, kept in (("h", ("f", "g")), ("f", ("g",)), ("g", ())):
                logs = {left: await read_all(journal, left) for left in ("p", *kept)}
                epoch = (await journal.claim(name)).epoch
                deletion = await journal.delete(name, epoch=epoch)
                assert (deletion.kept, list(deletion.forks)) == (0, [])
                for left, ids in logs.items():
                    assert await read_all(journal, left) == ids, name
            await _append(journal, "p", claim, _ids("p", 11, 12), at=11)
            assert await read_all(journal, "p") == _ids("p", 1, 12)

    async def test_waiting_for_more_ends_when_there_is_more(self, tmp_path: Path) -> None:
        ended: list[int] = []
        has_ended = [anyio.Event() for _ in range(3)]
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")

            async def follow(after: int) -> None:
                await journal.wait_for_more("c", after=after)
                ended.append(after)
                has_ended[after].set()

            async with anyio.create_task_group() as group:
                group.start_soon(follow, 0)
                await _append(journal, "c", claim, ["e1"])
                await has_ended[0].wait()
                group.start_soon(follow, 1)
                await _append(journal, "other", await journal.claim("other"), ["e1", "e2"])
                assert ended == [0]
                await _append(journal, "c", claim, ["e2"], at=2)
                await has_ended[1].wait()
                group.start_soon(follow, 2)
                await journal.delete("c", epoch=claim.epoch)

            assert ended == [0, 1, 2]

    # --- owners -----------------------------------------------------------------------------------

    async def test_the_lease_holds_from_entering_to_leaving(self, tmp_path: Path) -> None:
        journal = self.make_journal(tmp_path)
        assert not journal.is_lease_valid()
        async with journal:
            assert journal.is_lease_valid()
        assert not journal.is_lease_valid()

    async def test_a_second_owner_is_refused_while_the_first_one_lives(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as first:
            claim = await first.claim("c")

            with pytest.raises(OwnedElsewhere):
                async with self.make_journal(tmp_path) as second:
                    await second.claim("c")

            assert list(await _append(first, "c", claim, ["e1"])) == [1]

        async with self.make_journal(tmp_path) as second:
            assert (await second.claim("c")).head == 1

    async def test_what_another_process_works_on_is_not_abandoned_until_it_has_left(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as first:
            claim = await first.claim("c")
            await first.append(
                "c", [make_record("e1")], epoch=claim.epoch, expected_seq=1, is_unfinished=True
            )
            assert [info.conversation_id for info in await first.find_abandoned()] == ["c"]
            with suppress(OwnedElsewhere):  # not all journals can be entered twice
                async with self.make_journal(tmp_path) as second:
                    assert list(await second.find_abandoned()) == []

        async with self.make_journal(tmp_path) as second:
            assert [info.conversation_id for info in await second.find_abandoned()] == ["c"]

    async def test_a_released_conversation_can_be_claimed_at_once(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as first:
            old = await first.claim("c")
            await _append(first, "c", old, ["e1"])
            await first.claim("other")
            await first.release("c", epoch=old.epoch + 1)
            with suppress(OwnedElsewhere):  # not all journals can be entered twice
                async with self.make_journal(tmp_path) as second:
                    with pytest.raises(OwnedElsewhere):
                        await second.claim("c")
                    await first.release("c", epoch=old.epoch)
                    new = await second.claim("c")
                    assert new.epoch > old.epoch
                    with pytest.raises(OwnershipLost):
                        await _append(first, "c", old, ["e2"], at=2)
                    with pytest.raises(OwnedElsewhere):
                        await second.claim("other")

    async def test_a_takeover_shuts_the_first_owner_out(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as first:
            old = await first.claim("c")
            await _append(first, "c", old, ["e1"])

            async with self.make_journal(tmp_path, takeover=True) as second:
                new = await second.claim("c", takeover=True)
                assert new.epoch > old.epoch
                with pytest.raises(OwnershipLost):
                    await _append(first, "c", old, ["zombie"], at=2)
                assert list(await _append(second, "c", new, ["e2"], at=2)) == [2]

                # Records that are in the log by now are still answered with their seqs.
                assert list(await _append(first, "c", old, ["e1"], at=1)) == [1]
                assert list(await _append(first, "c", old, ["e2"], at=2)) == [2]
                assert await read_all(second, "c") == ["e1", "e2"]

    # --- listings ---------------------------------------------------------------------------------

    async def test_pages_that_follow_each_other_have_each_conversation_once(
        self, tmp_path: Path
    ) -> None:
        """In each order, with each filter alone and with several, and with pages of any length."""
        async with self.make_journal(tmp_path) as journal:
            listed = await _fill_lists(journal)
            for order in get_args(ListOrder):
                for filters in _FILTERS:
                    query = ListQuery(1_000, order=order, **filters)
                    wanted = _wanted(listed, query)
                    # Where no index has these rows, a page may end early, and the walk goes on.
                    short = query._replace(limit=2, scan_max=3)
                    for one in (*(query._replace(limit=limit) for limit in (1, 3, 1_000)), short):
                        found = await _walk(journal, one)
                        assert sorted(found) == sorted(wanted), one
                        places = [_place(name, listed[name], one) for name in found]
                        assert places == sorted(places), one

    async def test_conversations_that_are_used_during_a_walk_put_no_other_on_it_twice(
        self, tmp_path: Path
    ) -> None:
        """By id and by creation, all that exist throughout are on it once, whatever is used."""
        async with self.make_journal(tmp_path) as journal:
            listed = await _fill_lists(journal)
            names = sorted(listed)
            is_used = {name: at % 3 == 0 for at, name in enumerate(names)}
            for order in get_args(ListOrder):
                query = ListQuery(2, order=order)
                found: list[str] = []
                using = iter([name for name in names if is_used[name]])
                while True:
                    page = await journal.page(query)
                    found += [row.conversation_id for row in page.rows]
                    if page.next is None:
                        break
                    query = query._replace(after=page.next)
                    if (name := next(using, None)) is not None:
                        claim = await journal.claim(name)
                        seq = claim.head + 1
                        active_us = max(one.active_us for one in listed.values()) + 1
                        listed[name] = listed[name]._replace(seq=seq, active_us=active_us)
                        await _append_listed(journal, name, claim, seq, listed[name])
                stayed = [name for name in found if not is_used[name]]
                assert sorted(stayed) == [name for name in names if not is_used[name]], order
                if order != "activity":
                    assert sorted(found) == names, order

    async def test_a_last_page_that_is_full_says_that_it_is_the_last(self, tmp_path: Path) -> None:
        """Its cursor is None, so no reader asks for an empty page."""
        async with self.make_journal(tmp_path) as journal:
            listed = await _fill_lists(journal)
            for order in get_args(ListOrder):
                for filters in _FILTERS:
                    count = len(_wanted(listed, ListQuery(1, **filters)))
                    for limit in (one for one in range(1, count + 1) if count % one == 0):
                        query = ListQuery(limit, order=order, **filters)
                        pages = []
                        for _ in range(count // limit):
                            page = await journal.page(query)
                            pages.append((len(page.rows), page.next is None, page.is_complete))
                            query = query._replace(after=page.next)
                        before = [(limit, False, True)] * (count // limit - 1)
                        assert pages == [*before, (limit, True, True)], query

    async def test_a_row_is_what_the_newest_append_with_a_listing_said(
        self, tmp_path: Path
    ) -> None:
        first = Listing(1, "alice", "running", 1, 2, {"x": "1", "y": "2"}, '{"said":"Grüße 🐢"}')
        second = Listing(3, "bob", "finished", 1, 9, {"y": "3"}, "{}")
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append_listed(journal, "c", claim, 1, first)
            assert await _listing(journal, "c") == first
            await _append_listed(journal, "c", claim, 2, None)
            assert await _listing(journal, "c") == first
            with pytest.raises(Fenced):
                await _append_listed(journal, "c", claim, 7, second)
            assert await _listing(journal, "c") == first
            await _append_listed(journal, "c", claim, 3, second)
            assert await _listing(journal, "c") == second

            async def found(**filters: Any) -> list[str]:  # noqa: ANN401 - those of a query
                return await _walk(journal, ListQuery(10, **filters))

            # Nothing is found any more by what it was.
            assert await found(owner="alice") == await found(owner="alice", status="running") == []
            assert await found(owner="alice", label=("x", "1")) == []
            assert await found(owner="bob", label=("x", "1")) == []
            assert await found(owner="bob", label=("y", "2")) == []
            assert await found(owner="bob", label=("y", "3")) == ["c"]
            (row,) = (await journal.page(ListQuery(10))).rows
            assert (row.head, row.is_stale) == (3, False)
            updated_at = (await journal.info("c")).updated_at
            assert row.updated_us / 1_000_000 == pytest.approx(updated_at)

    async def test_a_row_is_stale_if_a_record_behind_it_may_have_changed_it(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append_listed(journal, "c", claim, 1, None)
            assert await _is_stale(journal, "c")  # nothing is known of it
            assert (await _listing(journal, "c")).seq == 0
            await _append_listed(journal, "c", claim, 2, Listing(2, "a", "idle", 1, 1))
            await _append_listed(journal, "c", claim, 3, None, "agent_message")
            assert not await _is_stale(journal, "c")
            for at, kind in enumerate(sorted(LISTED_KINDS)):
                seq = 4 + 2 * at
                await _append_listed(journal, "c", claim, seq, None, kind)
                assert await _is_stale(journal, "c"), kind
                mended = Listing(seq + 1, "a", "idle", 1, 1)
                await _append_listed(journal, "c", claim, seq + 1, mended, kind)
                assert not await _is_stale(journal, "c")
            head = (await journal.info("c")).head
            many = [make_record(f"many {n}") for n in range(LISTING_AGE_MAX)]
            await journal.append(
                "c", many, epoch=claim.epoch, expected_seq=head + 1, is_unfinished=False
            )
            assert await _is_stale(journal, "c")

    async def test_a_listing_that_is_computed_later_replaces_an_older_one(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            for seq in (1, 2, 3):
                await _append_listed(journal, "c", claim, seq, None)
            second, third = (Listing(seq, f"o{seq}", "idle", 1, seq, {"x": "y"}) for seq in (2, 3))

            await journal.write_listing("c", third, epoch=claim.epoch)
            await journal.write_listing("c", second, epoch=claim.epoch)

            assert await _listing(journal, "c") == third
            assert await _walk(journal, ListQuery(9, owner="o3", label=("x", "y"))) == ["c"]
            with pytest.raises(ConversationNotFound):
                await journal.write_listing("d", second, epoch=1)
            with pytest.raises(Fenced):
                await journal.write_listing("c", third, epoch=claim.epoch - 1)

            # The log that it was computed from may have been deleted, and a shorter one begun.
            await journal.delete("c", epoch=claim.epoch)
            await _append_listed(journal, "c", await journal.claim("c"), 1, None)
            with pytest.raises(Fenced):
                await journal.write_listing("c", third, epoch=claim.epoch)

    async def test_a_listing_may_be_computed_by_a_process_that_owns_nothing(
        self, tmp_path: Path
    ) -> None:
        """Computing them anew claims nothing: its epoch is that of the last record it has read."""
        listing = Listing(1, "alice", "idle", 1, 1)
        async with self.make_journal(tmp_path) as first:
            claims = {name: await first.claim(name) for name in "cd"}
            for name, claim in claims.items():
                await _append_listed(first, name, claim, 1, None)
            await first.release("d", epoch=claims["d"].epoch)
            with suppress(OwnedElsewhere):  # not all journals can be entered twice
                async with self.make_journal(tmp_path) as second:
                    for name, claim in claims.items():
                        await second.write_listing(name, listing, epoch=claim.epoch)
                    assert await _listing(second, "c") == listing
                    assert await _walk(second, ListQuery(9, owner="alice")) == ["c", "d"]

    async def test_a_fork_has_a_row_of_its_own(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            own = Listing(1, "alice", "idle", 1, 1)
            await _append_listed(journal, "c", claim, 1, own)
            theirs = Listing(2, "bob", "idle", 2, 2, {"x": "y"})
            await journal.fork(
                "c", "d", at=1, records=[make_record("f")], is_unfinished=False, listing=theirs
            )
            await _fork(journal, "c", "e", 1, "g")

            assert await _listing(journal, "c") == own
            assert await _listing(journal, "d") == theirs
            assert await _is_stale(journal, "e")
            assert await _walk(journal, ListQuery(9, owner="alice")) == ["c"]

    async def test_a_deleted_conversation_leaves_no_row(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            await _append_listed(journal, "c", claim, 1, Listing(1, "a", "idle", 1, 1, {"x": "y"}))
            await journal.delete("c", epoch=claim.epoch)

            for query in (ListQuery(9), ListQuery(9, owner="a"), ListQuery(9, order="activity")):
                assert (await journal.page(query)).rows == []
            assert (await journal.page(ListQuery(9, owner="a", label=("x", "y")))).rows == []
            claim = await journal.claim("c")
            assert (await journal.page(ListQuery(9))).rows == []
            await _append(journal, "c", claim, ["new"])
            assert (await _listing(journal, "c")).owner == ""

    async def test_a_row_says_who_owns_the_log(self, tmp_path: Path) -> None:
        async with self.make_journal(tmp_path) as journal:
            await _append(journal, "c", await journal.claim("c"), ["a"])
            (row,) = (await journal.page(ListQuery(9))).rows
            assert (row.owned, row.address) == ("here", "")

    # --- search -----------------------------------------------------------------------------------

    async def test_messages_are_found_by_all_of_their_words_the_newest_first(
        self, tmp_path: Path
    ) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            await _say(journal, "c", "Where is my ORDER?", "Order seven: on its way to Café Öz")
            await _say(journal, "d", "cafe, order", "naïve 東京タワー")

            assert await _found(journal, "order") == ["c2", "d1", "c1"]
            assert await _found(journal, "order", "cafe") == ["c2", "d1"]
            assert await _found(journal, "order", begins="wa") == ["c2"]
            assert await _found(journal, begins="o") == ["c2", "d1", "c1"]
            assert await _found(journal, "naive", "東", "京") == ["d2"]
            assert await _found(journal, "ord") == await _found(journal, "order", "zebra") == []
            (hit,) = (await journal.search(SearchQuery(["seven"], 9))).rows
            assert (hit.conversation_id, hit.seq, hit.by, hit.author) == ("c", 2, "agent", None)
            assert hit.snippet == "Order seven: on its way to Café Öz"
            assert (hit.at_us, hit.left_view) == (2_000_099, "")

    async def test_without_having_been_asked_to_a_journal_does_not_search(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            await _say(journal, "c", "hello")
            with pytest.raises(SearchIsOff):
                await journal.search(SearchQuery(["hello"], 9))
            with pytest.raises(SearchIsOff):
                await journal.index()

    async def test_what_was_written_without_an_index_is_indexed_once_it_is_asked_for(
        self, tmp_path: Path
    ) -> None:
        async with self.make_journal(tmp_path) as journal:
            before = [f"c{number:02}" for number in range(200)]
            for name in before:
                await _say(journal, name, "word")
            await _say(journal, "gone", "word")
            await journal.delete("gone", epoch=1)
        async with self.make_searching_journal(tmp_path) as journal:
            assert len(await _found(journal, "word")) == len(before)
        async with self.make_journal(tmp_path) as journal:
            await _say(journal, "c", "word")
        async with self.make_searching_journal(tmp_path) as journal:
            assert len(await _found(journal, "word")) == len([*before, "c"])
            page = await journal.search(SearchQuery(["word"], 500, prefix="c"))
            assert ("c", 1) in [(row.conversation_id, row.seq) for row in page.rows]
            assert page.complete_to_us is None

    async def test_only_messages_of_users_and_agents_are_found(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            claim = await journal.claim("c")
            said = {"content": "word", "timestamp": "2024-01-01T00:00:00Z"}
            odd: list[tuple[str, object]] = [
                ("observation", said),
                ("message_queued", said),
                ("user_message", {**said, "is_reminder": True}),
                ("user_message", {"content": 7}),
                ("user_message", ["word"]),
                ("retraction", {"retracted_event_ids": 7}),
                ("condensation", {"forgotten_event_ids": [7, "e1"]}),
                ("agent_message", {**said, "timestamp": "word"}),
            ]
            payloads = [(kind, json.dumps(payload).encode()) for kind, payload in odd]
            payloads += [("user_message", b"word"), ("retraction", b"\xff")]
            for seq, (kind, payload) in enumerate(payloads, 1):
                await journal.append(
                    "c",
                    [Record(f"e{seq}", kind, payload)],
                    epoch=claim.epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                )

            assert await _found(journal, "word") == ["c8"]

    async def test_the_first_64_kib_of_a_message_are_searched(self, tmp_path: Path) -> None:
        long = f"first {'x' * 65_500} later {'y' * 100_000} last"
        async with self.make_searching_journal(tmp_path) as journal:
            await _say(journal, "c", f"{'é ' * 30_000}é last", long, "last")

            assert await _found(journal, "first") == ["c2"]
            assert await _found(journal, "later") == ["c2"]
            assert await _found(journal, "last") == ["c3"]
            (hit,) = (await journal.search(SearchQuery(["later"], 9))).rows
            assert "later" in hit.snippet
            assert len(hit.snippet) <= SNIPPET_LENGTH_MAX

    async def test_a_message_that_has_left_the_view_is_marked(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            claim = await _say(journal, "c", *["word"] * 4)
            left = {
                "condensation": {"forgotten_event_ids": ["c 1", "c 2"]},
                "retraction": {"retracted_event_ids": ["c 2", "c 3"]},
            }
            for seq, (kind, payload) in enumerate((*left.items(), *left.items()), 5):
                record = Record(f"left {seq}", kind, json.dumps(payload).encode())
                await journal.append(
                    "c", [record], epoch=claim.epoch, expected_seq=seq, is_unfinished=False
                )
                await journal.index()

            page = await journal.search(SearchQuery(["word"], 9))
            assert {row.seq: row.left_view for row in page.rows} == {
                1: "condensed",
                2: "retracted",
                3: "retracted",
                4: "",
            }

    async def test_the_prefix_of_a_fork_is_found_as_its_parents_alone(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            claim = await _say(journal, "c", "shared word", "another word")
            retracted = {"retracted_event_ids": ["c 1", "f 3"]}
            await journal.fork(
                "c",
                "f",
                at=2,
                records=[
                    _message("f", 3, "own word"),
                    Record("r", "retraction", json.dumps(retracted).encode()),
                ],
                is_unfinished=False,
            )
            await journal.index()

            page = await journal.search(SearchQuery(["word"], 9))
            assert [(row.conversation_id, row.seq, row.left_view) for row in page.rows] == [
                ("f", 3, "retracted"),
                ("c", 2, ""),
                ("c", 1, ""),  # the fork has retracted it in its own view
            ]
            await journal.delete("c", epoch=claim.epoch)
            assert await _found(journal, "word") == ["f3"]

    async def test_words_of_a_deleted_conversation_are_not_found(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            texts = ["word"] * 100
            claim = await _say(journal, "c", *texts)
            await _say(journal, "d", "word")
            assert len(await _found(journal, "word")) == len([*texts, "word"])
            await journal.delete("c", epoch=claim.epoch)
            assert [row.conversation_id for row in await _hits(journal, "word")] == ["d"]
            claim = await _say(journal, "c", "new word")
            # Deleted before it was indexed, perhaps.
            await journal.delete("c", epoch=claim.epoch)
            assert await _found(journal, "word") == ["d1"]
            await _say(journal, "c", "newer word")
            assert await _found(journal, "word") == ["d1", "c1"]
        async with self.make_searching_journal(tmp_path) as journal:
            assert await _found(journal, "word") == ["d1", "c1"]

    async def test_a_search_keeps_to_its_owner_prefix_status_and_label(
        self, tmp_path: Path
    ) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            names = [f"{'ab'[n % 2]}/{n:02}" for n in range(20)] + ["ab", "a"]
            for at, name in enumerate(names):
                labels = {"x": "yz"[at % 3 == 0]}
                status = ("idle", "error")[at % 5 == 0]
                listing = Listing(2, f"o{at // 2 % 2}", status, 1, 1, labels)
                await _say(journal, name, "word", "word", listing=listing)
            await journal.index()
            every = {
                (name, seq): (f"o{at // 2 % 2}", "yz"[at % 3 == 0], ("idle", "error")[at % 5 == 0])
                for at, name in enumerate(names)
                for seq in (1, 2)
            }
            mixes: Sequence[tuple[tuple[str, str] | None, str | None]] = (
                (None, None),
                (("x", "y"), None),
                (("x", "w"), None),
                (None, "error"),
                (("x", "y"), "error"),
            )
            for owner in (None, "o0", "o1", "o2", ""):
                for prefix in ("", "a", "a/", "b/", "a/1", "ab", "c/", "/"):
                    for label, state in mixes:
                        wanted = {
                            (name, seq)
                            for (name, seq), (has, value, status) in every.items()
                            if owner in {None, has}
                            and name.startswith(prefix)
                            and label in {None, ("x", value)}
                            and state in {None, status}
                        }
                        query = SearchQuery(
                            ["word"],
                            1_000,
                            prefix=prefix,
                            owner=owner,
                            label=label,
                            status=state,
                        )
                        short = query._replace(limit=2, scan_max=3)
                        for one in (query, query._replace(limit=3), short):
                            found = await _walk_hits(journal, one)
                            assert len(found) == len(wanted), one
                            assert set(found) == wanted, one

    async def test_a_search_follows_a_conversation_to_its_new_status(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            claim = await _say(journal, "c", "word", listing=Listing(1, "a", "running", 1, 1))
            await journal.index()
            for seq, status in ((2, "finished"), (3, "error")):
                await journal.append(
                    "c",
                    [Record(f"end {seq}", "turn_ended", b"{}")],
                    epoch=claim.epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                    # Of what else a list is sorted by, only the time of activity changes.
                    listing=Listing(seq, "a", status, 1, seq),
                )
                for one in ("running", "finished", "error"):
                    found = await _found(journal, "word", status=one)
                    assert found == (["c1"] if one == status else [])

    async def test_a_search_follows_a_conversation_to_its_new_owner(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            texts = ["word"] * 250
            listing = Listing(len(texts), "a", "idle", 1, 1)
            claim = await _say(journal, "c", *texts, listing=listing)
            assert len(await _found(journal, "word", owner="a")) == len(texts)
            await journal.append(
                "c",
                [Record("change", "conversation_changed", b'{"owner": "b"}')],
                epoch=claim.epoch,
                expected_seq=251,
                is_unfinished=False,
                listing=Listing(251, "b", "idle", 1, 1),
            )
            # At once for the old one, whatever the index has.
            assert not (await journal.search(SearchQuery(["word"], 9, owner="a"))).rows
            assert len(await _found(journal, "word", owner="b")) == len(texts)
            assert not await _found(journal, "word", owner="a")
            # A listing that is written later names yet another one.
            await journal.write_listing("c", Listing(251, "d", "idle", 1, 1), epoch=claim.epoch)
            assert len(await _found(journal, "word", owner="d")) == len(texts)
            assert not await _found(journal, "word", owner="b")

    async def test_a_last_page_of_hits_that_is_full_says_that_it_is_the_last(
        self, tmp_path: Path
    ) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            for name in ("a:1", "a:2", "b"):
                listing = Listing(2, "o", "idle", 1, 1, {"x": "y"})
                await _say(journal, name, "word", "word", listing=listing)
            await journal.index()
            mixes: Sequence[Mapping[str, Any]] = (
                {},
                {"owner": "o"},
                {"prefix": "a:"},
                {"prefix": "a:1"},
                {"label": ("x", "y")},
            )
            for mix, count in zip(mixes, (6, 6, 4, 2, 6), strict=True):
                first = await journal.search(SearchQuery(["word"], count // 2, **mix))
                assert (len(first.rows), first.is_complete) == (count // 2, True)
                assert first.next is not None, mix
                for page in (
                    await journal.search(
                        SearchQuery(["word"], count // 2, after=first.next, **mix)
                    ),
                    await journal.search(SearchQuery(["word"], count, **mix)),
                ):
                    assert page.rows, mix
                    assert (page.next, page.is_complete) == (None, True), mix

    @pytest.mark.parametrize("prefix", ["", "c"])
    async def test_a_page_of_hits_ends_with_the_message_that_makes_it_large(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
    ) -> None:
        """However many hits are asked for: someone may write the longest messages on purpose."""
        monkeypatch.setattr(searching, "SHOWN_BYTES_MAX", 100_000)
        large = f"word {'x' * 60_000}"
        async with self.make_searching_journal(tmp_path) as journal:
            await _say(journal, "c", large, "word", large, large, "word", large)
            await journal.index()

            pages = [await journal.search(SearchQuery(["word"], 1_000, prefix=prefix))]
            while (after := pages[-1].next) is not None:
                query = SearchQuery(["word"], 1_000, after=after, prefix=prefix)
                pages.append(await journal.search(query))

        assert [[row.seq for row in page.rows] for page in pages] == [[6, 5, 4], [3, 2, 1]]
        assert [page.is_complete for page in pages] == [False, True]
        assert all("word" in row.snippet for page in pages for row in page.rows)

    async def test_a_search_says_up_to_when_it_is_complete(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            assert (await journal.search(SearchQuery(["word"], 9))).rows == []
            await _say(journal, "c", "word")
            page = await journal.search(SearchQuery(["word"], 9))
            # Found, or said to be missing.
            assert len(page.rows) == 1 or page.complete_to_us is not None
            await journal.index()
            page = await journal.search(SearchQuery(["word"], 9))
            assert (len(page.rows), page.complete_to_us) == (1, None)

    async def test_messages_of_one_moment_are_found_once_each(self, tmp_path: Path) -> None:
        async with self.make_searching_journal(tmp_path) as journal:
            names = [f"c{number}" for number in range(30)]
            for name in names:
                claim = await journal.claim(name)
                for at in (1, 2):
                    await journal.append(
                        name,
                        [_message(name, at, "word", at="2024-01-01T00:00:00Z")],
                        epoch=claim.epoch,
                        expected_seq=at,
                        is_unfinished=False,
                    )
            await journal.index()
            found = await _walk_hits(journal, SearchQuery(["word"], 7))
            assert len(found) == len(set(found)) == 2 * len(names)


def _message(name: str, seq: int, text: str, *, at: str = "") -> Record:
    """Return a chat message: by the user and by the agent in turns, a second after the other."""
    by = ("user_message", "agent_message")[(seq - 1) % 2]
    moment = datetime.fromtimestamp(seq, UTC) + timedelta(microseconds=sum(name.encode()))
    event = {"content": text, "timestamp": at or moment.isoformat()}
    return Record(f"{name} {seq}", by, json.dumps(event).encode())


async def _say(journal: Journal, name: str, *texts: str, listing: Listing | None = None) -> Claim:
    """Append messages to a conversation; those of another one are of another moment."""
    claim = await journal.claim(name, any_name=True)
    records = [_message(name, seq, text) for seq, text in enumerate(texts, claim.head + 1)]
    await journal.append(
        name,
        records,
        epoch=claim.epoch,
        expected_seq=claim.head + 1,
        is_unfinished=False,
        listing=listing,
    )
    return claim


async def _hits(journal: Journal, *words: str, **asked: Any) -> Sequence[FoundMessage]:  # noqa: ANN401 - of a query
    await journal.index()
    return (await journal.search(SearchQuery(words, 1_000, **asked))).rows


async def _found(journal: Journal, *words: str, **asked: Any) -> list[str]:  # noqa: ANN401 - of a query
    return [f"{one.conversation_id}{one.seq}" for one in await _hits(journal, *words, **asked)]


async def _walk_hits(journal: Journal, query: SearchQuery) -> list[tuple[str, int]]:
    """Return the messages of all pages."""
    found: list[tuple[str, int]] = []
    while True:
        page = await journal.search(query)
        assert len(page.rows) <= query.limit
        found += [(row.conversation_id, row.seq) for row in page.rows]
        if page.next is None:
            return found
        assert page.rows or not page.is_complete
        query = query._replace(after=page.next)


_FILTERS: Sequence[Mapping[str, Any]] = (
    {},
    {"prefix": "a:"},
    {"owner": "a"},
    {"owner": "nobody"},
    {"owner": "a", "prefix": "a:1"},
    {"owner": "a", "status": "running"},
    {"owner": "a", "status": "idle"},
    {"owner": "b", "label": ("project", "x")},
    {"status": "running"},
    {"label": ("project", "x")},
    {"owner": "a", "status": "running", "label": ("project", "x"), "prefix": "a:"},
)


async def _fill_lists(journal: Journal) -> dict[str, Listing]:
    """Make conversations in an order that is none of the orders of a list."""
    listed: dict[str, Listing] = {}
    for number in range(24):
        name = f"{'ab'[number % 2]}:{number * 7 % 24}é"
        listing = Listing(
            1,
            "ab"[number // 2 % 2],
            ("idle", "running", "error")[number % 3],
            1_000 + number * 5 % 12,  # some at the same time
            2_000 + number * 11 % 12,
            {"project": "xy"[number // 4 % 2]} if number % 4 else {},
        )
        await _append_listed(journal, name, await journal.claim(name), 1, listing)
        listed[name] = listing
    return listed


def _wanted(listed: Mapping[str, Listing], query: ListQuery) -> list[str]:
    return [
        name
        for name, listing in listed.items()
        if name.startswith(query.prefix)
        and query.owner in {None, listing.owner}
        and query.status in {None, listing.status}
        and (query.label is None or listing.labels.get(query.label[0]) == query.label[1])
    ]


def _place(name: str, listing: Listing, query: ListQuery) -> Any:  # noqa: ANN401 - of each order
    match query.order:
        case "id":
            return name
        case "created":
            return listing.created_us
        case "activity":
            return -listing.active_us


async def _walk(journal: Journal, query: ListQuery) -> list[str]:
    """Return the ids of all pages."""
    names: list[str] = []
    while True:
        page = await journal.page(query)
        assert len(page.rows) <= query.limit
        assert page.is_complete or page.next is not None
        names += [row.conversation_id for row in page.rows]
        if page.next is None:
            return names
        assert page.rows or not page.is_complete
        query = query._replace(after=page.next)


async def _append_listed(  # noqa: PLR0917 - short, where it is used
    journal: Journal,
    name: str,
    claim: Claim,
    seq: int,
    listing: Listing | None,
    kind: str = "note",
) -> None:
    await journal.append(
        name,
        [Record(f"{name} {seq}", kind, b"{}")],
        epoch=claim.epoch,
        expected_seq=seq,
        is_unfinished=False,
        listing=listing,
    )


async def _row(journal: Journal, name: str) -> ListRow:
    (row,) = (await journal.page(ListQuery(1, prefix=name))).rows
    return row


async def _listing(journal: Journal, name: str) -> Listing:
    return (await _row(journal, name)).listing


async def _is_stale(journal: Journal, name: str) -> bool:
    return (await _row(journal, name)).is_stale
