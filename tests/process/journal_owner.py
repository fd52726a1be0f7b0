"""An owner of a journal, as a process of its own: `journal_owner.py PLACE BACKEND WHERE NTH HOW`.

PLACE is the path of a file, or `postgres SCHEMA LEASE_S` for the database that the environment
variable `TURNKEEPER_TEST_POSTGRES` names.

It appends to a few conversations at once and says so line by line: `sent NAME SEQ ID` before, and
`kept NAME SEQ ID` after an append is acknowledged. As it passes boundary WHERE of a commit for the
NTH time it does HOW to itself: `kill` (SIGKILL) or `stop` (SIGSTOP). It leaves a conversation that
is not its own any more, with `lost NAME`, and ends when it has none.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

import anyio
import anyio.lowlevel

from turnkeeper.actors import Journal, PostgresJournal, SQLiteJournal
from turnkeeper.actors.journal import Claim
from turnkeeper.actors.journals.contract import make_record
from turnkeeper.runtime import OwnershipLost, Unavailable

CONVERSATIONS = ("a", "b", "c")
APPENDS_MAX = 10_000
# Other changes go through more boundaries than appends alone.
CLAIM_EVERY = 2


def say(*words: object) -> None:
    """One line, in one write: it is out before the process can die of what comes next."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def open_journal(place: str, failpoint: Callable[[str], None]) -> Journal:
    if not place.startswith("postgres "):
        return SQLiteJournal(place, failpoint=failpoint)
    _, schema, lease_s = place.split()
    return PostgresJournal(
        os.environ["TURNKEEPER_TEST_POSTGRES"],
        schema=schema,
        lease_s=float(lease_s),
        failpoint=failpoint,
    )


async def main(place: str, where: str, nth: int, how: str) -> None:
    left = nth

    def failpoint(boundary: str) -> None:
        nonlocal left
        if boundary == where:
            left -= 1
            if not left:
                # To this very thread: it does not take another step.
                signal.pthread_kill(
                    threading.get_ident(), signal.SIGKILL if how == "kill" else signal.SIGSTOP
                )

    claims: dict[str, Claim] = {}

    async def append(journal: Journal, name: str, seq: int, event_id: str) -> bool:
        try:
            if not seq % CLAIM_EVERY:
                claims[name] = await journal.claim(name)
            say("sent", name, seq, event_id)
            await journal.append(
                name,
                [make_record(event_id)],
                epoch=claims[name].epoch,
                expected_seq=seq,
                is_unfinished=False,
            )
        except Unavailable:
            await anyio.lowlevel.checkpoint()
            return False
        return True

    async def converse(journal: Journal, name: str) -> None:
        claim = claims[name] = await journal.claim(name)
        say("head", name, claim.head)
        for seq in range(claim.head + 1, claim.head + APPENDS_MAX):
            event_id = f"{name}-{seq}-{os.getpid()}"
            try:
                while not await append(journal, name, seq, event_id):
                    pass  # its lease is out, until it is renewed
            except OwnershipLost:
                say("lost", name)
                return
            say("kept", name, seq, event_id)

    async with (
        open_journal(place, failpoint) as journal,
        anyio.create_task_group() as group,
    ):
        for name in CONVERSATIONS:
            group.start_soon(converse, journal, name)


if __name__ == "__main__":
    place, backend, where, nth, how = sys.argv[1:]
    anyio.run(main, place, where, int(nth), how, backend=backend)
