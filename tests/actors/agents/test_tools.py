"""Tools: what a model is told of a function, and what becomes of each call that it makes."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, JsonValue

from tests.actors.conversations.worlds import log_of, verified
from turnkeeper.actors import (
    Conversation,
    FrozenObject,
    MemoryJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    Tools,
    ToolSpec,
    TurnContext,
    agent,
    tool,
)
from turnkeeper.actors.agents.tools import RESULT_LENGTH_MIN, FunctionTool, Tool
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import ActionEvent, AgentErrorEvent, ObservationEvent
from turnkeeper.runtime import DaemonThreads, Ports
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio

Result = ObservationEvent | AgentErrorEvent


@asynccontextmanager
async def calling(
    tools: Tools, *calls: ToolCall, ports: Ports | None = None
) -> AsyncIterator[Callable[[], Awaitable[Sequence[Result]]]]:
    """One turn that makes these calls; what is given waits for their results, in call order."""

    @agent
    async def caller(turn: TurnContext) -> None:
        await turn.call_tools(calls, tools.runner(turn))
        await turn.say("done")

    async with verified(caller, journal=MemoryJournal(), ports=ports) as conversations:
        chat = conversations["c"]
        turn = await chat.send("go")

        async def results() -> Sequence[Result]:
            await turn.reply()
            return await results_of(chat)

        yield results


async def results_of(chat: Conversation) -> Sequence[Result]:
    """The results in the log, in the order of their calls."""
    events = [logged.event async for logged in chat.events(live=False)]
    results = {
        event.tool_call_id: event
        for event in events
        if isinstance(event, ObservationEvent | AgentErrorEvent)
    }
    return [results[event.tool_call_id] for event in events if isinstance(event, ActionEvent)]


async def call(tools: Tools, *calls: ToolCall, ports: Ports | None = None) -> Sequence[Result]:
    """The results of these calls, made side by side."""
    async with calling(tools, *calls, ports=ports) as results:
        return await results()


# --- what a model is told ------------------------------------------------------------------------


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


class Item(BaseModel):
    name: str
    count: int = 1


@tool(timeout_s=5, idempotent=True)
def order(
    items: list[Item],
    size: Annotated[Size, Field(description="of the box")] = Size.SMALL,
    *,
    by: date | None = None,
    context: ToolContext,
) -> str:
    """Order something.

    It comes in a box.
    """
    return f"{items} {size} {by} {context}"


def test_a_model_is_told_of_a_tool_what_its_signature_and_its_docstring_say() -> None:
    item = {
        "properties": {"name": {"type": "string"}, "count": {"type": "integer", "default": 1}},
        "required": ["name"],
        "title": "Item",
        "type": "object",
    }
    size = {"enum": ["small", "large"], "title": "Size", "type": "string"}
    parameters = {
        "$defs": {"Item": item, "Size": size},
        "additionalProperties": False,
        "properties": {
            "items": {"items": {"$ref": "#/$defs/Item"}, "type": "array"},
            "size": {"$ref": "#/$defs/Size", "default": "small", "description": "of the box"},
            "by": {
                "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
                "default": None,
            },
        },
        "required": ["items"],
        "type": "object",
    }
    assert Tools(order).specs == (
        ToolSpec(
            "order",
            "Order something.\n\nIt comes in a box.",
            FrozenObject(parameters),
        ),
    )


def test_a_tool_is_still_the_function_that_it_was_made_of() -> None:
    @tool
    def double(n: int) -> int:
        return 2 * n

    assert double(4) == 8
    assert double.name == "double"
    assert not double.is_idempotent


def test_parameters_may_have_names_that_a_model_class_may_not() -> None:
    def odd(model_config: int, _private: int, copy: int, json: int, argument_0: int) -> None: ...

    read = FunctionTool(odd).read_arguments(
        {"model_config": 1, "_private": 2, "copy": 3, "json": 4, "argument_0": 5}
    )
    assert read == {"model_config": 1, "_private": 2, "copy": 3, "json": 4, "argument_0": 5}


def untyped(at) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the case


def many(*at: int) -> None: ...


def named(**at: int) -> None: ...


def positional(at: int, /) -> None: ...


def unknown_type(at: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - that is the case


def no_schema(at: threading.Event) -> None: ...


def fine(at: int = 1) -> None: ...


async def yields(at: int) -> AsyncIterator[int]:
    yield at


async def yields_any(arguments: object, context: object) -> AsyncIterator[int]:
    yield 1


class Yielding:
    __name__ = "yields"

    async def __call__(self, at: int) -> AsyncIterator[int]:
        yield at


def yields_behind_it(at: int) -> AsyncIterator[int]:
    """Hide the other, as a decorator does."""
    return yields(at)


def nämed(at: int) -> None: ...  # noqa: PLC2401 - that is the case


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: FunctionTool(untyped), "no type"),
        (lambda: FunctionTool(many), "cannot be given by name, as models do"),
        (lambda: FunctionTool(named), "cannot be given by name, as models do"),
        (lambda: FunctionTool(positional), "cannot be given by name, as models do"),
        (lambda: FunctionTool(unknown_type), "types cannot be read"),
        (lambda: FunctionTool(no_schema), "no JSON schema"),
        (lambda: FunctionTool(yields), "tool yields: it yields; an async tool returns its result"),
        (lambda: FunctionTool(Yielding()), "it yields; an async tool returns its result"),
        (lambda: Tool("yields", "", {}, yields_any), "it yields; an async tool returns its result"),
        (lambda: FunctionTool(partial(fine, 1)), "a name"),
        (lambda: FunctionTool(nämed), "letters, digits"),
        (lambda: FunctionTool(lambda: None), "letters, digits"),
        (lambda: FunctionTool(fine, timeout_s=0), "timeout_s is 0"),
        (lambda: FunctionTool(fine, timeout_s=float("inf")), "timeout_s is inf"),
        (lambda: Tools(fine, tool(fine)), "two tools"),
        (lambda: Tools(calls_at_once_max=0), "calls_at_once_max is 0"),
        (lambda: Tools(result_length_max=RESULT_LENGTH_MIN - 1), "result_length_max is"),
    ],
)
def test_what_no_model_could_call_is_refused_when_it_is_made(
    make: Callable[[], object], found: str
) -> None:
    with pytest.raises(InvalidInput, match=found):
        make()


def test_a_default_that_is_no_json_is_the_functions_own_affair() -> None:
    marker = threading.Event()

    def wait(event: Annotated[object, Field(description="any")] = marker) -> None: ...

    made = FunctionTool(wait)
    assert made.read_arguments({}) == {}
    assert "required" not in made.spec.parameters


# --- arguments -----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_a_tool_sees_the_json_that_the_model_wrote_and_may_change_it(written: JsonValue) -> None:
    def keep(value: JsonValue) -> None: ...

    read = FunctionTool(keep).read_arguments(FrozenObject({"value": written}))

    assert read == {"value": written}
    assert type(read["value"]) is type(written)


def test_arguments_are_read_as_pydantic_reads_json() -> None:
    def take(
        n: int, sizes: set[Size], item: Item, pair: tuple[int, str], days: dict[int, date]
    ) -> None: ...

    read = FunctionTool(take).read_arguments(
        FrozenObject(
            {
                "n": "3",
                "sizes": ["large"],
                "item": {"name": "pen"},
                "pair": [1, "a"],
                "days": {"7": "2026-01-02"},
            }
        )
    )
    assert read == {
        "n": 3,
        "sizes": {Size.LARGE},
        "item": Item(name="pen"),
        "pair": (1, "a"),
        "days": {7: date(2026, 1, 2)},
    }


def test_what_the_model_left_out_is_left_to_the_functions_own_default() -> None:
    assert FunctionTool(fine).read_arguments({}) == {}


class Even(BaseModel):
    n: int

    def model_post_init(self, _: object, /) -> None:
        if self.n % 2:
            raise KeyError("odd")


NO_FIT = (
    "the arguments do not fit: n: Input should be a valid integer, unable to parse string as an "
    "integer; m: Extra inputs are not permitted; nothing happened"
)


async def test_calls_that_cannot_be_run_are_answered_in_place_and_the_others_run() -> None:
    ran: list[int] = []

    def note(n: int) -> str:
        ran.append(n)
        return f"noted {n}"

    def even(pair: Even) -> str:
        return str(pair)

    results = await call(
        Tools(note, even),
        ToolCall("note", {"n": 1}),
        ToolCall("erase", {"n": 2}),
        ToolCall("note", {"n": "many", "m": 1}),
        ToolCall("note", malformed_arguments='{"n": '),
        ToolCall("even", {"pair": {"n": 3}}),
        ToolCall("note", {"n": 4}),
    )

    assert sorted(ran) == [1, 4]
    assert [(result.content, getattr(result, "is_error", None)) for result in results] == [
        ("noted 1", False),
        ("there is no tool erase; there are: note, even; nothing happened", True),
        (
            NO_FIT,
            True,
        ),
        ("the arguments are not a plain JSON object; nothing happened; write them as one", True),
        ("the arguments do not fit: 'odd'; nothing happened", True),
        ("noted 4", False),
    ]


# --- running -------------------------------------------------------------------------------------

variable: ContextVar[str] = ContextVar("variable", default="unset")


async def test_sync_tools_run_in_daemon_threads_and_async_ones_where_the_turn_runs() -> None:
    def in_thread() -> list[bool]:
        here = threading.current_thread()
        return [here is threading.main_thread(), here.daemon]

    def in_generator() -> Iterator[bool]:
        here = threading.current_thread()
        yield here is threading.main_thread()
        yield here.daemon

    async def in_task() -> list[bool]:
        await anyio.lowlevel.checkpoint()
        here = threading.current_thread()
        return [here is threading.main_thread(), here.daemon]

    tools = Tools(in_thread, in_generator, in_task)
    results = await call(tools, *map(ToolCall, tools.names))

    assert [each.content for each in results] == ["[false,true]", "[false,true]", "[true,false]"]


class Method:
    """What is called like a function, and async."""

    __name__ = "method"

    async def __call__(self, n: int) -> int:
        await anyio.lowlevel.checkpoint()
        return n + 1

    async def add(self, n: int) -> int:
        await anyio.lowlevel.checkpoint()
        return n + 2


async def test_a_plain_function_that_gives_something_to_await_is_a_tool_too() -> None:
    def add(n: int) -> Awaitable[int]:
        return Method()(n)

    (result,) = await call(Tools(add), ToolCall("add", {"n": 1}))
    assert result.content == "2"


async def test_methods_and_callable_objects_are_tools_too() -> None:
    results = await call(
        Tools(Method(), Method().add), ToolCall("method", {"n": 1}), ToolCall("add", {"n": 1})
    )
    assert [result.content for result in results] == ["2", "3"]


async def test_a_tool_knows_its_call_by_an_id_that_is_in_the_log() -> None:
    seen: list[ToolContext] = []

    async def look(at: str, context: ToolContext) -> None:
        seen.append(context)

    (result,) = await call(Tools(look), ToolCall("look", {"at": "here"}))

    assert seen == [
        ToolContext(
            "c", str(result.turn_id), result.tool_call_id, "look", FrozenObject({"at": "here"})
        )
    ]


NO_JSON = (
    "the call ran, but its result cannot be written as JSON: "
    "Unable to serialize unknown type: <class '_thread.lock'>"
)


@dataclass(frozen=True)
class Point:
    x: int
    when: date


@pytest.mark.parametrize(
    ("value", "content", "is_error"),
    [
        ("as it is", "as it is", False),
        (None, "null", False),
        ({"a": [1, 2]}, '{"a":[1,2]}', False),
        (Item(name="pen"), '{"name":"pen","count":1}', False),
        ([Point(1, date(2026, 1, 2))], '[{"x":1,"when":"2026-01-02"}]', False),
        (ToolResult("not today", is_error=True), "not today", True),
        (
            threading.Lock(),
            NO_JSON,
            True,
        ),
    ],
)
async def test_what_a_tool_returns_becomes_text(
    value: object, content: str, is_error: bool
) -> None:
    async def give() -> object:
        return value

    (result,) = await call(Tools(give), ToolCall("give"))

    assert isinstance(result, ObservationEvent)
    assert (result.content, result.is_error) == (content, is_error)


@pytest.mark.parametrize("timeout_s", [None, 5])
async def test_whatever_a_tool_raises_is_its_result_and_harms_no_other_call(
    timeout_s: float | None,
) -> None:
    def fail() -> None:
        raise KeyError("inside")

    async def fail_later() -> None:
        await anyio.lowlevel.checkpoint()
        raise ExceptionGroup("several", [ValueError("one")])

    def leave() -> None:
        sys.exit(3)

    async def stop() -> None:
        raise StopAsyncIteration

    def panic() -> None:
        raise Panic("in a thread")

    async def panic_later() -> None:
        await anyio.lowlevel.checkpoint()
        raise Panic("in the loop")

    def close() -> None:
        raise GeneratorExit("in a thread")

    async def close_later() -> None:
        await anyio.lowlevel.checkpoint()
        raise GeneratorExit("in the loop")

    async def fine() -> str:
        await settle()
        return "fine"

    functions: list[Callable[[], object]] = [
        *(fail, fail_later, leave, stop, panic, panic_later, close, close_later, fine)
    ]
    tools = Tools(*(FunctionTool(function, timeout_s=timeout_s) for function in functions))
    results = await call(tools, *(ToolCall(name) for name in tools.names))

    assert [result.content for result in results] == [
        "KeyError: 'inside'",
        "ExceptionGroup: several (1 sub-exception)",
        "SystemExit: 3",
        "StopAsyncIteration: ",
        "Panic: in a thread",
        "Panic: in the loop",
        "GeneratorExit: in a thread",
        "GeneratorExit: in the loop",
        "fine",
    ]


async def cancelled() -> None:
    """Cancelled from inside, as a library does that cancels its own tasks and lets it escape."""
    raise asyncio.CancelledError("by itself")


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("made", [FunctionTool(cancelled), FunctionTool(cancelled, timeout_s=5)])
async def test_a_cancellation_that_nobody_asked_for_is_a_result_like_any_other(
    made: FunctionTool[..., object],
) -> None:
    async def fine() -> str:
        await settle()
        return "fine"

    results = await call(Tools(made, fine), ToolCall("cancelled"), ToolCall("fine"))

    assert [result.content for result in results] == ["CancelledError: by itself", "fine"]

    async def check(_: ToolContext) -> None:
        await cancelled()

    (result,) = await call(Tools(fine, before_call=check), ToolCall("fine"))
    assert result.content == (
        "refused: it could not be checked (CancelledError: by itself); nothing happened"
    )


async def test_at_most_so_many_calls_run_at_a_time() -> None:
    running, most = 0, 0

    async def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await settle()
        running -= 1

    results = await call(Tools(work, calls_at_once_max=3), *[ToolCall("work")] * 10)

    assert most == 3
    assert [result.content for result in results] == ["null"] * 10


@given(st.text(max_size=2_000), st.integers(RESULT_LENGTH_MIN, 2_000))
def test_a_result_that_is_too_long_keeps_its_head_and_its_tail(text: str, length_max: int) -> None:
    from turnkeeper.actors.agents.tools import _cut

    cut = _cut(text, length_max)

    if len(text) <= length_max:
        assert cut == text
        return
    assert len(cut) == length_max
    head, _, tail = cut.partition(
        f"\n[... cut here: the whole result has {len(text)} characters ...]\n"
    )
    assert text.startswith(head)
    assert text.endswith(tail)
    assert 0 <= len(head) - len(tail) <= 1


async def test_results_and_errors_that_are_too_long_are_cut() -> None:
    def long() -> str:
        return "x" * 100_000

    def fail() -> str:
        raise ValueError("y" * 1_000)

    results = await call(
        Tools(long, fail, result_length_max=500), ToolCall("long"), ToolCall("fail")
    )

    assert [len(result.content) for result in results] == [500, 500]
    assert "the whole result has 100000 characters" in results[0].content


# --- timeouts ------------------------------------------------------------------------------------


async def test_a_thread_that_takes_too_long_is_left_and_what_it_returns_is_dropped() -> None:
    clock, release, threads = VirtualClock(), threading.Event(), DaemonThreads()

    @tool(timeout_s=5)
    def wait() -> str:
        release.wait()
        return "late"

    ports = replace(clock.ports(), blocking=threads)
    async with calling(Tools(wait), ToolCall("wait"), ports=ports) as results:
        await clock.advance(4.9)
        assert threads.abandoned == 0
        await clock.advance(0.1)
        (result,) = await results()
        assert threads.abandoned == 1

        release.set()
        while threads.abandoned:
            await anyio.lowlevel.checkpoint()
        assert await results() == [result]

    assert isinstance(result, AgentErrorEvent)
    assert result.may_have_happened
    assert result.content == "no result within 5 s; the call may have happened, or may still happen"


async def test_an_async_tool_that_takes_too_long_is_cancelled_and_the_others_go_on() -> None:
    clock, cleaned_up, go_on = VirtualClock(), anyio.Event(), anyio.Event()

    @tool(timeout_s=5)
    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned_up.set()

    async def other() -> str:
        await go_on.wait()
        return "done"

    calls = (ToolCall("wait"), ToolCall("other"))
    async with calling(Tools(wait, other), *calls, ports=clock.ports()) as results:
        await clock.advance(5)
        assert cleaned_up.is_set()
        go_on.set()
        late, done = await results()

    assert isinstance(late, AgentErrorEvent)
    assert done.content == "done"


async def test_a_timeout_counts_from_when_the_call_starts() -> None:
    clock = VirtualClock()

    @tool(timeout_s=5)
    async def work(n: int) -> int:
        await clock.sleep(4)
        return n

    tools = Tools(work, calls_at_once_max=1)
    calls = [ToolCall("work", {"n": n}) for n in range(3)]
    async with calling(tools, *calls, ports=clock.ports()) as results:
        await clock.advance(12)
        assert [result.content for result in await results()] == ["0", "1", "2"]


async def test_a_tool_that_is_in_time_is_not_touched_by_its_timeout() -> None:
    clock = VirtualClock()

    @tool(timeout_s=5)
    async def fail() -> None:
        await clock.sleep(4)
        raise TimeoutError("its own")

    tools = Tools(fail)
    async with calling(tools, ToolCall("fail"), ports=clock.ports()) as results:
        await clock.advance(4)
        (result,) = await results()
    assert isinstance(result, ObservationEvent)
    assert result.content == "TimeoutError: its own"


async def test_past_the_bound_of_abandoned_threads_a_call_is_answered_with_an_error() -> None:
    clock, release = VirtualClock(), threading.Event()
    threads = DaemonThreads(abandoned_max=1)

    @tool(timeout_s=5)
    def wait() -> None:
        release.wait()

    ports = replace(clock.ports(), blocking=threads)
    tools = Tools(wait, calls_at_once_max=1)
    async with calling(tools, ToolCall("wait"), ToolCall("wait"), ports=ports) as results:
        await clock.advance(5)
        # On trio either of the two may start first.
        late, refused = sorted(await results(), key=lambda result: result.kind)
    release.set()

    assert isinstance(late, AgentErrorEvent)
    assert isinstance(refused, ObservationEvent)
    assert refused.is_error
    assert refused.content.startswith("TooManyThreads: blocking call not started")


# --- hooks ---------------------------------------------------------------------------------------


class Watched:
    """A tool that says when it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def look(self, at: str) -> str:
        self.ran.append(at)
        return f"seen {at}"


