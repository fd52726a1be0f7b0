"""Tools: plain typed functions that a model may call, and how their calls are run.

    @tool(timeout_s=10, idempotent=True)
    def look_up(order: Annotated[int, Field(description="its number")]) -> dict[str, str]:
        "What is known of an order."

`Tools(look_up, refund)` tells a model of them and runs what it asks for. It promises:

1. every call has a result that the model can read: a tool that is not there, arguments that do
   not fit, a refusal, a failure and a timeout too. Where nothing was started, the result says so;
2. a call is checked before anything of it runs: its arguments against the function's types, then
   by `before_call`. A check that raises refuses the call;
3. at most `calls_at_once_max` calls of one turn run at a time, and a result is at most
   `result_length_max` characters long;
4. a function that is not async runs in a daemon thread. Neither a timeout nor an interrupt waits
   for the thread, and leaving the program does not either; what it still returns is dropped.

It does not promise that a call which timed out did not happen: its result says that it may have.
An async tool that times out is cancelled, and its clean-up is waited for.

`Tools` belongs to no conversation and may serve many. Calls run in the task of the turn; the
application's functions are the only thing here that can take long. Nothing survives a crash but
the log: a call that was open then is run again where its tool is idempotent, under the same
`tool_call_id`, which a tool sees in a parameter of type `ToolContext`.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

import anyio
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from turnkeeper.runtime import Ports, clear_stray_cancellation

from ._frozen import FrozenObject
from ._text import error_text
from ._wire import wire_tool_name
from .agents import ToolResult, TurnContext
from .errors import InvalidInput
from .events import ActionEvent
from .models import ToolSpec

__all__ = [
    "AfterCall",
    "BeforeCall",
    "Tool",
    "ToolContext",
    "ToolFunction",
    "Tools",
    "call_function",
    "describe_failure",
    "tool",
]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

RESULT_LENGTH_MIN = 200
"""The least that `result_length_max` may be: a cut result still has room for its note."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ToolContext:
    """One call, as tools and hooks see it. A tool's parameter of this type is not the model's."""

    conversation_id: str
    turn_id: str
    tool_call_id: str
    """Of this call alone, and the same when it is run again after a crash: an idempotency key."""
    tool_name: str
    arguments: FrozenObject
    """As the model wrote them."""


ToolFunction: TypeAlias = Callable[..., object]
"""A typed function, or one that `tool` was put on."""

BeforeCall: TypeAlias = Callable[[ToolContext], str | Awaitable[str | None] | None]
"""Asked before a call runs: None lets it, a text refuses it and tells the model why."""

AfterCall: TypeAlias = Callable[
    [ToolContext, ToolResult], ToolResult | Awaitable[ToolResult | None] | None
]
"""Shown the result of a call that ran, before anybody else: None keeps it, another replaces it."""


