"""Pykka: tell, and ask one after another. Run by `runtime.py` in an environment of its own."""

import json
import sys
from time import perf_counter, process_time

import pykka


class Echo(pykka.ThreadingActor):
    def on_receive(self, message: object) -> int:
        del message
        return 1


def main() -> None:
    tells, asks = int(sys.argv[1]), int(sys.argv[2])
    ref = Echo.start()
    ref.ask("warm")
    began, cpu = perf_counter(), process_time()
    for _ in range(tells):
        ref.tell("message")
    ref.ask("last")
    tell, tell_cpu = (perf_counter() - began) / tells, (process_time() - cpu) / tells
    began, cpu = perf_counter(), process_time()
    for _ in range(asks):
        ref.ask("message")
    ask, ask_cpu = (perf_counter() - began) / asks, (process_time() - cpu) / asks
    ref.stop()
    found = {"tell": tell, "tell_cpu": tell_cpu, "ask": ask, "ask_cpu": ask_cpu}
    print(json.dumps({name: seconds * 1e6 for name, seconds in found.items()}))


main()
