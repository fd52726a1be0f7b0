"""An owner of a journal file, as a process of its own: `... PATH BACKEND WHERE NTH HOW`.

It appends to a few conversations at once and says so line by line: `sent NAME SEQ ID` before, and
`kept NAME SEQ ID` after an append is acknowledged. As it passes boundary WHERE of a commit for the
NTH time it does HOW to itself: `kill` (SIGKILL) or `stop` (SIGSTOP). It ends by itself when the
file is not its own any more, with `lost NAME`.
"""

import os
import signal
import sys
import threading

import anyio

from turnkeeper.actors import OwnedElsewhere, SQLiteJournal
from turnkeeper.actors.testing import make_record

CONVERSATIONS = ("a", "b", "c")
APPENDS_MAX = 10_000


def say(*words: object) -> None:
    """One line, in one write: it is out before the process can die of what comes next."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(path: str, where: str, nth: int, how: str) -> None:
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

    async def converse(journal: SQLiteJournal, name: str) -> None:
        claim = await journal.claim(name)
        say("head", name, claim.head)
        for seq in range(claim.head + 1, claim.head + APPENDS_MAX):
            event_id = f"{name}-{seq}-{os.getpid()}"
            say("sent", name, seq, event_id)
            try:
                await journal.append(
                    name,
                    [make_record(event_id)],
                    epoch=claim.epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                )
            except OwnedElsewhere:
                say("lost", name)
                return
            say("kept", name, seq, event_id)

    async with (
        SQLiteJournal(path, failpoint=failpoint) as journal,
        anyio.create_task_group() as group,
    ):
        for name in CONVERSATIONS:
            group.start_soon(converse, journal, name)


if __name__ == "__main__":
    path, backend, where, nth, how = sys.argv[1:]
    anyio.run(main, path, where, int(nth), how, backend=backend)
