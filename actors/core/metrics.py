"""The tokens, cost and time of a conversation's model calls, as a fold of its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

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

    def plus(self, calls: Iterable[TokenUsage]) -> Metrics:
        """Return the totals with these calls as well, added up in their order."""
        totals = _sums(self)
        by_model: dict[str, _Sums] = {}
        for usage in calls:
            model = usage.model or UNNAMED_MODEL
            if model not in by_model:
                by_model[model] = _sums(self.by_model.get(model, ModelMetrics()))
            for sums in (totals, by_model[model]):
                sums["input_tokens"] += usage.input_tokens
                sums["output_tokens"] += usage.output_tokens
                sums["cached_tokens"] += usage.cached_tokens
                sums["cache_written_tokens"] += usage.cache_written_tokens
                sums["reasoning_tokens"] += usage.reasoning_tokens
                sums["total_cost"] += usage.cost
                sums["llm_call_count"] += 1
                sums["latency_s"] += usage.latency_s
        of_models = {model: ModelMetrics(**sums) for model, sums in by_model.items()}
        return Metrics(**totals, by_model={**self.by_model, **of_models})


# Any: tokens and calls are `int`, the cost and the seconds `float`.
_Sums: TypeAlias = dict[str, Any]


def _sums(metrics: ModelMetrics) -> _Sums:
    return {one.name: getattr(metrics, one.name) for one in fields(ModelMetrics)}