def no_secrets(context: ToolContext) -> str | None:
    return "that is a secret" if context.arguments["at"] == "secret" else None


async def no_secrets_async(context: ToolContext) -> str | None:
    await anyio.lowlevel.checkpoint()
    return no_secrets(context)


@pytest.mark.parametrize("check", [no_secrets, no_secrets_async])
async def test_before_call_refuses_a_call_and_lets_the_others_run(
    check: Callable[[ToolContext], Any],
) -> None:
    watched = Watched()
    results = await call(
        Tools(watched.look, before_call=check),
        ToolCall("look", {"at": "secret"}),
        ToolCall("look", {"at": "home"}),
    )

    assert watched.ran == ["home"]
    assert [(result.content, getattr(result, "is_error", None)) for result in results] == [
        ("refused: that is a secret; nothing happened", True),
        ("seen home", False),
    ]


def broken(*_: object) -> None:
    raise RuntimeError("no database")


async def broken_async(*_: object) -> None:
    raise RuntimeError("no database")


def says_no(*_: object) -> object:
    return False


def leaves(*_: object) -> None:
    sys.exit(1)


class Panic(BaseException):
    """As an extension module raises it: no `Exception`, and not the end of the program."""


def panics(*_: object) -> None:
    raise Panic("no database")


def closes(*_: object) -> None:
    raise GeneratorExit("no database")


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (broken, "RuntimeError: no database"),
        (broken_async, "RuntimeError: no database"),
        (says_no, "TypeError: before_call returned a bool"),
        (leaves, "SystemExit: 1"),
        (panics, "Panic: no database"),
        (closes, "GeneratorExit: no database"),
    ],
)
async def test_a_call_that_could_not_be_checked_does_not_run(hook: Any, found: str) -> None:  # noqa: ANN401
    watched = Watched()
    (result,) = await call(Tools(watched.look, before_call=hook), ToolCall("look", {"at": "home"}))

    assert watched.ran == []
    assert isinstance(result, ObservationEvent)
    assert result.is_error
    assert result.content == f"refused: it could not be checked ({found}); nothing happened"