class Tool(Generic[P, R_co]):
    """A function with what a model is told of it; called like the function."""

    def __init__(
        self,
        function: Callable[P, R_co],
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> None:
        """Raises `InvalidInput` where a model could not call this function."""
        self.function = function
        self.name = _name(function)
        self.timeout_s = timeout_s
        self.is_idempotent = idempotent
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise InvalidInput(f"tool {self.name}: timeout_s is {timeout_s}; it takes seconds")
        parameters = _parameters(self.name, function)
        self._contexts = [p.name for p in parameters if p.annotation is ToolContext]
        # Fields have names of our own, for a parameter may be called what a model class is not
        # allowed to have.
        self._fields = {
            f"argument_{n}": parameter
            for n, parameter in enumerate(parameters)
            if parameter.annotation is not ToolContext
        }
        self._arguments, schema = _arguments_model(self.name, self._fields)
        self.spec = ToolSpec(self.name, inspect.getdoc(function) or "", schema)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    def read_arguments(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """The arguments as the function takes them; `ValueError` says what does not fit.

        What the model left out is left out here too: the function has its own defaults.
        """
        # By way of JSON: lists and dicts that the tool may change, and JSON's rules for what a
        # date or a set is.
        written = json.dumps(arguments)
        try:
            read = self._arguments.model_validate_json(written)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            raise ValueError(
                "; ".join(f"{_place(one['loc'])}: {one['msg']}" for one in found)
            ) from error
        return {self._fields[field].name: getattr(read, field) for field in read.model_fields_set}

    async def run(
        self, context: ToolContext, arguments: Mapping[str, object], ports: Ports
    ) -> object:
        """What the function returns or raises; raises `_TimedOut` where that takes too long."""
        given = {**arguments, **dict.fromkeys(self._contexts, context)}
        call = partial(call_function, ports, self.function, **given)
        if self.timeout_s is None:
            return await call()
        return await _within(ports, self.timeout_s, call)


@overload
def tool(function: Callable[P, R_co], /) -> Tool[P, R_co]: ...
@overload
def tool(
    *, timeout_s: float | None = None, idempotent: bool = False
) -> Callable[[Callable[P, R_co]], Tool[P, R_co]]: ...
def tool(
    function: Callable[P, R_co] | None = None,
    /,
    *,
    timeout_s: float | None = None,
    idempotent: bool = False,
) -> Tool[P, R_co] | Callable[[Callable[P, R_co]], Tool[P, R_co]]:
    """Make a tool of a typed function; where nothing is to be set, the function alone will do.

    Its docstring is the tool's description, and `Annotated[int, Field(description=...)]` that of
    a parameter. `timeout_s`: seconds until the model is told that the call took too long.
    `idempotent`: running the same call twice is as good as once, so after a crash it is.
    """
    make = partial(Tool[P, R_co], timeout_s=timeout_s, idempotent=idempotent)
    return make if function is None else make(function)


class Tools:
    """The tools of an agent, and what holds for all of their calls."""

    def __init__(
        self,
        *functions: ToolFunction,
        calls_at_once_max: int = 8,
        result_length_max: int = 30_000,
        before_call: BeforeCall | None = None,
        after_call: AfterCall | None = None,
    ) -> None:
        """Raises `InvalidInput` where two have one name, or one cannot be called by a model."""
        if calls_at_once_max < 1:
            raise InvalidInput(f"calls_at_once_max is {calls_at_once_max}; it takes 1 or more")
        if result_length_max < RESULT_LENGTH_MIN:
            raise InvalidInput(
                f"result_length_max is {result_length_max}; it takes {RESULT_LENGTH_MIN} or more"
            )
        self._tools: dict[str, Tool[..., object]] = {}
        for function in functions:
            made = function if isinstance(function, Tool) else Tool(function)
            if made.name in self._tools:
                raise InvalidInput(f"two tools have the name {made.name}; each takes its own")
            self._tools[made.name] = made
        self._calls_at_once_max = calls_at_once_max
        self._result_length_max = result_length_max
        self._before_call = before_call
        self._after_call = after_call

    @property
    def names(self) -> Sequence[str]:
        """The tools' names, in the order in which they were given."""
        return tuple(self._tools)

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """What a model is told of the tools."""
        return tuple(one.spec for one in self._tools.values())

    def is_idempotent(self, tool_name: str) -> bool:
        """Whether a call of this tool may be run again when nobody knows if it has run."""
        found = self._tools.get(tool_name)
        return found is not None and found.is_idempotent

    def find_fault(
        self, tool_name: str, arguments: Mapping[str, object], malformed: str | None
    ) -> str | None:
        """Why a call cannot be run at all, in words for the model; None where it can."""
        read = self._read(tool_name, arguments, malformed)
        return read if isinstance(read, str) else None

    def runner(self, turn: TurnContext) -> Callable[[ActionEvent], Awaitable[ToolResult]]:
        """What runs the calls of this turn: `turn.call_tools(calls, tools.runner(turn))`."""
        limit = anyio.Semaphore(self._calls_at_once_max)

        async def run(action: ActionEvent) -> ToolResult:
            async with limit:
                result = await self._run(action, turn)
            return replace(result, content=_cut(result.content, self._result_length_max))

        return run

    def _read(
        self, tool_name: str, arguments: Mapping[str, object], malformed: str | None
    ) -> tuple[Tool[..., object], Mapping[str, object]] | str:
        """The tool and its arguments, or why there are none."""
        found = self._tools.get(tool_name)
        if found is None:
            known = ", ".join(self._tools) or "none"
            return f"there is no tool {tool_name}; there are: {known}; nothing happened"
        if malformed is not None:
            return "the arguments are not a JSON object; nothing happened; write them as one"
        try:
            return found, found.read_arguments(arguments)
        except Exception as error:  # noqa: BLE001 - a type's own validator may raise anything
            return f"the arguments do not fit: {error_text(error)}; nothing happened"

    async def _run(self, action: ActionEvent, turn: TurnContext) -> ToolResult:
        read = self._read(action.tool_name, action.arguments, action.malformed_arguments)
        if isinstance(read, str):
            return ToolResult(read, is_error=True)
        found, arguments = read
        context = ToolContext(
            turn.conversation_id,
            turn.turn_id,
            action.tool_call_id,
            action.tool_name,
            action.arguments,
        )
        refusal = await self._check(context, turn.ports)
        if refusal is not None:
            return ToolResult(f"refused: {refusal}; nothing happened", is_error=True)
        # It has waited: for its place among the calls of the turn, and for the check.
        turn.check_lease()
        result = await _result(found, context, arguments, turn.ports)
        return await self._look_over(context, result, turn.ports)

    async def _check(self, context: ToolContext, ports: Ports) -> str | None:
        """Why the application will not have this call."""
        if self._before_call is None:
            return None
        try:
            refusal = await call_function(ports, self._before_call, context)
            if refusal is not None and not isinstance(refusal, str):
                raise TypeError(f"before_call returned a {type(refusal).__name__}")
        except BaseException as error:  # noqa: BLE001 - what is not its own is raised again
            refusal = f"it could not be checked ({describe_failure(error)})"
            self._log_failure("before_call failed", context, error)
        return refusal

    async def _look_over(
        self, context: ToolContext, result: ToolResult, ports: Ports
    ) -> ToolResult:
        """The result as the application lets it pass."""
        if self._after_call is None:
            return result
        try:
            replaced = await call_function(ports, self._after_call, context, result)
            if replaced is not None and not isinstance(replaced, ToolResult):
                raise TypeError(f"after_call returned a {type(replaced).__name__}")
        except BaseException as error:  # noqa: BLE001 - what is not its own is raised again
            said = f"its result could not be checked and is kept back ({describe_failure(error)})"
            self._log_failure("after_call failed", context, error)
            return ToolResult(f"the call ran, but {said}", is_error=True)
        return result if replaced is None else replaced

    def _log_failure(self, what: str, context: ToolContext, error: BaseException) -> None:
        _log.warning(
            what,
            conversation=context.conversation_id,
            call=context.tool_call_id,
            error=type(error).__name__,
            exc_info=error,
        )


class _TimedOut(Exception):
    """A tool took longer than its timeout."""


async def _result(
    found: Tool[..., object], context: ToolContext, arguments: Mapping[str, object], ports: Ports
) -> ToolResult:
    """Run a call; whatever comes of it is its result, but for a cancellation of the turn."""
    try:
        value = await found.run(context, arguments, ports)
    except _TimedOut:
        said = f"no result within {found.timeout_s:g} s; the call may have happened, or yet happen"
        return ToolResult(said, is_error=True, may_have_happened=True)
    except BaseException as error:  # noqa: BLE001 - what is not its own is raised again
        return ToolResult(describe_failure(error), is_error=True)
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        return ToolResult(to_json(value).decode())
    except ValueError as error:
        said = f"the call ran, but its result cannot be written as JSON: {error_text(error)}"
        return ToolResult(said, is_error=True)


def describe_failure(error: BaseException) -> str:
    """What came out of the application's function, in words; raises what is not its own doing."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        # A cancellation that nobody asked for would end the other calls without a word.
        if not clear_stray_cancellation(error):
            raise error
    elif not isinstance(error, Exception | SystemExit):
        raise error
    return f"{type(error).__name__}: {error_text(error)}"


async def call_function(
    ports: Ports, function: ToolFunction, /, *args: object, **kwargs: object
) -> object:
    """Call a function of the application: an async one here, another in a thread of its own."""
    if _is_async(function):
        value = function(*args, **kwargs)
    else:
        value = await ports.blocking(partial(function, *args, **kwargs))
    return await value if inspect.isawaitable(value) else value


async def _within(ports: Ports, timeout_s: float, call: Callable[[], Awaitable[object]]) -> object:
    """What the call returns or raises; where it takes longer, it is cancelled: `_TimedOut`."""
    value: object = None
    failure: Exception | SystemExit | _TimedOut = _TimedOut()
    is_done = False
    async with anyio.create_task_group() as group:

        async def expire() -> None:
            await ports.sleep(timeout_s)
            group.cancel_scope.cancel()

        group.start_soon(expire)
        try:
            value = await call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - kept out of the group, which wraps
            failure = error
        else:
            is_done = True
        group.cancel_scope.cancel()
    if is_done:
        return value
    raise failure


def _is_async(function: ToolFunction) -> bool:
    made_of = type(function).__call__ if not inspect.isroutine(function) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(made_of)


# --- what a function is, to a model -------------------------------------------------------------


def _name(function: ToolFunction) -> str:
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise InvalidInput(f"a tool is a function with a name, and {function!r} has none")
    if wire_tool_name(name) != name:
        raise InvalidInput(f"tool {name}: a name has 1 to 64 letters, digits, `_` and `-`")
    return name


def _parameters(name: str, function: ToolFunction) -> Sequence[inspect.Parameter]:
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
        raise InvalidInput(f"tool {name}: its types cannot be read: {error}") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidInput(
                f"tool {name}: {parameter} is not a parameter that is given by its name"
            )
        if parameter.annotation is parameter.empty:
            raise InvalidInput(f"tool {name}: its parameter {parameter.name} has no type")
    return list(parameters)


def _arguments_model(
    name: str, fields: Mapping[str, inspect.Parameter]
) -> tuple[type[BaseModel], FrozenObject]:
    """What checks the arguments of a call, and their JSON schema."""
    # Any: what pydantic takes for a type.
    definitions: dict[str, Any] = {
        field: (
            parameter.annotation,
            Field(
                default=... if parameter.default is parameter.empty else parameter.default,
                alias=parameter.name,
            ),
        )
        for field, parameter in fields.items()
    }
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **definitions)
        schema = model.model_json_schema(schema_generator=_Schema)
        del schema["title"]
        return model, FrozenObject(schema)
    except (PydanticUserError, ValueError, TypeError) as error:
        raise InvalidInput(f"tool {name}: its types have no JSON schema: {error}") from error


class _Schema(GenerateJsonSchema):
    """Without what says nothing to a model, and without a warning for a default of its own type."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401, ARG002 - pydantic's
        return False


def _place(loc: Sequence[int | str]) -> str:
    return ".".join(map(str, loc))


def _cut(text: str, length_max: int) -> str:
    """This text, or its head and its tail with a note between them."""
    if len(text) <= length_max:
        return text
    note = f"\n[... cut here: the whole result has {len(text)} characters ...]\n"
    kept = length_max - len(note)
    return f"{text[: kept - kept // 2]}{note}{text[len(text) - kept // 2 :]}"
