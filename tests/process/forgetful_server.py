"""A server that forgets when it is killed: `forgetful_server.py FAULT PORT FOLDER`.

`early` acknowledges before it is durable: only copies that it makes now and then outlive a kill,
and of these only one that lacks the newest events, for a kill may come right after a copy.
`last` loses the last commit of each conversation.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

import anyio
from typer.testing import CliRunner

from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.journals.transfer import export_lines, import_lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "torture_me.py"
COPY_EVERY_S = 0.5
EVENTS_LOST_MIN = 10
"""The newest events may be known to no client yet."""


def oldest_first(folder: Path, pattern: str) -> Sequence[Path]:
    return sorted(folder.glob(pattern), key=lambda path: int(path.stem.partition("-")[2]))


def newest(folder: Path, pattern: str) -> Path | None:
    return next(reversed(oldest_first(folder, pattern)), None)


def newest_copy(folder: Path, before: Path) -> Path | None:
    """Return the newest copy of the journal that lacks its newest events."""
    found = [
        copy
        for copy in oldest_first(folder, "copy-*.db")
        if events_in(copy) <= events_in(before) - EVENTS_LOST_MIN
    ]
    return found[-1] if found else None


def events_in(db: Path) -> int:
    with closing(sqlite3.connect(db)) as connection:
        (events,) = connection.execute("SELECT count(*) FROM event").fetchone()
    return int(events)


def keep_copying(db: Path, folder: Path) -> None:
    """Copy the journal now and then."""
    for number in count():
        time.sleep(COPY_EVERY_S)
        if not db.exists():
            continue
        half = folder / "half"
        with sqlite3.connect(db) as source, sqlite3.connect(half) as copy:
            source.backup(copy)
        copy.close()
        source.close()
        half.rename(folder / f"copy-{time.time_ns() + number}.db")


async def without_the_last(before: Path, after: Path) -> None:
    """Copy all conversations, each without its last event."""
    async with SQLiteJournal(before) as source, SQLiteJournal(after) as target:
        lines = [json.loads(line) async for line in export_lines(source)]
        head = 0
        for line in lines:
            if "conversation" in line:
                line["head"] = head = line["head"] - 1
                line["is_unfinished"] = True
            elif "seq" in line and line["seq"] > head:
                line.clear()
        await import_lines(target, [json.dumps(line) for line in lines if line])


def main() -> None:
    fault, port, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    db = folder / f"run-{time.time_ns()}.db"
    before = newest(folder, "run-*.db")
    if fault == "early":
        if before is not None and (copy := newest_copy(folder, before)) is not None:
            shutil.copy(copy, db)
        threading.Thread(target=keep_copying, args=(db, folder), daemon=True).start()
    elif before is not None:
        anyio.run(without_the_last, before, db)
    CliRunner().invoke(app, ["serve", f"{EXAMPLE}:echo", "--port", port, "--db", str(db)])


main()
