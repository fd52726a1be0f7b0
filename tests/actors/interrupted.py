"""A program whose calls are interrupted, each at another opcode. Run by `test_blocking.py`.

An interrupt as of Ctrl-C is raised at every opcode that the calling thread runs, in one call after
the other. Opcodes of the loops' own libraries are left out: a real interrupt comes between fewer of
them, and their locks hold against it. If it is the opening that is interrupted, only the opcodes of
the modules that open and of the hand-over to the thread count, without those at which no real
interrupt comes: the return from a function, and those of a `with` that takes and frees a lock of C.
"""

from __future__ import annotations

import dis
import faulthandler
import linecache
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

from turnkeeper.actors import Conversations, MemoryJournal, TurnContext, agent
from turnkeeper.actors import blocking as blocking_module
from turnkeeper.actors.blocking import Blocking
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journals.sqlite import state as state_module
from turnkeeper.actors.journals.sqlite.state import ConversationState
from turnkeeper.runtime import _portal as portal_module

STEPS_MAX = 5000
HANGS_S = 100
OPENING_FILES = {blocking_module.__file__, state_module.__file__, portal_module.__file__}


@agent
async def echo(turn: TurnContext) -> str:
    return f"a({turn.message.content})"


async def five() -> int:
    return 5


def is_safe(frame: FrameType) -> bool:
    """True if no real interrupt comes before the next opcode."""
    opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return opcode.startswith("RETURN") or "_lock:" in line


def interrupt_at(step: int, call: Callable[[], object], files: Collection[str | None] = ()) -> bool:
    """Call; return True if there was such a step, and False if the call ended before it.

    Only the opcodes of `files` count, if there are any.
    """
    left = step

    # Any: what each kind of event has with it.
    def trace(frame: FrameType, kind: str, _: Any) -> Any:  # noqa: ANN401
        nonlocal left
        file = frame.f_code.co_filename
        if any(f"/{name}/" in file for name in ("asyncio", "trio")):
            return None
        if files and file not in files:
            return trace
        frame.f_trace_opcodes = True
        if kind == "opcode" and not (files and is_safe(frame)):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    # Until 3.12.4, a trace gets opcodes only if a frame asked for them before it was set.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        sys.settrace(None)
        return True
    finally:
        sys.settrace(None)
    return left <= 0


def interrupt_openings(open_one: Callable[[], Callable[[], None]], *, every: int = 1) -> int:
    """Interrupt an opening at each of its steps, or at one in so many; return their number.

    `open_one` returns how to close what it has opened.
    """
    step = 1
    before = threading.active_count()
    while True:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        close = None

        def open_it() -> None:
            nonlocal close
            close = open_one()

        is_interrupted = interrupt_at(step, open_it, OPENING_FILES)
        if close is not None:
            close()
        while threading.active_count() > before:
            threading.enumerate()[-1].join()  # of one that is not closed, for ever
        if not is_interrupted:
            return (step - 1) // every
        step += every
        assert step < STEPS_MAX


def open_blocking(backend: Any) -> Callable[[], None]:  # noqa: ANN401 - as below
    call = Blocking(Conversations(echo, journal=MemoryJournal()), backend=backend)
    call.__enter__()
    return call.__exit__


def open_state(folder: Path) -> Callable[[], None]:
    return ConversationState(persistence_dir=folder, conversation_id="c").close


def interrupt_states() -> int:
    with tempfile.TemporaryDirectory() as folder:
        with ConversationState(persistence_dir=folder, conversation_id="c") as state:
            state.append_event(UserMessageEvent(content="A"))
        steps = interrupt_openings(lambda: open_state(Path(folder)), every=7)
        with ConversationState.load(folder, "c") as state:
            assert state.seq == 1
    assert not state_module._in_use
    return steps


def interrupt_calls(backend: Any) -> int:  # noqa: ANN401 - as below
    step = 1
    with Blocking(Conversations(echo, journal=MemoryJournal()), backend=backend) as call:
        while interrupt_at(step, lambda: call(five)):
            faulthandler.dump_traceback_later(HANGS_S, exit=True)  # anew for each step
            assert call(five) == 5
            step += 1
            assert step < STEPS_MAX
    return step - 1


def main(what: str, backend: Any) -> None:  # noqa: ANN401 - a name of one, from the command line
    match what:
        case "calls":
            steps = interrupt_calls(backend)
        case "opening":
            steps = interrupt_openings(lambda: open_blocking(backend))
        case _:
            steps = interrupt_states()
    sys.stdout.write(f"interrupted at {steps} steps, and left\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
