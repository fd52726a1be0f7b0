"""Tools made of a JSON schema: given whole, checked, and run, confirmed and timed like others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import anyio
import pytest
from pydantic import AfterValidator

from tests.actors.agents.test_tool_agent import calling, events_of, scripted, serving, until
from tests.actors.agents.test_tools import call
from turnkeeper.actors import ScriptedModel, Tool, ToolAgent, ToolContext, ToolResult, Tools, tool
from turnkeeper.actors.agents.tool_agent import ConfirmRisky
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import ActionEvent, AgentErrorEvent, ObservationEvent
from turnkeeper.actors.models.base import ModelResponse
from turnkeeper.actors.tool_calls import ToolCall
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "order": {
            "type": "object",
            "description": "the order that it is about",
            "properties": {
                "number": {"type": "integer", "minimum": 1},
                "colour": {"enum": ["red", "green"], "description": "of the parcel"},
            },
            "required": ["number"],
            "additionalProperties": False,
        },
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["order"],
}


class Refunds:
    """The application's part."""

    def __init__(self) -> None:
        self.made: list[Mapping[str, object]] = []
        self.contexts: list[ToolContext] = []

    async def run(self, arguments: Mapping[str, object], context: ToolContext) -> object:
        self.made.append(arguments)
        self.contexts.append(context)
        return {"refunded": arguments["order"]}

    def tool(self, **options: Any) -> Tool:  # noqa: ANN401 - the tool's own
        return Tool("refund", "Give the money back.", SCHEMA, self.run, **options)


def refund(**order: object) -> ToolCall:
    return ToolCall("refund", {"order": order})


async def test_a_model_is_given_the_schema_whole_and_the_function_the_arguments() -> None:
    refunds = Refunds()
    tools = Tools(refunds.tool())
    (spec,) = tools.specs
    assert (spec.name, spec.description) == ("refund", "Give the money back.")
    assert spec.parameters == SCHEMA | {"required": ("order",)} or spec.parameters["properties"]
    nested = spec.parameters["properties"]["order"]["properties"]["colour"]  # type: ignore[index, call-overload]
    assert nested == {"enum": ("red", "green"), "description": "of the parcel"}

    (result,) = await call(tools, refund(number=7, colour="red"))
    assert result.content == '{"refunded":{"number":7,"colour":"red"}}'
    assert refunds.made == [{"order": {"number": 7, "colour": "red"}}]
    assert isinstance(refunds.made[0], dict)  # its own to change, at every depth
    assert type(refunds.made[0]["order"]) is dict
    assert refunds.contexts[0].tool_call_id == result.tool_call_id


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ({}, "order.number: it is required"),
        ({"number": 0}, "order.number: it takes at least 1"),
        ({"number": "7"}, "order.number: it takes integer"),
        ({"number": 7, "colour": "blue"}, "order.colour: it takes one of 'red', 'green'"),
        ({"number": 7, "size": 1}, "order.size: there is no such property"),
    ],
)
async def test_arguments_that_do_not_fit_are_answered_and_nothing_runs(
    order: dict[str, object], found: str
) -> None:
    refunds = Refunds()
    (result,) = await call(Tools(refunds.tool()), refund(**order))
    assert result.content == f"the arguments do not fit: {found}; nothing happened"
    assert result.is_error  # type: ignore[union-attr]  # an observation
    assert not refunds.made


async def test_a_function_that_is_not_async_runs_too_and_may_give_a_result_of_its_own() -> None:
    def run(arguments: Mapping[str, object], context: ToolContext) -> ToolResult:
        return ToolResult(f"{context.tool_name}: {len(arguments)}", is_error=True)

    (result,) = await call(Tools(Tool("count", "Counts.", {}, run)), ToolCall("count", {"a": 1}))
    assert (result.content, result.is_error) == ("count: 1", True)  # type: ignore[union-attr]  # an observation


async def test_it_is_timed_and_cancelled_like_any_other() -> None:
    clock = VirtualClock()
    was_cancelled = []

    async def run(arguments: Mapping[str, object], context: ToolContext) -> str:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            was_cancelled.append(context.tool_call_id)
            raise
        return "never"

    results: Sequence[Any] = ()
    tools = Tools(Tool("wait", "Waits.", {}, run, timeout_s=5))

    async def calls() -> None:
        nonlocal results
        results = await call(tools, ToolCall("wait"), ports=clock.ports())

    async with anyio.create_task_group() as group:
        group.start_soon(calls)
        await settle()
        await clock.advance(5)
    assert isinstance(results[0], AgentErrorEvent)
    assert results[0].may_have_happened
    assert was_cancelled == [results[0].tool_call_id]


