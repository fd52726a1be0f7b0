"""The blocking way in: threads without an event loop call what is async."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any, Literal

import anyio
import pytest

from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.blocking import Blocking
from turnkeeper.actors.errors import ConversationNotFound, InvalidInput
from turnkeeper.runtime import DaemonThreads

Backend = Literal["asyncio", "trio"]


@agent
async def echo(turn: TurnContext) -> str:
    return f"a({turn.message.content})"


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401 - a Backend
    return request.param


@pytest.fixture
def conversations() -> Conversations:
    return Conversations(echo, journal=MemoryJournal())


@pytest.fixture
def call(conversations: Conversations, backend: Backend) -> Iterator[Blocking]:
    with Blocking(conversations, backend=backend) as opened:
        yield opened


def test_a_script_sends_reads_and_finds_it_again(tmp_path: Path, backend: Backend) -> None:
    for expected in (4, 8):
        opened = Conversations(echo, journal=SQLiteJournal(tmp_path / "chats.db"))
        with Blocking(opened, backend=backend) as call:
            chat = opened["alice"]
            turn = call(chat.send, "Hello")
            assert call.within(30, turn.reply) == "a(Hello)"
            log = [logged.seq for logged in call.iterate(chat.events, live=False)]
            assert log == list(range(1, expected + 1))


def test_many_threads_share_one(call: Blocking, conversations: Conversations) -> None:
    def talk(n: int) -> str:
        return call(call(conversations[f"c{n % 3}"].send, f"{n}").reply)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(talk, range(40))) == [f"a({n})" for n in range(40)]


def test_a_live_iteration_gets_what_another_thread_sends(
    call: Blocking, conversations: Conversations
) -> None:
    chat = conversations["c"]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(lambda: call(call(chat.send, "A").reply))
        kinds = []
        for logged in call.iterate(chat.events):
            kinds.append(logged.event.kind)
            if kinds[-1] == "turn_ended":
                break
        assert sent.result() == "a(A)"
    assert kinds[:2] == ["turn_started", "user_message"]


def test_errors_come_out_as_they_are(call: Blocking, conversations: Conversations) -> None:
    with pytest.raises(ConversationNotFound):
        call(conversations["c"].at)
    with pytest.raises(ConversationNotFound):
        list(call.iterate(conversations["c"].events, live=False))


@pytest.mark.parametrize("error", [LookupError("its own"), SystemExit(3), KeyboardInterrupt()])
def test_any_error_of_a_function_reaches_the_caller_and_the_loop_goes_on(
    call: Blocking, conversations: Conversations, error: BaseException
) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        call(fail)
    assert raised.value is error
    assert call(call(conversations["c"].send, "A").reply) == "a(A)"


def test_a_function_sees_the_context_variables_of_its_caller(backend: Backend) -> None:
    """Tracing relies on it. The caller may be in a thread of another kind of loop."""
    variable: ContextVar[str] = ContextVar("variable", default="default")

    async def read() -> str:
        with anyio.move_on_after(60):  # finds out which loop it is in
            await anyio.lowlevel.checkpoint()
        return variable.get()

    async def ask(call: Blocking) -> str:
        variable.set("the caller's")
        return await DaemonThreads()(lambda: call(read))

    with Blocking(Conversations(echo, journal=MemoryJournal()), backend=backend) as call:
        for of_the_caller in ("asyncio", "trio"):
            assert anyio.run(ask, call, backend=of_the_caller) == "the caller's"
        assert call(read) == "default"


def test_a_wait_ends_at_its_bound_and_the_turn_goes_on(backend: Backend) -> None:
    go_on = threading.Event()

    @agent
    async def slow(turn: TurnContext) -> str:
        await turn.ports.blocking(go_on.wait)
        return "done"

    opened = Conversations(slow, journal=MemoryJournal())
    with Blocking(opened, backend=backend) as call:
        turn = call(opened["c"].send, "A")
        with pytest.raises(TimeoutError):
            call.within(0.01, turn.reply)
        go_on.set()
        assert call(turn.reply) == "done"


@pytest.mark.usefixtures("_interrupted_by_ctrl_c")
def test_ctrl_c_cancels_the_wait(call: Blocking) -> None:
    cancelled = threading.Event()
    caller = threading.get_ident()

    def is_waiting() -> bool:
        """True once the calling thread waits for its result: nothing else gets the interrupt."""
        called = (frame.f_code.co_name for frame, _ in walk_stack(sys._current_frames()[caller]))
        return list(islice(called, 2)) == ["wait", "call"]

    async def wait() -> None:
        try:
            while not is_waiting():
                await anyio.lowlevel.checkpoint()
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        call(wait)
    assert cancelled.wait(60)


def test_a_call_in_its_own_loop_is_refused(backend: Backend) -> None:
    errors: list[str] = []

    @agent
    async def calling(turn: TurnContext) -> str:
        try:
            call(opened["other"].send, turn.message.content)
        except RuntimeError as error:
            errors.append(str(error))
        return "a"

    opened = Conversations(calling, journal=MemoryJournal())
    with Blocking(opened, backend=backend) as call:
        call(call(opened["c"].send, "A").reply)
    assert ["its own event loop" in error for error in errors] == [True]


def test_a_call_is_refused_outside_of_the_block_and_in_a_forked_process(
    conversations: Conversations, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Blocking(conversations, backend=backend)
    with pytest.raises(RuntimeError, match=r"not open|are closed"):
        call(conversations["c"].exists)
    with call:
        process = os.getpid()
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: process + 1)
            with pytest.raises(RuntimeError, match="after the fork"):
                call(conversations["c"].exists)
        assert not call(conversations["c"].exists)
    with pytest.raises(RuntimeError, match=r"not open|are closed"):
        call(conversations["c"].exists)


def test_leaving_the_block_in_a_forked_process_does_not_wait_for_the_other_ones_thread(
    conversations: Conversations, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Blocking(conversations, backend=backend) as call:
        process = os.getpid()
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: process + 1)
            call.__exit__(None, None, None)
        assert threading.active_count() > 1, "its own process still has the thread"


def test_a_block_that_is_open_refuses_to_be_entered_again_and_goes_on(
    conversations: Conversations, backend: Backend
) -> None:
    with Blocking(conversations, backend=backend) as call:
        with pytest.raises(RuntimeError, match="entered already"):
            call.__enter__()
        assert not call(conversations["c"].exists)


def test_a_call_that_is_about_to_begin_as_the_block_is_left_ends(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have come to a loop that had ended, and nothing would have answered it."""
    opened = Blocking(Conversations(echo, journal=MemoryJournal()), backend=backend)
    with ThreadPoolExecutor(1) as threads:
        with opened as call:
            assert call._loop is not None
            calls, begins = call._loop.calls, threading.Event()
            loop_thread = next(t for t in threading.enumerate() if t.ident == call._loop.ident)
            begin = calls._call_soon

            def begin_late(function: Callable[[], None]) -> None:
                begins.set()
                loop_thread.join(60)
                begin(function)

            monkeypatch.setattr(calls, "_call_soon", begin_late)
            late = threads.submit(call, partial(anyio.sleep, 0))
            assert begins.wait(60)
        with pytest.raises(RuntimeError, match="takes no more calls; nothing was done"):
            late.result(60)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupt_at_any_step_of_a_call_leaves_a_loop_that_answers(backend: Backend) -> None:
    """With a `concurrent.futures.Future`, one in some hundred hung the loop for good."""
    interrupt("calls", backend)


