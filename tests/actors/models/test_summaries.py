"""Condensing with a model's summaries, by the size of a model's window."""

from __future__ import annotations

import pytest

from tests.actors.conversations.worlds import verified
from tests.actors.core.logs import Maker
from turnkeeper.actors import MemoryJournal, ScriptedModel, ToolAgent, View
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.models.base import ModelUnavailable
from turnkeeper.actors.models.summaries import SUMMARY_PROMPT, ModelSummary, summarizing_condenser

pytestmark = pytest.mark.anyio


async def test_a_view_that_fills_the_window_is_condensed_by_what_the_model_says() -> None:
    summaries = ScriptedModel(lambda _: "They spoke of parcels.")
    agents = ScriptedModel(lambda _: "Noted: " + "x" * 800)
    condenser = summarizing_condenser(summaries, window_tokens=2_000)
    async with verified(
        ToolAgent(agents), journal=MemoryJournal(), condenser=condenser
    ) as conversations:
        chat = conversations["c"]
        for n in range(12):
            await (await chat.send(f"parcel {n}")).reply()
        shown = [event.kind for event in agents.requests[-1].view]
        assert "condensation_summary" in shown
        assert condenser.need(agents.requests[-1].view) is None
        (summary,) = (event for event in await chat.view() if event.kind == "condensation_summary")
        assert summary.content == "They spoke of parcels."  # type: ignore[attr-defined]  # a summary

    prompt, history = summaries.requests[0].view
    assert prompt.content == SUMMARY_PROMPT  # type: ignore[attr-defined]  # a system prompt
    assert "user: parcel 1" in history.content  # type: ignore[attr-defined]  # a user message


async def test_the_prompt_is_the_applications_own_if_it_gives_one() -> None:
    model = ScriptedModel(["Short."])
    assert await ModelSummary(model, "Three words.")("user: hello") == "Short."
    assert model.requests[0].view[0].content == "Three words."  # type: ignore[attr-defined]  # a system prompt


async def test_a_model_that_is_unavailable_makes_no_summary() -> None:
    condenser = summarizing_condenser(
        ScriptedModel([ModelUnavailable("m", "503")]), window_tokens=1_000, keep_first=1
    )
    make = Maker()
    view = View.from_events([make.user("x" * 400) for _ in range(40)])
    assert condenser.need(view) == "hard"
    with pytest.raises(ModelUnavailable):
        await condenser.propose(view, "hard")


@pytest.mark.parametrize(("window", "prompt"), [(10, "p"), (1_000, " ")])
def test_a_window_or_a_prompt_that_cannot_be_meant_is_refused(window: int, prompt: str) -> None:
    with pytest.raises(InvalidInput):
        summarizing_condenser(ScriptedModel([]), window_tokens=window, prompt=prompt)
