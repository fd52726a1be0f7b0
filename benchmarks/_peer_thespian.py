"""Thespian: tell, and ask one after another. Run by `runtime.py` in an environment of its own."""

import json
import sys
from time import perf_counter, process_time

from thespian.actors import Actor, ActorSystem  # type: ignore[import-not-found]


class Echo(Actor):  # type: ignore[misc]  # of a package that is not here
    def receiveMessage(self, message: object, sender: object) -> None:  # noqa: N802 - its own name
        if message != "message":
            self.send(sender, 1)


def main() -> None:
    tells, asks = int(sys.argv[1]), int(sys.argv[2])
    # Its quickest system: all actors in this process, and in the caller's thread.
    system = ActorSystem("simpleSystemBase")
    echo = system.createActor(Echo)
    for _ in range(50):
        system.ask(echo, "ask", 5)
    began, cpu = perf_counter(), process_time()
    for _ in range(tells):
        system.tell(echo, "message")
    system.ask(echo, "ask", 5)
    tell, tell_cpu = (perf_counter() - began) / tells, (process_time() - cpu) / tells
    began, cpu = perf_counter(), process_time()
    for _ in range(asks):
        system.ask(echo, "ask", 5)
    ask, ask_cpu = (perf_counter() - began) / asks, (process_time() - cpu) / asks
    system.shutdown()
    found = {"tell": tell, "tell_cpu": tell_cpu, "ask": ask, "ask_cpu": ask_cpu}
    print(json.dumps({name: seconds * 1e6 for name, seconds in found.items()}))


main()
