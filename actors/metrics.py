"""What the model calls of a conversation took, as a fold of its log."""

from __future__ import annotations

from dataclasses import dataclass

from .events import Event, StepFinishedEvent

__all__ = ["Metrics"]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Totals over all steps; a value, replaced as the log grows."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    total_cost: float = 0.0
    llm_call_count: int = 0
    latency_s: float = 0.0
    """The time that models took to answer, all calls together."""

    def fold(self, event: Event) -> Metrics:
        """The totals after this event of the log."""
        if not isinstance(event, StepFinishedEvent):
            return self
        usage = event.usage
        return Metrics(
            input_tokens=self.input_tokens + usage.input_tokens,
            output_tokens=self.output_tokens + usage.output_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            total_cost=self.total_cost + usage.cost,
            llm_call_count=self.llm_call_count + 1,
            latency_s=self.latency_s + usage.latency_s,
        )
