"""Tools: typed functions, or schemas with a function, that a model may call; and their calls.

    @tool(timeout_s=10, idempotent=True)
    def look_up(order: Annotated[int, Field(description="its number")]) -> dict[str, str]:
        "Look up an order."

    refund = Tool("refund", "Give the money back.", {"type": "object", ...}, run)

`Tools(look_up, refund)` describes them to a model and runs the calls it makes. It promises:

1. Every call gets a result that the model can read, even if the tool does not exist, the
   arguments do not fit, the call is refused, fails or times out. If nothing was started, the
   result says so.
2. A call is checked before any of it runs: its arguments against the function's types or the
   schema, then by `before_call`. If a check raises, the call is refused.
3. At most `calls_at_once_max` calls of one turn run at a time, and a result has at most
   `result_length_max` characters.
4. A function that is not async runs in a daemon thread, a generator too. Timeouts, interrupts and
   the program's exit do not wait for the thread; what it still returns is dropped.

It does not promise that a call which timed out did not happen: its result says that it may have.
An async tool that times out is cancelled, and its clean-up is awaited.

`Tools` belongs to no conversation and may serve many. Calls run in the task of the turn; only the
application's functions can take long here. Nothing survives a crash but the log: a call that was
open then runs again if its tool is idempotent, under the same `tool_call_id`, which a tool sees in
a parameter of type `ToolContext`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from sys import float_info
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import closing_scopes

from ..errors import InvalidInput
from ..events import ActionEvent
from ..log_lines import log_failure
from ..models.base import ToolSpec
from ..models.schemas import find_misfit
from ..tool_calls import RISKS, Risk, ToolCall, ToolResult
from ..values.api_names import api_tool_name
from ..values.frozen import FrozenObject
from ..values.text import check_bool, check_number, check_text, error_text
from ..values.type_names import a_type
from .turn_context import TurnContext, is_own_failure

__all__ = [
    "AfterCall",
    "AnyTool",
    "BeforeCall",
    "FindRisk",
    "FunctionTool",
    "Tool",
    "ToolContext",
    "ToolFunction",
    "ToolRun",
    "Tools",
    "call_function",
    "describe_failure",
    "tool",
]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

RESULT_LENGTH_MIN = 200
"""The smallest `result_length_max`: a cut result needs room for its note."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """One call, as tools and hooks see it. Models do not see a tool's parameter of this type."""

    conversation_id: str
    turn_id: str
    tool_call_id: str
    """Unique to this call, and the same if it runs again after a crash: an idempotency key."""
    tool_name: str
    arguments: FrozenObject
    """As the model wrote them."""


ToolFunction: TypeAlias = Callable[..., object]
"""A typed function, async or not."""

ToolRun: TypeAlias = Callable[[Mapping[str, object], ToolContext], object]
"""Runs a call of a tool that has a schema; async or not. It may change its arguments."""

FindRisk: TypeAlias = Callable[[Mapping[str, object]], Risk]
"""Finds the risk of a call by its arguments. Not async: it is asked before the call is logged."""

AnyTool: TypeAlias = "ToolFunction | Tool"
"""A typed function, with or without `@tool`, or a `Tool` with a schema of its own."""

BeforeCall: TypeAlias = Callable[[ToolContext], str | Awaitable[str | None] | None]
"""Asked before a call runs: None lets it run, a text refuses it and tells the model why."""

AfterCall: TypeAlias = Callable[
    [ToolContext, ToolResult], ToolResult | Awaitable[ToolResult | None] | None
]
"""Called with the result of a call that ran, before it is logged: None keeps it, a result replaces
it."""