async def test_it_is_confirmed_and_logged_like_any_other() -> None:
    refunds = Refunds()
    model = ScriptedModel(
        [calling("refund", order={"number": 1}), calling("refund", order={"number": 2}), "Done."]
    )
    async with serving(ToolAgent(model, [refunds.tool()], confirm=["refund"])) as chat:
        turn = await chat.send("go")
        await until(chat, "confirmation_requested")
        assert not refunds.made
        await chat.confirm()
        await until(chat, "confirmation_requested", 2)
        await chat.reject("enough")
        assert await turn.reply() == "Done."
    assert refunds.made == [{"order": {"number": 1}}]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda run: Tool("a b", "", {}, run), "letters, digits"),
        (lambda run: Tool("", "", {}, run), "letters, digits"),
        (lambda run: Tool("a", "", {"type": "string"}, run), "an object, not 'string'"),
        (lambda run: Tool("a", "", {"properties": {"ä": {}}}, run), "the name 'ä'"),
        (lambda run: Tool("a", "", {"x": float("nan")}, run), "is no JSON object"),
        (lambda run: Tool("a", "", {"x": object()}, run), "is no JSON object"),
        (lambda run: Tool("a", "", {}, run, timeout_s=0), "timeout_s is 0"),
        (lambda run: Tool("a", "", {}, run, risk="grave"), "risk is 'grave'"),  # type: ignore[arg-type]  # that is the case
    ],
)
def test_a_tool_that_no_model_could_call_is_refused_when_it_is_made(make: Any, found: str) -> None:  # noqa: ANN401 - a constructor
    with pytest.raises(InvalidInput) as caught:
        make(Refunds().run)
    assert found in str(caught.value)


# --- the risk of a call --------------------------------------------------------------------------


@tool(risk="low")
def look() -> str:
    return "seen"


@tool(risk=lambda arguments: "high" if arguments["at"] == "all" else "medium")
def drop(at: str) -> str:
    return f"dropped {at}"


@tool(risk=lambda arguments: arguments["nowhere"])  # type: ignore[return-value, arg-type]  # that is the case
def broken() -> str:
    return "done"


class Panic(BaseException):
    """As an extension module raises it: no `Exception`."""


def _panic(_: object) -> Any:  # noqa: ANN401 - it returns nothing
    raise Panic("no memory")


@tool(risk=_panic)
def panicking() -> str:
    return "done"


def checked_by_a_panic(at: Annotated[str, AfterValidator(_panic)]) -> str:
    return f"seen {at}"


def plain() -> str:
    return "done"


@pytest.mark.parametrize(
    ("confirm", "response", "is_asked"),
    [
        (ConfirmRisky(), calling("look"), False),
        (ConfirmRisky(), calling("drop", at="one"), False),
        (ConfirmRisky(), calling("drop", at="all"), True),
        (ConfirmRisky("medium"), calling("drop", at="one"), True),
        (ConfirmRisky("low"), calling("look"), True),
        (ConfirmRisky(), calling("broken"), True),
        (ConfirmRisky(), calling("panicking"), True),
        (ConfirmRisky(), calling("plain"), True),
        (ConfirmRisky(unknown=False), calling("plain"), False),
        (ConfirmRisky(), calling("look", "plain"), True),
    ],
)
async def test_the_user_is_asked_by_the_risk_of_a_call(
    confirm: ConfirmRisky,
    response: ModelResponse,
    is_asked: bool,
) -> None:
    model = scripted(response, "Done.")
    agent = ToolAgent(model, [look, drop, broken, panicking, plain], confirm=confirm)
    async with serving(agent) as chat:
        turn = await chat.send("go")
        if is_asked:
            await until(chat, "confirmation_requested")
            await chat.confirm()
        assert await turn.reply() == "Done."
        kinds = [event.kind for event in await events_of(chat)]
        assert ("confirmation_requested" in kinds) == is_asked


async def test_a_panic_of_a_types_validator_is_the_result_of_the_call() -> None:
    model = scripted(calling("checked_by_a_panic", at="home"), "Done.")
    async with serving(ToolAgent(model, [checked_by_a_panic])) as chat:
        assert await (await chat.send("go")).reply() == "Done."
        (result,) = [e for e in await events_of(chat) if isinstance(e, ObservationEvent)]
    assert result.content == "the arguments do not fit: no memory; nothing happened"


async def test_the_risk_of_a_call_is_in_the_log() -> None:
    model = scripted(calling("look", "plain"), calling("drop", at="all"), "Done.")
    async with serving(ToolAgent(model, [look, drop, plain])) as chat:
        await (await chat.send("go")).reply()
        events = await events_of(chat)
        risks = [event.risk for event in events if isinstance(event, ActionEvent)]
    assert risks == ["low", None, "high"]


def test_an_unknown_risk_to_ask_about_is_refused() -> None:
    with pytest.raises(InvalidInput, match="least is 'grave'"):
        ConfirmRisky("grave")  # type: ignore[arg-type]  # that is the case
