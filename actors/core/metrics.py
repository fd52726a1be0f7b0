"""The tokens, cost and time of a conversation's model calls, as a fold of its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final

from ..events import TokenUsage

__all__ = ["Metrics", "ModelMetrics"]

UNNAMED_MODEL = ""
"""The key of the calls whose usage names no model."""


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Totals over the calls of one model; a value, replaced as the log grows."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_written_tokens: int = 0
    reasoning_tokens: int = 0
    total_cost: float = 0.0
    llm_call_count: int = 0
    latency_s: float = 0.0
    """The seconds that models took to answer, over all calls."""


@dataclass(frozen=True, slots=True)
class Metrics(ModelMetrics):
    """Totals over all model calls, and over those of each model."""

    by_model: Mapping[str, ModelMetrics] = field(default_factory=dict)
    """The totals of each model, by its name; calls without a name are under ``""``."""

    def plus(self, calls: Sequence[TokenUsage]) -> Metrics:
        """Return the totals with these calls as well, added up in their order."""
        of_model: dict[str, list[TokenUsage]] = {}
        for usage in calls:
            of_model.setdefault(usage.model or UNNAMED_MODEL, []).append(usage)
        by_model = dict(self.by_model)
        for model, some in of_model.items():
            by_model[model] = ModelMetrics(*_added(by_model.get(model, _NONE), some))
        return Metrics(*_added(self, calls), by_model)


_NONE: Final = ModelMetrics()
_totals_of: Final = attrgetter(*(one.name for one in fields(ModelMetrics)))


def _added(
    before: ModelMetrics, calls: Iterable[TokenUsage]
) -> tuple[int, int, int, int, int, float, int, float]:
    """Return the fields of these totals, with the calls added up in their order."""
    # In local variables: a log has one of these for each step.
    sent, answered, cached, written, reasoning, cost, count, latency_s = _totals_of(before)
    for usage in calls:
        numbers = vars(usage)  # each look at an attribute takes pydantic five times as long
        sent += numbers["input_tokens"]
        answered += numbers["output_tokens"]
        cached += numbers["cached_tokens"]
        written += numbers["cache_written_tokens"]
        reasoning += numbers["reasoning_tokens"]
        cost += numbers["cost"]
        count += 1
        latency_s += numbers["latency_s"]
    return sent, answered, cached, written, reasoning, cost, count, latency_s