async def test_after_call_replaces_a_result_or_lets_it_pass() -> None:
    async def hide(context: ToolContext, result: ToolResult) -> ToolResult | None:
        await anyio.lowlevel.checkpoint()
        return ToolResult("hidden") if context.arguments["at"] == "secret" else None

    watched = Watched()
    results = await call(
        Tools(watched.look, after_call=hide),
        ToolCall("look", {"at": "secret"}),
        ToolCall("look", {"at": "home"}),
    )
    assert [result.content for result in results] == ["hidden", "seen home"]


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (broken, "RuntimeError: no database"),
        (broken_async, "RuntimeError: no database"),
        (says_no, "TypeError: after_call returned a bool"),
        (leaves, "SystemExit: 1"),
        (panics, "Panic: no database"),
        (closes, "GeneratorExit: no database"),
    ],
)
async def test_a_result_that_could_not_be_checked_is_kept_back(hook: Any, found: str) -> None:  # noqa: ANN401
    watched = Watched()
    (result,) = await call(Tools(watched.look, after_call=hook), ToolCall("look", {"at": "home"}))

    assert watched.ran == ["home"]
    assert isinstance(result, ObservationEvent)
    assert result.is_error
    assert result.content == (
        f"the call ran, but its result could not be checked and is kept back ({found})"
    )


