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
from turnkeeper.runtime import Backoff, MailboxSettings, Runtime, Supervision


@agent
async def silent(_: TurnContext) -> None: ...


async def run() -> None: ...


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
        "queued_messages_max answer_length_max recover_every_s recover_max idle_s park_s",
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
    PostgresJournal: ({"conninfo": "x"}, "lease_s queued_events_max rejection_age_s_max"),
    GatewayLimits: ({}, "body_bytes_max heartbeat_s streams_max"),
    Backoff: ({}, "first_s factor max_s jitter reset_s"),
    Supervision: ({}, "restarts_max window_s"),
    MailboxSettings: ({}, "capacity"),
    Runtime: ({}, "drain_s stop_s cleanup_s kill_s report_blocked_s"),
}
OF_THE_RUNTIME = (Backoff, Supervision, MailboxSettings, Runtime)


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


@pytest.mark.parametrize("name", ["queued_messages_max", "recover_max", "active_max"])
@pytest.mark.parametrize("odd", [1.5, math.inf])
def test_what_is_counted_takes_no_fraction(name: str, odd: float) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is {odd}; it takes a whole number"):
        Conversations(silent, journal=MemoryJournal(), **{name: odd})  # type: ignore[arg-type]
