"""A server that forgets when it is killed: `forgetful_server.py FAULT PORT FOLDER`.

`early` acknowledges before it is durable: only copies that it makes now and then outlive a kill.
`last` loses the last commit of each conversation.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import threading
import time
from itertools import count
from pathlib import Path

import anyio
from typer.testing import CliRunner

from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.journals.transfer import export_lines, import_lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "torture_me.py"
COPY_EVERY_S = 0.5


def newest(folder: Path, pattern: str) -> Path | None:
    found = sorted(folder.glob(pattern), key=lambda path: int(path.stem.partition("-")[2]))
    return found[-1] if found else None


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
    if fault == "early":
        copy = newest(folder, "copy-*.db")
        if copy is not None:
            shutil.copy(copy, db)
        threading.Thread(target=keep_copying, args=(db, folder), daemon=True).start()
    elif (before := newest(folder, "run-*.db")) is not None:
        anyio.run(without_the_last, before, db)
    CliRunner().invoke(app, ["serve", f"{EXAMPLE}:echo", "--port", port, "--db", str(db)])


main()
