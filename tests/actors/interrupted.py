"""A program whose calls are interrupted, each at another opcode. Run by `test_blocking.py`.

An interrupt as of Ctrl-C is raised at every opcode that the calling thread runs, in one call after
the other. Opcodes of the loops' own libraries are left out: a real interrupt comes between fewer of
them, and their locks hold against it.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from turnkeeper.actors import Conversations, MemoryJournal, TurnContext, agent
from turnkeeper.actors.blocking import Blocking

STEPS_MAX = 5000


@agent
async def echo(turn: TurnContext) -> str:
    return f"a({turn.message.content})"


async def five() -> int:
    return 5


def interrupt_at(step: int, call: Callable[[], object]) -> bool:
    """Call; return True if there was such a step, and False if the call ended before it."""
    left = step

    # Any: what each kind of event has with it.
    def trace(frame: FrameType, kind: str, _: Any) -> Any:  # noqa: ANN401
        nonlocal left
        if any(f"/{name}/" in frame.f_code.co_filename for name in ("asyncio", "trio")):
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        sys.settrace(None)
        return True
    finally:
        sys.settrace(None)
    return left <= 0


def main(backend: Any) -> None:  # noqa: ANN401 - a name of one, from the command line
    step = 1
    with Blocking(Conversations(echo, journal=MemoryJournal()), backend=backend) as call:
        while interrupt_at(step, lambda: call(five)):
            faulthandler.dump_traceback_later(100, exit=True)  # anew for each step
            assert call(five) == 5
            step += 1
            assert step < STEPS_MAX
    sys.stdout.write(f"interrupted at {step - 1} steps, and left\n")


if __name__ == "__main__":
    main(sys.argv[1])
