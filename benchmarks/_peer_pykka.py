"""Pykka: tell, and ask one after another. Run by `runtime.py` in an environment of its own."""

import json
import sys
from time import perf_counter

import pykka


class Echo(pykka.ThreadingActor):
    def on_receive(self, message: object) -> int:
        del message
        return 1


def main() -> None:
    tells, asks = int(sys.argv[1]), int(sys.argv[2])
    ref = Echo.start()
    ref.ask("warm")
    began = perf_counter()
    for _ in range(tells):
        ref.tell("message")
    ref.ask("last")
    tell = (perf_counter() - began) / tells
    began = perf_counter()
    for _ in range(asks):
        ref.ask("message")
    ask = (perf_counter() - began) / asks
    ref.stop()
    print(json.dumps({"tell": tell * 1e6, "ask": ask * 1e6}))


main()
