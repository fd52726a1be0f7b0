"""OpenAI Agents SDK sessions: one item at a time, into one conversation and into many.

Run by `journal.py` in an environment of its own. Usage: python _peer_agents_sdk.py ITEM_BYTES
SECONDS MANY LENGTH…. Prints one JSON object: items a second by case.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from agents import SQLiteSession
from agents.extensions.memory import AsyncSQLiteSession

PAGE = 500


def item(size: int) -> dict[str, str]:
    return {"role": "user", "content": "x" * (size - 40)}


async def rate(add: Callable[[int], Awaitable[object]], seconds: float) -> float:
    """Return the calls a second, over about this time and at least ten calls."""
    began = perf_counter()
    count = 0
    while count < 10 or perf_counter() - began < seconds:
        await add(count)
        count += 1
    return count / (perf_counter() - began)


async def lengths_of(session: Any, size: int, seconds: float, lengths: list[int]) -> list[float]:  # noqa: ANN401
    found = []
    held = 0
    for length in lengths:
        while held < length:
            await session.add_items([item(size)] * min(PAGE, length - held))
            held += min(PAGE, length - held)
        began = perf_counter()
        count = 0
        while count < 10 or perf_counter() - began < seconds:
            await session.add_items([item(size)])
            count += 1
        found.append(count / (perf_counter() - began))
        held += count
    return found


async def many(sessions: list[Any], size: int, each: int) -> tuple[float, int]:
    """Return the items a second of sessions that write at once, and how many items failed."""
    failed = 0

    async def write(session: Any) -> None:  # noqa: ANN401
        nonlocal failed
        for _ in range(each):
            try:
                await session.add_items([item(size)])
            except Exception as error:
                if "locked" not in str(error):
                    raise
                failed += 1

    began = perf_counter()
    await asyncio.gather(*(write(session) for session in sessions))
    return (len(sessions) * each - failed) / (perf_counter() - began), failed


async def main(size: int, seconds: float, count: int, lengths: list[int]) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        session = SQLiteSession("c", Path(folder) / "one.db")
        for length, speed in zip(
            lengths, await lengths_of(session, size, seconds, lengths), strict=True
        ):
            found[f"at_{length}"] = speed
        session.close()
        shared = Path(folder) / "many.db"
        sessions = [SQLiteSession(f"c{number}", shared) for number in range(count)]
        found["many"], found["many_failed"] = await many(sessions, size, 5)
        for session in sessions:
            session.close()
        path = Path(folder) / "async.db"
        waiting = [AsyncSQLiteSession(f"c{number}", path) for number in range(min(count, 50))]
        found["many_async"], found["many_async_failed"] = await many(waiting, size, 5)
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
