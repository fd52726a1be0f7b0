"""Runs an owner of a journal again and again, and fails another call of SQLite's in each run.

`faulty_owner.py FOLDER`, with the compiled `fault_shim.c` preloaded. Each line on standard input is
`KIND NUMBER LASTS`: the kind of call that fails (1: input and output, 2: allocations), the number
of the call (0: none), and 1 if all later ones fail too. It answers each with one line of JSON: the
number of such calls in the run, its errors, and everything that is `wrong`.

Every run is a fork of this process, which has loaded everything and started nothing. It claims,
appends, forks, keeps a snapshot and a rejection, indexes chat messages, searches, deletes, and
empties the log; it sends again after an unknown outcome, as a caller should. Then nothing fails any
more, and the file and its index are compared with the acknowledgements.
"""

import ctypes
import json
import os
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import ConversationNotFound, Fenced
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Claim, Rejection, SearchQuery, Snapshot
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.runtime import OutcomeUnknown, OwnershipLost, Refused, Unavailable

PART = b'{"x": "' + b"y" * 40_000 + b'"}'
BIG = b"z" * 20_000
WORD = "word"

shim = ctypes.CDLL(None)


class Run:
    """One run: what was acknowledged, what may be there, and what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        # The event ids that have to be in a log, in order; those of appends of unknown outcome may
        # follow the last of them.
        self.kept: dict[str, list[str]] = {
            "old": ["o1", "o2"],
            "a": [],
            "b": [],
            "f": [],
            "big": [],
            "said": [],
        }
        self.open: dict[str, list[str]] = {name: [] for name in self.kept}
        self.may_be_gone: set[str] = set()
        self.claims: dict[str, Claim] = {}
        self.closed = False

    async def ask(self, what: str, ask: Callable[[], Awaitable[object]]) -> object:
        """The answer, or the error, if it is one that a caller can act on."""
        try:
            return await ask()
        except (Unavailable, OutcomeUnknown, OwnershipLost, Refused) as error:
            self.errors[f"{what}: {type(error).__name__}"] += 1
            if type(error).__name__ == "CorruptLog" or "damaged" in str(error):
                self.wrong.append(f"{what}: damage where there is none: {error}")
            return error
        except BaseException as error:  # noqa: BLE001 - it is what we look for
            self.wrong.append(f"{what}: {error!r}: {''.join(traceback.format_exception(error))}")
            return error

    async def claim(self, journal: SQLiteJournal, name: str) -> bool:
        for _ in range(2):
            claim = await self.ask(f"claim {name}", lambda: journal.claim(name))
            if isinstance(claim, Claim):
                self.claims[name] = claim
                return True
        return False

    async def append(
        self, journal: SQLiteJournal, name: str, *ids: str, payload: bytes = b"{}"
    ) -> None:
        """As an owner does: after an error it claims again, and sends the same ids."""
        if name == "said":
            records = [encode_record(UserMessageEvent(id=each, content=WORD)) for each in ids]
        else:
            records = [make_record(event_id, payload) for event_id in ids]
        for _ in range(3):
            claim = self.claims.pop(name, None)
            if claim is None:
                if not await self.claim(journal, name):
                    continue
                claim = self.claims.pop(name)
            head = claim.head
            append = partial(
                journal.append,
                name,
                records,
                epoch=claim.epoch,
                expected_seq=head + 1,
                is_unfinished=False,
            )
            seqs: Any = await self.ask(f"append {name}", append)
            if not isinstance(seqs, BaseException):
                self.kept[name] += ids
                self.open[name] = []
                self.claims[name] = Claim(claim.epoch, list(seqs)[-1])
                return
            if isinstance(seqs, OutcomeUnknown):
                self.open[name] = list(ids)
            elif isinstance(seqs, Fenced):
                self.wrong.append(f"append {name}: fenced by nobody: {seqs}")

    async def work(self, journal: SQLiteJournal) -> None:
        await self.append(journal, "a", "a1", "a2")
        await self.append(journal, "a", "a3", payload=PART)
        async with anyio.create_task_group() as group:
            group.start_soon(self.append, journal, "a", "a4")
            group.start_soon(self.append, journal, "b", "b1", "b2")
            group.start_soon(self.append, journal, "old", "o3")
        if self.kept["a"][:2]:
            made = await self.ask(
                "fork",
                lambda: journal.fork(
                    "a", "f", at=2, records=[make_record("f3", PART)], is_unfinished=False
                ),
            )
            if isinstance(made, Claim):
                self.kept["f"] = ["a1", "a2", "f3"]
            elif isinstance(made, OutcomeUnknown):
                self.open["f"] = ["a1", "a2", "f3"]
        if "a" in self.claims:
            epoch = self.claims["a"].epoch
            snapshot = Snapshot(1, "v", b"folds")
            await self.ask("snapshot", lambda: journal.write_snapshot("a", snapshot, epoch=epoch))
            rejections = [Rejection(4e9, "v", "r", b"{}")]
            await self.ask("reject", lambda: journal.reject("a", rejections, epoch=epoch))
        for number in range(2):
            await self.append(journal, "said", f"s{number}", f"t{number}")
            await self.ask("index", journal.index)
        for number in range(4):
            await self.append(journal, "big", f"g{number}", payload=BIG)
        if "b" in self.claims:
            epoch = self.claims["b"].epoch
            done = await self.ask("delete", lambda: journal.delete("b", epoch=epoch))
            if isinstance(done, OutcomeUnknown):
                self.may_be_gone.add("b")
            elif not isinstance(done, BaseException):
                self.kept["b"], self.claims = [], {}
        await self.append(journal, "old", "o4")
        for name in ("a", "f", "old"):
            await self.ask(f"read {name}", partial(journal.read, name))
        await self.ask("list", journal.list)
        await self.ask("search", lambda: journal.search(SearchQuery([WORD], 99)))
        self.closed = not journal.is_lease_valid()
        if self.closed:
            again = await self.ask("closed", lambda: journal.claim("a"))
            if not isinstance(again, Unavailable) or "closed for writing" not in str(again):
                self.wrong.append(f"closed for writing without saying so: {again!r}")

    async def check(self) -> None:
        """Nothing fails any more: what was acknowledged is there, and writing goes on."""
        found = verify(self.path).problems
        if found:
            self.wrong.append(f"damaged: {found}")
        async with SQLiteJournal(self.path, search=True) as journal:
            await journal.index()
            page = await journal.search(SearchQuery([WORD], 99))
            said = [one.event_id for one in reversed(page.rows)]
            if said not in (self.kept["said"], self.kept["said"] + self.open["said"]):
                self.wrong.append(f"{said} is found, and {self.kept['said']} was acknowledged")
            for name, kept in self.kept.items():
                allowed = [kept, kept + self.open[name]]
                if name in self.may_be_gone:
                    allowed.append([])
                try:
                    there = await read_all(journal, name)
                except ConversationNotFound:
                    there = []
                if there not in allowed:
                    self.wrong.append(f"{name} has {there}, and {allowed} were acknowledged")
                claim = await journal.claim(name)
                await journal.append(
                    name,
                    [make_record("last")],
                    epoch=claim.epoch,
                    expected_seq=claim.head + 1,
                    is_unfinished=False,
                )
        if problems := verify(self.path).problems:
            self.wrong.append(f"damaged after going on: {problems}")


async def run_once(run: Run, kind: int, number: int, lasts: int) -> int:
    async def enter_and_work() -> None:
        async with SQLiteJournal(run.path, busy_wait_s=1, search=True) as journal:
            await run.work(journal)

    shim.shim_arm(kind, number, lasts)
    await run.ask("open", enter_and_work)
    calls: int = shim.shim_disarm()
    try:
        await run.check()
    except BaseException as error:  # noqa: BLE001 - it is what we look for
        run.wrong.append(f"afterwards: {''.join(traceback.format_exception(error))}")
    return calls


async def make_first(path: Path) -> None:
    """The file that each run begins with: it was killed, and has a log."""
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("old")
        records = [make_record("o1"), make_record("o2", PART)]
        await journal.append("old", records, epoch=claim.epoch, expected_seq=1, is_unfinished=True)
        for end in ("", "-wal"):
            shutil.copyfile(f"{path}{end}", path.with_name(f"first{end}"))


def main(folder: Path) -> None:
    failed = shim.shim_take_allocations(b"libsqlite3.so.0")
    if failed:
        sys.exit(f"the shim cannot take SQLite's allocations: step {failed}")
    if os.fork() == 0:
        anyio.run(make_first, folder / "chats.db")
        os._exit(0)
    os.wait()
    for line in sys.stdin:
        kind, number, lasts = map(int, line.split())
        place = folder / "run"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for end in ("", "-wal"):
            shutil.copyfile(folder / f"first{end}", place / f"chats.db{end}")
        if os.fork() == 0:
            run = Run(place / "chats.db")
            calls = anyio.run(run_once, run, kind, number, lasts)
            answer = {
                "point": [kind, number, lasts],
                "calls": calls,
                "closed": run.closed,
                "errors": run.errors,
                "wrong": run.wrong,
            }
            os.write(1, (json.dumps(answer) + "\n").encode())
            os._exit(0)
        _, status = os.wait()
        if status:
            answer = {"point": [kind, number, lasts], "wrong": [f"the run ended with {status}"]}
            os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
