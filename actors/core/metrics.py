"""The tokens, cost and time of a conversation's model calls, as a fold of its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..events import Event, StepFinishedEvent, TokenUsage

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

    def plus(self, usage: TokenUsage) -> ModelMetrics:
        """Return the totals with one more call."""
        return ModelMetrics(
            input_tokens=self.input_tokens + usage.input_tokens,
            output_tokens=self.output_tokens + usage.output_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            cache_written_tokens=self.cache_written_tokens + usage.cache_written_tokens,
            reasoning_tokens=self.reasoning_tokens + usage.reasoning_tokens,
            total_cost=self.total_cost + usage.cost,
            llm_call_count=self.llm_call_count + 1,
            latency_s=self.latency_s + usage.latency_s,
        )


@dataclass(frozen=True, slots=True)
class Metrics(ModelMetrics):
    """Totals over all model calls, and over those of each model."""

    by_model: Mapping[str, ModelMetrics] = field(default_factory=dict)
    """The totals of each model, by its name; calls without a name are under ``""``."""

    def fold(self, event: Event) -> Metrics:
        """Return the totals after this event of the log."""
        if not isinstance(event, StepFinishedEvent):
            return self
        model = event.usage.model or UNNAMED_MODEL
        of_model = self.by_model.get(model, ModelMetrics()).plus(event.usage)
        totals = self.plus(event.usage)
        return Metrics(
            **{one.name: getattr(totals, one.name) for one in fields(ModelMetrics)},
            by_model={**self.by_model, model: of_model},
        )