async def test_hooks_see_calls_that_run_and_failures_and_no_others() -> None:
    seen: list[tuple[str, str]] = []

    def before(context: ToolContext) -> None:
        seen.append(("before", context.tool_name))

    def after(context: ToolContext, result: ToolResult) -> None:
        seen.append((result.content, context.tool_name))

    def fail() -> None:
        raise KeyError("inside")

    tools = Tools(fail, before_call=before, after_call=after)
    await call(tools, ToolCall("nowhere"), ToolCall("fail", {"n": 1}), ToolCall("fail"))

    assert seen == [("before", "fail"), ("KeyError: 'inside'", "fail")]


# --- interrupts ----------------------------------------------------------------------------------


async def test_an_interrupt_waits_neither_for_a_thread_nor_for_a_tool_that_ignores_it() -> None:
    release, threads = threading.Event(), DaemonThreads()
    release_task = anyio.Event()
    has_started, is_ignoring = threading.Event(), anyio.Event()
    ended: list[str] = []

    def block() -> str:
        has_started.set()
        release.wait()
        ended.append("block")
        return "late"

    async def ignore() -> str:
        with anyio.CancelScope(shield=True):
            is_ignoring.set()
            await release_task.wait()
        ended.append("ignore")
        return "late"

    tools = Tools(block, ignore)

    @agent
    async def caller(turn: TurnContext) -> None:
        if turn.message.content == "go":
            await turn.call_tools([ToolCall("block"), ToolCall("ignore")], tools.runner(turn))
        await turn.say(f"a({turn.message.content})")

    ports = Ports(blocking=threads)
    async with verified(caller, journal=MemoryJournal(), ports=ports) as conversations:
        chat = conversations["c"]
        await chat.send("go")
        await is_ignoring.wait()
        while not has_started.is_set():
            await anyio.lowlevel.checkpoint()

        assert await (await chat.send("stop", on_overlap="interrupt")).reply() == "a(stop)"

        results = await results_of(chat)
        assert [type(result) for result in results] == [AgentErrorEvent, AgentErrorEvent]
        log = await log_of(chat)
        assert log == ["u:go", "call", "call", "no result", "no result", "u:stop", "a:a(stop)"]
        release.set()
        release_task.set()
        while threads.abandoned or len(ended) < 2:
            await anyio.lowlevel.checkpoint()
        await settle()
        assert await log_of(chat) == log


