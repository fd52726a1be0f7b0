"""The rows for lists that have changed last stand apart in the file, and no list shows that."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.actors.journals.wanted_lists import QUERIES, wanted
from turnkeeper.actors.journal import Listing, ListQuery, Record
from turnkeeper.actors.journals.shared.append_rules import Append
from turnkeeper.actors.journals.shared.job_thread import Job
from turnkeeper.actors.journals.sqlite import forks, writer
from turnkeeper.actors.journals.sqlite.listings import read_page
from turnkeeper.actors.journals.sqlite.owner_lock import OwnerLock
from turnkeeper.actors.journals.sqlite.schema import open_for_writing
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.journals.sqlite.writer import Change, SQLiteWriter
from turnkeeper.runtime import Ports

MAX = 6
FOLDED = 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RECENT_LISTINGS_MAX", MAX)
    monkeypatch.setattr(writer, "LISTINGS_FOLDED", FOLDED)


class File:
    """A journal file, written in this thread; it remembers what lists have to show."""

    def __init__(
        self,
        path: Path,
        failpoint: Callable[[str], None] = lambda _boundary: None,
        *,
        ports: Ports = Ports(),
        is_searching: bool = False,
    ) -> None:
        self.path = path
        self.connection = open_for_writing(path, synchronous="NORMAL", busy_wait_s=1)
        self.writer = SQLiteWriter(
            self.connection,
            path=path,
            lock=OwnerLock(path, "a test"),
            ports=ports,
            failpoint=failpoint,
            tails_max=100,
            rejection_age_s_max=1e9,
            is_searching=is_searching,
            is_log_left=False,
            is_log_stamped=False,
            on_closed=lambda _error: None,
            on_log_bytes=lambda _bytes: None,
        )
        self.listed: dict[str, Listing] = {}
        self._written = 0

    def work(self, job: Job[Any]) -> None:
        self.writer.work([job])

    def claim(self, name: str) -> int:
        job = Change(lambda writer: writer.claim(name))
        self.work(job)
        assert job.settled is not None
        return job.settled.epoch

    def append(self, name: str, listing: Listing | None) -> None:
        """Append a record as the next owner of its conversation."""
        tail = self.writer.load(name)
        epoch = self.claim(name)
        self._written += 1
        job = Append(
            name,
            [Record(f"event {self._written}", "note", b"{}")],
            epoch=epoch,
            expected_seq=1 + (tail.head if tail else 0),
            is_unfinished=False,
            listing=listing,
        )
        self.work(job)
        assert job.refusal is None
        if listing is not None:
            self.listed[name] = listing

    def delete(self, name: str) -> None:
        epoch = self.claim(name)
        job = Change(lambda writer: forks.delete(writer, name, epoch))
        self.work(job)
        assert job.refusal is None
        del self.listed[name]

    def index(self, name: str, listing: Listing) -> None:
        """Write a listing beside the log, as `reindex` does."""
        epoch = self.claim(name)
        job = Change(lambda writer: writer.write_listing(name, listing, epoch))
        self.work(job)
        assert job.refusal is None
        self.listed[name] = listing

    def names(self, query: ListQuery) -> list[str]:
        """Return the names on the pages of a query; each row is compared."""
        found: list[str] = []
        while True:
            page = read_page(self.connection, query, owned=lambda: ("here", ""))
            for row in page.rows:
                assert row.listing == self.listed[row.conversation_id]
                found.append(row.conversation_id)
            if page.next is None:
                return found
            query = query._replace(after=page.next)

    def recent(self) -> int:
        (count,) = self.connection.execute("SELECT count(*) FROM listing_recent").fetchone()
        return int(count)

    def rest(self) -> None:
        """Have the writer fold as much as it does when there is nothing else to do."""
        for _ in range(100):
            if self.writer.rest() is None:
                return
        raise AssertionError("the writer does not come to rest")

    def pages_written(self, name: str, listing: Listing | None) -> set[int]:
        """Append, and return the numbers of the pages that the commit has written."""
        log = Path(f"{self.path}-wal")
        before = log.stat().st_size
        (size,) = self.connection.execute("PRAGMA page_size").fetchone()
        tail = self.writer.load(name)
        assert tail is not None
        self._written += 1
        record = Record(f"event {self._written}", "note", b"{}")
        job = Append(
            name,
            [record],
            epoch=tail.epoch,
            expected_seq=tail.head + 1,
            is_unfinished=False,
            listing=listing,
        )
        self.work(job)
        assert job.refusal is None
        frames = log.read_bytes()[before:]
        assert len(frames) % (24 + size) == 0
        return {struct.unpack_from(">I", frames, at)[0] for at in range(0, len(frames), 24 + size)}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    file = File(tmp_path / "chats.db")
    with closing(file.connection):
        yield file


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", range(3))
def test_lists_are_exact_whichever_rows_stand_apart(seed: int, file: File) -> None:
    """Turns, changes, deletions and folds in a drawn order; pages of every kind after each few."""
    random = Random(seed)
    heads: dict[str, int] = {}
    both = 0
    for step in range(120):
        name = f"c{random.randrange(12)}"
        old = file.listed.get(name)
        heads[name] = heads.get(name, 0) + 1
        at = 1_000 * random.randrange(1_000) + step
        if old is None:
            labels = {"project": random.choice("xxy")}
            new = Listing(heads[name], random.choice("ab"), "running", at, at, labels)
        elif random.random() < 0.05:
            file.delete(name)
            heads[name] = 0
            continue
        else:
            status = random.choice(("running", "finished", "idle", "error"))
            new = old._replace(seq=heads[name], status=status, active_us=at)
            if random.random() < 0.2:
                labels = {one: random.choice("xy") for one in ("project", "area")}
                new = new._replace(
                    owner=random.choice("ab"), labels=random.choice((labels, {}, old.labels))
                )
        file.append(name, new)
        if random.random() < 0.05:
            file.index(name, new._replace(status="stuck", payload="{}"))
        if random.random() < 0.3:
            file.rest()
            assert file.recent() <= MAX
        if step % 8 == 0:
            both += 0 < file.recent() < len(file.listed)
            for query in QUERIES:
                assert file.names(query) == wanted(file.listed, query), query
    assert both > 5
    file.writer.close()
    found = verify(file.path)
    assert (found.problems, found.stale) == ((), ())


def test_a_turn_writes_one_page_for_lists(file: File) -> None:
    """Beside those of its events; all indexes of lists stay as they are."""
    listing = Listing(1, "a", "running", 1, 1, {"project": "x"})
    for name in ("c", "d"):
        file.append(name, listing)
        file.append(name, listing._replace(seq=2, active_us=2))

    without = file.pages_written("c", None)
    end = listing._replace(seq=4, status="finished", active_us=3, payload='{"said":"yes"}')
    with_one = file.pages_written("c", end)

    (page,) = file.connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'listing_recent'"
    ).fetchone()
    assert with_one - without == {page}
    assert without <= with_one


@pytest.mark.usefixtures("few")
def test_the_rows_at_rest_are_folded_first(file: File) -> None:
    for number in range(MAX + 1):
        name = f"c{number}"
        begun = Listing(1, "a", "running", number, number)
        file.append(name, begun)
        file.append(name, begun._replace(seq=2, status="finished" if number > 3 else "running"))

    file.rest()

    left = file.connection.execute("SELECT name FROM listing_recent ORDER BY name").fetchall()
    assert left == [("c0",), ("c1",), ("c2",), ("c3",)]


@pytest.mark.usefixtures("few")
def test_rows_are_folded_once_no_job_has_come_for_a_while(file: File) -> None:
    """A fold is a commit of its own, for which the next group would wait."""
    for number in range(MAX + 1):
        begun = Listing(1, "a", "running", number, number)
        file.append(f"c{number}", begun)
        file.append(f"c{number}", begun._replace(seq=2, status="finished"))

    pause_s = file.writer.rest()

    assert pause_s
    assert file.recent() == MAX + 1
    file.writer.rest()
    assert file.recent() <= MAX


@pytest.mark.usefixtures("few")
def test_a_late_index_has_the_moments_between_two_groups(tmp_path: Path) -> None:
    """Rows for lists are folded once no job has come for a while, as without a search."""
    now = 0.0
    file = File(tmp_path / "chats.db", ports=Ports(monotonic=lambda: now), is_searching=True)
    with closing(file.connection):
        for number in range(MAX + 1):
            begun = Listing(1, "a", "running", number, number)
            file.append(f"c{number}", begun)
            file.append(f"c{number}", begun._replace(seq=2, status="finished"))
        now += 2.0

        pause_s = file.writer.rest()

        assert pause_s
        (looked_at,) = file.connection.execute("SELECT cursor FROM search").fetchone()
        assert looked_at == 2 * (MAX + 1)
        assert file.recent() == MAX + 1
        file.rest()
        assert file.recent() <= MAX


def test_appends_with_and_without_a_listing_go_in_together(file: File) -> None:
    """Their rows have the columns of a listing as soon as one of them has one."""
    begun = {name: Listing(1, "a", "running", at, at) for at, name in enumerate("abcd")}
    for name, listing in begun.items():
        file.append(name, listing)
    ended = {name: begun[name]._replace(seq=3, status="finished") for name in "bd"}
    jobs: list[Job[Any]] = [
        Append(
            name,
            [Record(f"{name}{at}", "note", b"{}") for at in range(2)],
            epoch=1,
            expected_seq=2,
            is_unfinished=False,
            listing=ended.get(name),
        )
        for name in begun
    ]

    file.writer.work(jobs)

    assert [list(job.settled or ()) for job in jobs] == [[2, 3]] * 4
    file.listed |= ended
    assert file.names(ListQuery(9)) == list(begun)
    file.writer.close()
    found = verify(file.path)
    assert (found.records, found.problems) == (12, ())


def programs_of_an_append(file: File) -> dict[str, list[str]]:
    """Return what SQLite does for two rows with listings: by program, the operations."""
    statement = writer._insert(2, writer._LISTED_WIDTH)
    programs: dict[str, list[str]] = {}
    opcodes: list[str] = []
    explained = file.connection.execute(f"EXPLAIN {statement}", [0] * statement.count("?"))
    for _, opcode, _, _, _, p4, *_ in explained:
        if opcode == "Init":
            opcodes = programs[str(p4)] = []
        opcodes.append(opcode)
    return programs


def test_a_turn_opens_no_table_for_its_listing(file: File) -> None:
    """SQLite opens one for the rows of a statement; one more a listing took a tenth of the time."""
    programs = programs_of_an_append(file)

    assert "OpenEphemeral" not in programs["-- TRIGGER write_incoming_listed"]


def test_a_row_runs_one_trigger(file: File) -> None:
    """SQLite sets one up for each row, also if its WHEN says no: one more took a thirtieth."""
    programs = programs_of_an_append(file)

    assert programs["None"].count("Program") == 1


@pytest.mark.usefixtures("few")
def test_under_load_rows_are_folded_between_two_groups(file: File) -> None:
    """The writer never rests: no more stand apart than four times as many and a group's."""
    for number in range(5 * MAX):
        begun = Listing(1, "a", "running", number, number)
        file.append(f"c{number}", begun)
        file.append(f"c{number}", begun._replace(seq=2, status="finished"))
        assert file.recent() <= 4 * MAX + 1
    assert file.recent() > MAX


@pytest.mark.usefixtures("few")
def test_a_fold_that_fails_changes_nothing_and_is_tried_again_later(tmp_path: Path) -> None:
    is_full = False

    def fail(boundary: str) -> None:
        if is_full and boundary == "written":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    file = File(tmp_path / "chats.db", fail)
    with closing(file.connection):
        for number in range(MAX + 1):
            begun = Listing(1, "a", "running", number, number)
            file.append(f"c{number}", begun)
            file.append(f"c{number}", begun._replace(seq=2, status="finished"))
        query = ListQuery(10, owner="a", order="activity")

        is_full = True
        file.rest()
        assert file.recent() == MAX + 1
        assert file.names(query) == wanted(file.listed, query)

        is_full = False
        for number in range(MAX + 1):
            name = f"c{number}"
            file.append(name, file.listed[name]._replace(seq=3, active_us=100 + number))
        file.rest()
        assert file.recent() <= MAX
        assert file.names(query) == wanted(file.listed, query)
