"""Numbers that an application configures: one of a wrong type is refused with a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    PostgresJournal,
    RollingCondenser,
    ScriptedModel,
    SQLiteJournal,
    ToolAgent,
    Tools,
    TurnContext,
    agent,
)
from turnkeeper.actors.agents.tools import Tool
from turnkeeper.actors.core.stuck import StuckDetector
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.gateway import GatewayLimits
from turnkeeper.actors.models.anthropic import AnthropicModel
from turnkeeper.actors.models.base import Prices
from turnkeeper.actors.models.openai import OpenAIChatModel, OpenAIResponsesModel
from turnkeeper.actors.models.summaries import summarizing_condenser
from turnkeeper.runtime import Backoff, DaemonThreads, MailboxSettings, Runtime, Supervision
from turnkeeper.runtime.testing import (
    SimulatedNetwork,
    Simulation,
    Strike,
    VirtualClock,
    run_campaign,
    simulate,
)


@agent
async def silent(_: TurnContext) -> None: ...


async def run() -> None: ...


async def world(_: Simulation) -> None: ...


# A maker for each class, and its numbers. Any: they take what no type checker would let pass.
MAKERS: Mapping[Callable[..., Any], tuple[Mapping[str, Any], str]] = {
    RollingCondenser: ({}, "max_size keep_first max_tokens minimum_progress"),
    summarizing_condenser: (
        {"model": ScriptedModel([]), "window_tokens": 100_000},
        "window_tokens keep_first",
    ),
    StuckDetector: ({}, "window same_results_max failures_max messages_max alternations"),
    Conversations: (
        {"agent": silent, "journal": MemoryJournal()},
        (
            "queued_messages_max answer_length_max recover_every_s recover_max idle_s park_s "
            "condense_s"
        ),
    ),
    ToolAgent: (
        {"model": ScriptedModel([])},
        "max_iterations attempts_max condensations_max retry_s_max budget token_budget",
    ),
    Tools: ({}, "calls_at_once_max result_length_max"),
    Tool: ({"name": "t", "description": "", "schema": {}, "run": run}, "timeout_s"),
    Prices: ({"input": 1.0, "output": 1.0}, "input output cached cache_written"),
    OpenAIChatModel: ({"model": "m"}, "timeout_s"),
    OpenAIResponsesModel: ({"model": "m"}, "timeout_s"),
    AnthropicModel: ({"model": "m"}, "max_tokens timeout_s"),
    SQLiteJournal: ({"path": "no.db"}, "busy_wait_s queued_events_max rejection_age_s_max"),
    PostgresJournal: ({"conninfo": "dbname=x"}, "lease_s queued_events_max rejection_age_s_max"),
    GatewayLimits: ({}, "body_bytes_max heartbeat_s streams_max"),
    Backoff: ({}, "first_s factor max_s jitter reset_s"),
    Supervision: ({}, "restarts_max window_s"),
    MailboxSettings: ({}, "capacity"),
    Runtime: ({}, "drain_s stop_s cleanup_s kill_s report_blocked_s"),
    DaemonThreads: ({}, "abandoned_max"),
    VirtualClock: ({}, "start"),
    simulate: ({"world": world}, "steps_max notes_max"),
    run_campaign: (
        {"world": world, "seeds": 1},
        "seeds seconds processes steps_max shrink_runs_max",
    ),
    Strike: ({"kind": "crash", "node": "n", "step": 1}, "step seconds"),
    SimulatedNetwork: ({"simulation": None}, "delay_s_max loss duplication"),
}
OF_THE_RUNTIME = {make for make in MAKERS if make.__module__.startswith("turnkeeper.runtime")}


@pytest.mark.parametrize("make", MAKERS)
def test_a_number_of_a_wrong_type_or_out_of_range_is_refused_by_its_name(
    make: Callable[..., Any],
) -> None:
    others, names = MAKERS[make]
    expected = ValueError if make in OF_THE_RUNTIME else InvalidInput
    make(**others)
    for name in names.split():
        for odd in ("10", [], object(), True, math.nan, -1, 2j):
            with pytest.raises(expected, match=rf"\b{name} is .*it takes "):
                make(**{**others, name: odd})


def test_the_options_of_a_simulation_that_may_be_negative_are_whole_numbers() -> None:
    for odd in ("10", 1.5, True, math.nan, None):
        with pytest.raises(ValueError, match=r"^seed is .*; it takes a whole number$"):
            simulate(world, seed=odd)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^first_seed is .*; it takes a whole number$"):
            run_campaign(world, seeds=1, first_seed=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", ["uvloop", 0])
def test_a_backend_and_a_policy_are_one_of_those_that_there_are(odd: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=r"^backend is .*; it takes trio or asyncio$"):
        simulate(world, backend=odd)
    with pytest.raises(ValueError, match=r"^policy is .*; it takes one of random, pct, batch$"):
        simulate(world, policy=odd)


@pytest.mark.parametrize("seconds", ["10", -1, math.nan])
@pytest.mark.anyio
async def test_a_virtual_clock_does_not_run_backwards(seconds: Any) -> None:  # noqa: ANN401
    clock = VirtualClock()
    with pytest.raises(ValueError, match=r"^seconds is .*; it takes 0 seconds or more$"):
        clock.jump(seconds)
    with pytest.raises(ValueError, match=r"^seconds is .*; it takes 0 seconds or more$"):
        await clock.advance(seconds)
    assert clock.monotonic() == 1_000.0


@pytest.mark.parametrize("name", ["queued_messages_max", "recover_max", "active_max"])
@pytest.mark.parametrize("odd", [1.5, math.inf])
def test_what_is_counted_takes_no_fraction(name: str, odd: float) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is {odd}; it takes a whole number"):
        Conversations(silent, journal=MemoryJournal(), **{name: odd})  # type: ignore[arg-type]