@pytest.mark.parametrize(
    ("what", "backend"), [("opening", "asyncio"), ("opening", "trio"), ("states", "asyncio")]
)
def test_an_interrupt_at_any_step_of_an_opening_leaves_no_thread(
    what: str, backend: Backend
) -> None:
    interrupt(what, backend)


def interrupt(what: str, backend: Backend) -> None:
    """Run the program in a process of its own, since a loop that hangs cannot be ended."""
    program = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("interrupted.py")), what, backend],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    assert re.fullmatch(r"interrupted at [1-9][0-9]{2,} steps, and left\n", program.stdout)


def test_a_journal_that_cannot_be_opened_leaves_no_thread(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "chats.db").write_text("no database, but a text of some length" * 100)
    before = set(threading.enumerate())
    opened = Conversations(echo, journal=SQLiteJournal(tmp_path / "chats.db"))
    with pytest.raises(Exception, match=r"chats\.db"), Blocking(opened, backend=backend):
        raise AssertionError
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread


@pytest.mark.filterwarnings("error")
def test_a_call_of_something_else_is_refused_with_how_to_write_it(
    conversations: Conversations,
) -> None:
    given: Any = echo
    with pytest.raises(InvalidInput, match="conversations is a FunctionAgent"):
        Blocking(given)
    with pytest.raises(InvalidInput, match='it takes "asyncio" or "trio"'):
        Blocking(conversations, backend="curio")  # type: ignore[arg-type]
    with Blocking(conversations) as opened:
        call: Any = opened
        chat = conversations["c"]
        with pytest.raises(TypeError, match=r"as in call\(chat\.send, text\)"):
            call(chat.send("hello"))
        with pytest.raises(TypeError, match=r"as in call\(chat\.send, text\)"):
            call.within(5, "send")
        with pytest.raises(TypeError, match="within takes seconds first"):
            call.within(chat.exists, 5)
        for seconds in (-1, float("nan")):
            with pytest.raises(InvalidInput, match="seconds; it takes 0 or more"):
                call.within(seconds, chat.exists)
        with pytest.raises(TypeError, match="the function is not async"):
            call(chat.events)
        with pytest.raises(TypeError, match="a method that returns an async iterator"):
            next(call.iterate(chat.send, "hello"))
        assert not call(chat.exists)