class Tool:
    """A tool with a JSON schema of its own; `tool` makes one of a typed function."""

    def __init__(
        self,
        name: str,
        description: str,
        schema: Mapping[str, object],
        run: ToolRun,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        risk: Risk | FindRisk | None = None,
    ) -> None:
        """`schema` is the JSON schema of the arguments, and `run` is called with them.

        `description` is for the model. `timeout_s`, `idempotent` and `risk` are as for `tool`.

        The model is given the whole schema. Before `run` is called, the arguments are checked
        against its types, enumerations, required and additional properties, items, bounds and
        combinations; formats, patterns and conditions are for `run` to check. Raises `InvalidInput`
        if no model's API would take the tool.
        """
        check_text("a tool's name", name)
        if api_tool_name(name) != name:
            raise InvalidInput(f"tool {name}: a name has 1 to 64 letters, digits, `_` and `-`")
        if timeout_s is not None:
            what = f"tool {name}: timeout_s"
            check_number(what, timeout_s, "seconds above 0", above=0, most=float_info.max)
        check_bool(f"tool {name}: idempotent", idempotent)
        if risk is not None and not callable(risk) and risk not in RISKS:
            raise InvalidInput(f"tool {name}: risk is {risk!r}; it takes {', '.join(RISKS)}")
        if not callable(run):
            raise InvalidInput(f"tool {name}: run is {run!r}; it takes a function")
        if _is(inspect.isasyncgenfunction, run):
            # A call would run nothing of it, and its result would say that it ran.
            raise InvalidInput(f"tool {name}: it yields; an async tool returns its result")
        if not isinstance(schema, Mapping):
            raise InvalidInput(
                f"tool {name}: its schema is {a_type(schema)}; it takes a mapping, as "
                '{"type": "object", "properties": {}}'
            )
        try:
            parameters = FrozenObject(schema)
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"tool {name}: its schema is no JSON object: {error}") from error
        self.name = name
        self.timeout_s = timeout_s
        self.is_idempotent = idempotent
        self.spec = ToolSpec(name, description, parameters)
        self._schema: FrozenObject = parameters
        self._run = run
        self._risk = risk

    def find_risk(self, arguments: Mapping[str, object]) -> Risk | None:
        """Return the risk of a call; None if the tool does not declare it.

        A function that raises, or returns anything but a risk, means the highest.
        """
        if self._risk is None or isinstance(self._risk, str):
            return self._risk
        try:
            found = self._risk(arguments)
        except BaseException as error:
            if not is_own_failure(error):
                raise
            log_failure("risk of a call not found", error, tool=self.name)
            return RISKS[-1]
        return found if found in RISKS else RISKS[-1]

    def read_arguments(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Return the arguments as `run` takes them; `ValueError` says what does not fit."""
        misfit = find_misfit(self._schema, arguments)
        if misfit is not None:
            raise ValueError(misfit)
        # By way of JSON: the tool may change the lists and dicts.
        read: dict[str, object] = json.loads(json.dumps(arguments))
        return read

    async def run(
        self, context: ToolContext, arguments: Mapping[str, object], ports: Ports
    ) -> object:
        """Call the function and return its value; raise `_TimedOut` if it takes too long."""
        call = partial(self._call, context, arguments, ports)
        if self.timeout_s is None:
            return await call()
        return await _within(ports, self.timeout_s, call)

    async def _call(
        self, context: ToolContext, arguments: Mapping[str, object], ports: Ports
    ) -> object:
        return await call_function(ports, self._run, arguments, context)


class FunctionTool(Tool, Generic[P, R_co]):
    """A typed function and its description for the model; called like the function."""

    def __init__(
        self,
        function: Callable[P, R_co],
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        risk: Risk | FindRisk | None = None,
    ) -> None:
        """Raises `InvalidInput` if a model could not call this function."""
        self.function = function
        name = _name(function)
        parameters = _parameters(name, function)
        self._contexts = [p.name for p in parameters if p.annotation is ToolContext]
        # Fields have names of our own: a pydantic model refuses some names that a parameter may
        # have.
        self._fields = {
            f"argument_{n}": parameter
            for n, parameter in enumerate(parameters)
            if parameter.annotation is not ToolContext
        }
        self._arguments, schema = _arguments_model(name, self._fields)
        super().__init__(
            name,
            inspect.getdoc(function) or "",
            schema,
            cast("ToolRun", function),  # called by `_call`, with the names of its parameters
            timeout_s=timeout_s,
            idempotent=idempotent,
            risk=risk,
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    def read_arguments(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Return the arguments as the function takes them; `ValueError` says what does not fit.

        Arguments that the model left out stay out: the function has its own defaults.
        """
        # By way of JSON: the tool may change the lists and dicts, and pydantic applies its JSON
        # rules to dates and sets.
        written = json.dumps(arguments)
        try:
            read = self._arguments.model_validate_json(written)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            raise ValueError(
                "; ".join(f"{_place(one['loc'])}: {one['msg']}" for one in found)
            ) from error
        return {self._fields[field].name: getattr(read, field) for field in read.model_fields_set}

    async def _call(
        self, context: ToolContext, arguments: Mapping[str, object], ports: Ports
    ) -> object:
        given = {**arguments, **dict.fromkeys(self._contexts, context)}
        return await call_function(ports, self.function, **given)


@overload
def tool(function: Callable[P, R_co], /) -> FunctionTool[P, R_co]: ...
@overload
def tool(
    *,
    timeout_s: float | None = None,
    idempotent: bool = False,
    risk: Risk | FindRisk | None = None,
) -> Callable[[Callable[P, R_co]], FunctionTool[P, R_co]]: ...
def tool(
    function: Callable[P, R_co] | None = None,
    /,
    *,
    timeout_s: float | None = None,
    idempotent: bool = False,
    risk: Risk | FindRisk | None = None,
) -> FunctionTool[P, R_co] | Callable[[Callable[P, R_co]], FunctionTool[P, R_co]]:
    """Make a tool of a typed function. A function without settings is a tool as it is.

    The docstring describes the tool, and `Annotated[int, Field(description=...)]` describes a
    parameter. `timeout_s`: seconds until the model is told that the call took too long.
    `idempotent`: the same call may run twice, so a call left open by a crash runs again.
    `risk`: "low", "medium" or "high", or a function of the arguments that returns one of them; it
    is logged with each call, and `ConfirmRisky` decides by it whether to ask the user. Raises
    `InvalidInput` if a setting, or the function's signature, cannot be used.
    """
    make = partial(FunctionTool[P, R_co], timeout_s=timeout_s, idempotent=idempotent, risk=risk)
    return make if function is None else make(function)


class Tools:
    """The tools of an agent, with the limits and checks that apply to all their calls."""

    def __init__(
        self,
        *functions: AnyTool,
        calls_at_once_max: int = 8,
        result_length_max: int = 30_000,
        before_call: BeforeCall | None = None,
        after_call: AfterCall | None = None,
    ) -> None:
        """Take `functions`, each a typed function or a `Tool`.

        `calls_at_once_max`: how many calls of one turn run at a time. `result_length_max`: the
        characters of a result; a longer one is cut. `before_call` returns the reason for refusing
        a call, or None; `after_call` returns what replaces a result, or None. Raises `InvalidInput`
        if two tools share a name, or a model could not call one.
        """
        check_number("calls_at_once_max", calls_at_once_max, "1 or more", least=1)
        least = RESULT_LENGTH_MIN
        check_number(
            "result_length_max",
            result_length_max,
            f"a whole number from {least} on",
            least=least,
            is_whole=True,
        )
        self._tools: dict[str, Tool] = {}
        for function in functions:
            made = function if isinstance(function, Tool) else FunctionTool(function)
            if made.name in self._tools:
                raise InvalidInput(f"two tools have the name {made.name}; give each its own")
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
        """The tools' descriptions for a model."""
        return tuple(one.spec for one in self._tools.values())

    def is_idempotent(self, tool_name: str) -> bool:
        """True if a call of this tool may run again when it is not known whether it has run."""
        found = self._tools.get(tool_name)
        return found is not None and found.is_idempotent

    def find_risk(self, call: ToolCall) -> Risk | None:
        """Return the risk that the tool of this call declares; None if it declares none."""
        found = self._tools.get(call.name)
        return None if found is None else found.find_risk(call.arguments)

    def find_fault(
        self, tool_name: str, arguments: Mapping[str, object], malformed: str | None
    ) -> str | None:
        """Say, in words for the model, why a call cannot run; None if it can.

        `malformed` is the text of arguments that were no JSON object.
        """
        read = self._read(tool_name, arguments, malformed)
        return read if isinstance(read, str) else None

    def runner(self, turn: TurnContext) -> Callable[[ActionEvent], Awaitable[ToolResult]]:
        """Return the runner of this turn's calls: `turn.call_tools(calls, tools.runner(turn))`."""
        limit: anyio.Semaphore | None = None

        async def run(action: ActionEvent) -> ToolResult:
            nonlocal limit
            if limit is None:  # made by the first call: most turns have none
                # With a free place, a call begins at once: it need not let other tasks run first.
                limit = anyio.Semaphore(self._calls_at_once_max, fast_acquire=True)
            async with limit:
                result = await self._run(action, turn)
            content = _cut(result.content, self._result_length_max)
            return result if content is result.content else replace(result, content=content)

        return run

    def _read(
        self, tool_name: str, arguments: Mapping[str, object], malformed: str | None
    ) -> tuple[Tool, Mapping[str, object]] | str:
        """Return the tool and its arguments, or the reason why the call cannot run."""
        found = self._tools.get(tool_name)
        if found is None:
            known = ", ".join(self._tools) or "none"
            return f"there is no tool {tool_name}; there are: {known}; nothing happened"
        if malformed is not None:
            return "the arguments are not a plain JSON object; nothing happened; write them as one"
        try:
            return found, found.read_arguments(arguments)
        except BaseException as error:
            if not is_own_failure(error):
                raise
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
        # Checked again: this call has waited for its place among the turn's calls, and for
        # `before_call`.
        turn.check_lease()
        result = await _result(found, context, arguments, turn.ports)
        return await self._look_over(context, result, turn.ports)

    async def _check(self, context: ToolContext, ports: Ports) -> str | None:
        """Ask `before_call`; return its reason for refusing the call, or None."""
        if self._before_call is None:
            return None
        try:
            refusal = await call_function(ports, self._before_call, context)
            if refusal is not None and not isinstance(refusal, str):
                raise TypeError(f"before_call returned {a_type(refusal)}")
        except BaseException as error:  # noqa: BLE001 - describe_failure raises what is not its own
            refusal = f"it could not be checked ({describe_failure(error)})"
            _log_failure("before_call failed", context, error)
        return refusal

    async def _look_over(
        self, context: ToolContext, result: ToolResult, ports: Ports
    ) -> ToolResult:
        """Show the result to `after_call`; return it, or what replaces it."""
        if self._after_call is None:
            return result
        try:
            replaced = await call_function(ports, self._after_call, context, result)
            if replaced is not None and not isinstance(replaced, ToolResult):
                raise TypeError(f"after_call returned {a_type(replaced)}")
        except BaseException as error:  # noqa: BLE001 - describe_failure raises what is not its own
            said = f"its result could not be checked and is kept back ({describe_failure(error)})"
            _log_failure("after_call failed", context, error)
            return ToolResult(f"the call ran, but {said}", is_error=True)
        return result if replaced is None else replaced


def _log_failure(what: str, context: ToolContext, error: BaseException) -> None:
    log_failure(
        what,
        error,
        conversation=context.conversation_id,
        turn=context.turn_id,
        call=context.tool_call_id,
        tool=context.tool_name,
    )


class _TimedOut(Exception):
    """A tool took longer than its timeout."""


async def _result(
    found: Tool, context: ToolContext, arguments: Mapping[str, object], ports: Ports
) -> ToolResult:
    """Run a call and return its result. Only a cancellation of the turn is raised."""
    try:
        value = await found.run(context, arguments, ports)
    except _TimedOut:
        maybe = "the call may have happened, or may still happen"
        said = f"no result within {found.timeout_s:g} s; {maybe}"
        return ToolResult(said, is_error=True, may_have_happened=True)
    except BaseException as error:  # noqa: BLE001 - describe_failure raises what is not its own
        said = describe_failure(error)
        _log_failure("tool failed", context, error)
        return ToolResult(said, is_error=True)
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        # NaN and the infinities as texts, for JSON has no numbers for them.
        return ToolResult(to_json(value, inf_nan_mode="strings").decode())
    except ValueError as error:
        said = f"the call ran, but its result cannot be written as JSON: {error_text(error)}"
        return ToolResult(said, is_error=True)


def describe_failure(error: BaseException) -> str:
    """Describe an error of the application's function; raise one that is not its own."""
    # `exit()` in a thread does not end the program. A stray cancellation would silently end the
    # other calls.
    if not isinstance(error, SystemExit) and not is_own_failure(error):
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    return f"{type(error).__name__}: {error_text(error)}"


async def call_function(
    ports: Ports, function: ToolFunction, /, *args: object, **kwargs: object
) -> object:
    """Call an application's function: an async one here, any other in a thread of its own."""
    if _is(inspect.iscoroutinefunction, function):
        value = function(*args, **kwargs)
    else:
        value = await ports.blocking(partial(_call_to_the_end, function, *args, **kwargs))
    if isinstance(value, AsyncGeneratorType):  # as of a decorated function that yields
        raise TypeError(
            "it returned an async generator, and nothing of that ran; return the result"
        )
    if not inspect.isawaitable(value):
        return value
    # Not its text: that of a `partial` has what is bound to it.
    with closing_scopes(getattr(function, "__qualname__", type(function).__name__)):
        return await value


def _call_to_the_end(function: ToolFunction, /, *args: object, **kwargs: object) -> object:
    """Call a function that is not async. Run a generator that it returns here, in its thread."""
    value = function(*args, **kwargs)
    if not inspect.isawaitable(value) and isinstance(value, GeneratorType):
        return list(value)
    return value


async def _within(ports: Ports, timeout_s: float, call: Callable[[], Awaitable[object]]) -> object:
    """Return the call's value; cancel it and raise `_TimedOut` if it takes too long."""
    value: object = None
    failure: BaseException = _TimedOut()
    is_done = False
    async with anyio.create_task_group() as group:

        async def expire() -> None:
            await ports.sleep(timeout_s)
            group.cancel_scope.cancel()

        group.start_soon(expire)
        try:
            value = await call()
        except BaseException as error:
            if not isinstance(error, SystemExit) and not is_own_failure(error):
                raise
            failure = error  # kept out of the group, which wraps errors
        else:
            is_done = True
        group.cancel_scope.cancel()
    if is_done:
        return value
    try:
        raise failure
    finally:
        del failure  # its traceback refers to this frame


def _is(kind: Callable[[object], bool], function: ToolFunction) -> bool:
    """Return True if the function, or what calls an object that can be called, is of this kind."""
    made_of = type(function).__call__ if not inspect.isroutine(function) else function
    return kind(function) or kind(made_of)


# --- describing a function to a model -----------------------------------------------------------


def _name(function: ToolFunction) -> str:
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise InvalidInput(f"a tool is a function with a name, and {function!r} has none")
    return name


def _parameters(name: str, function: ToolFunction) -> Sequence[inspect.Parameter]:
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
        raise InvalidInput(f"tool {name}: its types cannot be read: {error}") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidInput(
                f"tool {name}: its parameter {parameter} cannot be given by name, as models do"
            )
        if parameter.annotation is parameter.empty:
            raise InvalidInput(f"tool {name}: its parameter {parameter.name} has no type")
    return list(parameters)


def _arguments_model(
    name: str, fields: Mapping[str, inspect.Parameter]
) -> tuple[type[BaseModel], FrozenObject]:
    """Return the pydantic model that checks a call's arguments, and their JSON schema."""
    # Any: pydantic's own type for field definitions.
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
    """Leaves out titles, which tell a model nothing, and warnings about unserialisable defaults."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401, ARG002 - pydantic's
        return False


def _place(loc: Sequence[int | str]) -> str:
    return ".".join(map(str, loc))


def _cut(text: str, length_max: int) -> str:
    """Return the text, or its head and tail with a note between them if it is too long."""
    if len(text) <= length_max:
        return text
    note = f"\n[... cut here: the whole result has {len(text)} characters ...]\n"
    kept = length_max - len(note)
    return f"{text[: kept - kept // 2]}{note}{text[len(text) - kept // 2 :]}"
