"""python eventsourcing over SQLite: one event at a time, into one conversation and into many.

Run by `journal.py` in an environment of its own. Usage: python _peer_eventsourcing.py ITEM_BYTES
SECONDS MANY LENGTH…. Prints one JSON object: events a second by case, and the processor's time of
an event, in µs, as `…_cpu`.
"""

import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from eventsourcing.application import Application  # type: ignore[import-not-found]
from eventsourcing.domain import Aggregate, event  # type: ignore[import-not-found]

PAGE = 500


class Conversation(Aggregate):  # type: ignore[misc]  # of a package that is not here
    """A conversation: an aggregate that keeps how many messages it has."""

    @event("Begun")  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        self.messages = 0

    @event("Said")  # type: ignore[untyped-decorator]
    def say(self, content: str) -> None:  # noqa: ARG002 - it is in the event
        """Take a message."""
        self.messages += 1


def open_application(path: Path) -> Application:
    """Open an application over a file; its events are committed as SQLite does by default."""
    return Application(
        env={"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(path)}
    )


def rates_at(path: Path, text: str, seconds: float, lengths: list[int]) -> dict[str, float]:
    found = {}
    application = open_application(path)
    conversation = Conversation()
    application.save(conversation)
    for length in lengths:
        while conversation.messages < length:
            for _ in range(min(PAGE, length - conversation.messages)):
                conversation.say(text)
            application.save(conversation)
        began, cpu = perf_counter(), process_time()
        count = 0
        while count < 10 or perf_counter() - began < seconds:
            conversation.say(text)
            application.save(conversation)
            count += 1
        found[f"at_{length}"] = count / (perf_counter() - began)
        found[f"at_{length}_cpu"] = (process_time() - cpu) / count * 1e6
    application.close()
    return found


def rate_of_many(path: Path, text: str, many: int, each: int, together: int) -> float:
    """Return the events a second of conversations that take turns: its calls do not wait.

    Each call of `save` stores this many events.
    """
    application = open_application(path)
    conversations = [Conversation() for _ in range(many)]
    application.save(*conversations)
    began = perf_counter()
    for _ in range(each):
        for conversation in conversations:
            for _ in range(together):
                conversation.say(text)
            application.save(conversation)
    rate = many * each * together / (perf_counter() - began)
    application.close()
    return rate


def main(size: int, seconds: float, many: int, lengths: list[int]) -> dict[str, float]:
    text = "x" * (size - 150)
    with tempfile.TemporaryDirectory() as folder:
        found = rates_at(Path(folder) / "one.db", text, seconds, lengths)
        for together, case in ((1, "many"), (4, "four")):
            path = Path(folder) / f"{case}.db"
            found[case] = rate_of_many(path, text, many, 5, together)
    return found


if __name__ == "__main__":
    size, seconds, many, *lengths = sys.argv[1:]
    print(json.dumps(main(int(size), float(seconds), int(many), [int(n) for n in lengths])))