PROGRAM = """
import threading

import anyio

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ToolCall,
    Tools,
    agent,
)

started = threading.Event()


def hang() -> None:
    "Never returns."
    started.set()
    threading.Event().wait()


@agent
async def caller(turn):
    await turn.call_tools([ToolCall("hang")], Tools(hang).runner(turn))


async def main():
    async with Conversations(caller, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("go")
        while not started.is_set():
            await anyio.lowlevel.checkpoint()
        assert await turn.cancel()
    print("left")


anyio.run(main, backend="BACKEND")
print("exiting")
"""


async def test_the_program_exits_though_a_tools_thread_never_ends(
    anyio_backend_name: str,
) -> None:
    run = partial(
        subprocess.run,
        [sys.executable, "-c", PROGRAM.replace("BACKEND", anyio_backend_name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ended = await anyio.to_thread.run_sync(run)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\nexiting\n", "")


def test_the_program_on_the_page_about_tools_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    program, output, schema_tool = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)

    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (ran.stderr, ran.stdout) == ("", output)

    made: dict[str, Any] = {}
    exec(schema_tool, made)
    assert made["refund"].spec.name == "refund"
    assert made["refund"].find_risk({}) == "high"


@pytest.mark.parametrize(
    ("value", "said", "is_error"),
    [
        (math.nan, '"NaN"', False),
        ({"low": -math.inf, "high": [math.inf]}, '{"low":"-Infinity","high":["Infinity"]}', False),
        (object(), "the call ran, but its result cannot be written as JSON: ", True),
        ({"at": object()}, "the call ran, but its result cannot be written as JSON: ", True),
    ],
)
async def test_a_result_that_json_cannot_hold_is_told_and_leaves_the_conversation_usable(
    value: object, said: str, is_error: bool
) -> None:
    @tool
    async def measure() -> object:
        return value

    (result,) = await call(Tools(measure), ToolCall("measure"))
    assert isinstance(result, ObservationEvent)
    assert result.is_error == is_error
    assert result.content.startswith(said)


async def test_a_generator_that_a_decorator_hides_is_told_not_to_have_run() -> None:
    (result,) = await call(Tools(yields_behind_it), ToolCall("yields_behind_it", {"at": 1}))
    assert isinstance(result, ObservationEvent)
    assert result.is_error
    assert "it returned an async generator, and nothing of that ran" in result.content


async def test_a_result_that_holds_itself_is_told() -> None:
    @tool
    async def measure() -> object:
        circle: list[object] = []
        circle.append(circle)
        return circle

    (result,) = await call(Tools(measure), ToolCall("measure"))
    assert isinstance(result, ObservationEvent)
    assert result.is_error
    assert "cannot be written as JSON" in result.content
