"""OpenAI Agents SDK sessions: one item at a time, into one conversation and into many.

Run by `journal.py` in an environment of its own. Usage: python _peer_agents_sdk.py ITEM_BYTES
SECONDS MANY LENGTH…. Prints one JSON object: items a second by case, and the processor's time of an
item, in µs, as `…_cpu`. With 0 for MANY, only one conversation is asked for.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from agents import SQLiteSession
from agents.extensions.memory import AsyncSQLiteSession

PAGE = 500


def item(size: int) -> dict[str, str]:
    return {"role": "user", "content": "x" * (size - 40)}


async def lengths_of(
    session: Any,  # noqa: ANN401 - of a package that is not here
    size: int,
    seconds: float,
    lengths: list[int],
) -> dict[str, float]:
    found = {}
    held = 0
    for length in lengths:
        while held < length:
            await session.add_items([item(size)] * min(PAGE, length - held))
            held += min(PAGE, length - held)
        began, cpu = perf_counter(), process_time()
        count = 0
        while count < 10 or perf_counter() - began < seconds:
            await session.add_items([item(size)])
            count += 1
        found[f"at_{length}"] = count / (perf_counter() - began)
        found[f"at_{length}_cpu"] = (process_time() - cpu) / count * 1e6
        held += count
    return found


async def many(sessions: list[Any], size: int, each: int, together: int) -> tuple[float, int]:
    """Return the items a second of sessions that write at once, and how many items failed.

    Each call adds this many items.
    """
    failed = 0

    async def write(session: Any) -> None:  # noqa: ANN401
        nonlocal failed
        for _ in range(each):
            try:
                await session.add_items([item(size)] * together)
            except Exception as error:
                if "locked" not in str(error):
                    raise
                failed += together

    began = perf_counter()
    await asyncio.gather(*(write(session) for session in sessions))
    return (len(sessions) * each * together - failed) / (perf_counter() - began), failed


async def main(size: int, seconds: float, count: int, lengths: list[int]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        session = SQLiteSession("c", Path(folder) / "one.db")
        found = await lengths_of(session, size, seconds, lengths)
        session.close()
        for together, case in ((1, "many"), (4, "four")) if count else ():
            shared = Path(folder) / f"{case}.db"
            sessions = [SQLiteSession(f"c{number}", shared) for number in range(count)]
            found[case], found[f"{case}_failed"] = await many(sessions, size, 5, together)
            for session in sessions:
                session.close()
            path = Path(folder) / f"{case}-async.db"
            waiting = [AsyncSQLiteSession(f"c{number}", path) for number in range(min(count, 50))]
            speed, failed = await many(waiting, size, 5, together)
            found[f"{case}_async"], found[f"{case}_async_failed"] = speed, failed
            for one in waiting:
                await one.close()
    return found


if __name__ == "__main__":
    size, seconds, count, *lengths = sys.argv[1:]
    print(
        json.dumps(
            asyncio.run(main(int(size), float(seconds), int(count), [int(n) for n in lengths]))
        )
    )
