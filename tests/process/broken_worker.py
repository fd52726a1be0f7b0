"""A worker of the command line whose journal is not the usual one; its first argument says which.

Run by the tests in this folder as a process of its own, in place of the real worker; with `stress-`
before the name, in place of the one of a stress run.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Self

import anyio

from turnkeeper.actors import Journal, SQLiteJournal
from turnkeeper.actors.cli import stress_worker, worker
from turnkeeper.actors.errors import OwnedElsewhere
from turnkeeper.actors.journal import READ_BYTES, Listing, Record, StoredRecord

APPENDS_BEFORE_DEATH = 40


class EagerJournal(SQLiteJournal):
    """Says that records are durable while they are still in memory; a kill loses all of them.

    It writes the records of a conversation down when that is read again, and all when it is left.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.kept_back: dict[str, list[Callable[[], Awaitable[object]]]] = {}
        self.writing = anyio.Lock()

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        self.kept_back.setdefault(conversation_id, []).append(
            partial(
                super().append,
                conversation_id,
                records,
                epoch=epoch,
                expected_seq=expected_seq,
                is_unfinished=is_unfinished,
                listing=listing,
            )
        )
        return range(expected_seq, expected_seq + len(records))

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        await self.write_down(conversation_id)
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)

    async def write_down(self, conversation_id: str) -> None:
        async with self.writing:
            kept_back = self.kept_back.get(conversation_id, [])
            while kept_back:
                await kept_back[0]()
                del kept_back[0]

    async def __aexit__(self, *exc_info: object) -> None:
        for conversation_id in self.kept_back:
            await self.write_down(conversation_id)
        await super().__aexit__(None, None, None)


class RepeatingJournal(SQLiteJournal):
    """Writes the chat messages of one conversation again as it is left."""

    async def __aexit__(self, *exc_info: object) -> None:
        first = (await self.list())[0].conversation_id
        records = []
        for record in await self.read(first):
            if record.kind == "user_message":
                again = f"{record.event_id}-again"
                payload = record.payload.replace(record.event_id.encode(), again.encode())
                records.append(Record(again, record.kind, payload))
        claim = await self.claim(first)
        await self.append(
            first,
            records,
            epoch=claim.epoch,
            expected_seq=claim.head + 1,
            is_unfinished=False,
        )
        await super().__aexit__(None, None, None)


class MortalJournal(SQLiteJournal):
    """Takes its process along after some appends."""

    appends = 0
    how = signal.SIGKILL

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        self.appends += 1
        if self.appends > APPENDS_BEFORE_DEATH:
            sys.stderr.write("the disk is on fire\n")
            os.kill(os.getpid(), self.how)
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )


class TakenJournal(SQLiteJournal):
    """Is taken by another process after the command has looked."""

    async def __aenter__(self) -> Self:
        raise OwnedElsewhere("journal chats.db", "the shop", is_file=True)


class StuckJournal(SQLiteJournal):
    """Commits for a while, and then answers no more."""

    appends = 0

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        self.appends += 1
        if self.appends > APPENDS_BEFORE_DEATH:
            await anyio.sleep_forever()
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )


class MuteJournal(MortalJournal):
    """Stops its process after some appends."""

    how = signal.SIGSTOP


JOURNALS: Mapping[str, Callable[[str], Journal]] = {
    "eager": EagerJournal,
    "repeating": RepeatingJournal,
    "mortal": MortalJournal,
    "taken": TakenJournal,
    "stuck": StuckJournal,
    "mute": MuteJournal,
}

if __name__ == "__main__":
    kind = sys.argv[1]
    if kind.startswith("stress-"):
        stress_worker.main(sys.argv[2], JOURNALS[kind.removeprefix("stress-")])
    else:
        worker.main(JOURNALS[kind])
