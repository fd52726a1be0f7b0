"""Logs with a story: who said what when, and what ran meanwhile; written as an owner writes them.

The times are chosen, so that a picture of the same story is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    ConversationChangedEvent,
    Event,
    MessageQueuedEvent,
    ObservationEvent,
    PausedEvent,
    ResumedEvent,
    RetractionEvent,
    StepFinishedEvent,
    StepRequest,
    StepUnfinishedEvent,
    SystemPromptEvent,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Journal

__all__ = ["BEGAN", "Story", "refund", "refund_story", "research_story", "team_story"]

BEGAN = datetime(2026, 3, 14, 9, 30, tzinfo=UTC)
Outcome = Literal["completed", "interrupted", "failed", "rolled_back"]


async def refund(order: int) -> str:
    """Pay an order back."""
    return f"order {order} is paid back"


class Story:
    """A log that is being told. Times are seconds after its beginning, and never go back."""

    def __init__(self, name: str, began: datetime = BEGAN, title: str = "") -> None:
        self.name = name
        self.events: list[Event] = []
        self.state = Folded()
        self._began = began
        self._now = 0.0
        self._turn: str | None = None
        self._turns = 0
        self._calls = 0
        self._waiting: dict[str, MessageQueuedEvent] = {}
        if title:
            self.add(ConversationChangedEvent, title=title)

    def at(self, seconds: float) -> Story:
        assert seconds >= self._now, (seconds, self._now)
        self._now = seconds
        return self

    def add(self, kind: type[Event], **fields: object) -> Event:
        number = len(self.events) + 1
        event = kind.model_validate(
            {
                "id": f"{self.name}-{number:07d}",
                "timestamp": self._began + timedelta(seconds=self._now),
                "turn_id": self._turn,
                **fields,
            }
        )
        self.events.append(event)
        self.state.fold(event)
        return event

    @property
    def seq(self) -> int:
        return len(self.events)

    # --- people ---------------------------------------------------------------------------------

    def says(self, message_id: str, text: str, **fields: object) -> None:
        """Begin a turn with a message, or with one that waits."""
        self._turns += 1
        waited = self._waiting.pop(message_id, None)
        self._turn = waited.turn_id if waited else f"{self.name}-turn-{self._turns}"
        self.add(TurnStartedEvent)
        queued = waited.id if waited else None
        self.add(
            UserMessageEvent, content=text, message_id=message_id, queued_event_id=queued, **fields
        )

    def queues(self, message_id: str, text: str, *, steers: bool = False) -> None:
        """Let a message come while the turn runs."""
        turn = self._turn
        waits_in = f"{self.name}-turn-of-{message_id}"
        event = self.add(
            MessageQueuedEvent,
            content=text,
            message_id=message_id,
            turn_id=waits_in,
            steers=turn if steers else None,
        )
        assert isinstance(event, MessageQueuedEvent)
        self._waiting[message_id] = event

    def joins(self, message_id: str) -> None:
        """Let a message that steers become a part of the turn."""
        waited = self._waiting.pop(message_id)
        self.add(
            UserMessageEvent,
            content=waited.content,
            message_id=message_id,
            queued_event_id=waited.id,
        )

    def cut_off(self, said: str, *, took: float) -> None:
        """Let the model, which was asked `took` seconds ago, be stopped while it writes."""
        request = StepRequest(view_seq=self.seq, model="model-large")
        self.add(AgentMessageEvent, content=said, interrupted=True)
        usage = TokenUsage(latency_s=took)
        self.add(StepUnfinishedEvent, outcome="interrupted", usage=usage, request=request)

    def interrupts(self, message_id: str, text: str) -> None:
        self.ends("interrupted", f"interrupted by chat message {message_id}")
        self.says(message_id, text)

    def rolls_back(self, message_id: str, text: str) -> None:
        gone = [event.id for event in self.state.view if event.turn_id == self._turn]
        self.add(RetractionEvent, retracted_event_ids=gone)
        self.ends("rolled_back", f"rolled back by chat message {message_id}")
        self.says(message_id, text)

    def pauses(self) -> None:
        self.add(PausedEvent)

    def resumes(self) -> None:
        self.add(ResumedEvent)

    # --- the agent ------------------------------------------------------------------------------

    def calls(
        self, *tools: tuple[str, Mapping[str, object]], text: str = "", took: float
    ) -> Sequence[str]:
        """Let the model, which was asked `took` seconds ago, call tools."""
        view_seq = self.seq
        ids = []
        for number, (tool, arguments) in enumerate(tools):
            self._calls += 1
            ids.append(f"call-{self._calls}")
            self.add(
                ActionEvent,
                tool_call_id=ids[-1],
                tool_name=tool,
                arguments=dict(arguments),
                llm_response_id=f"{self.name}-response-{view_seq}",
                text="" if number else text,
            )
        self._step(view_seq, took)
        return ids

    def _step(self, view_seq: int, took: float) -> None:
        seen = sum(len(getattr(event, "content", "")) for event in self.state.view)
        usage = TokenUsage(
            input_tokens=seen // 4 + 40, output_tokens=36, latency_s=took, model="model-large"
        )
        request = StepRequest(view_seq=view_seq, model="model-large")
        self.add(StepFinishedEvent, usage=usage, request=request)

    def results(self, call_id: str, content: str, **fields: object) -> None:
        self.add(ObservationEvent, tool_call_id=call_id, content=content, **fields)

    def gives_up(self, call_id: str, content: str = "interrupted", **fields: object) -> None:
        self.add(AgentErrorEvent, tool_call_id=call_id, content=content, **fields)

    def asks(self, *call_ids: str) -> None:
        self.add(ConfirmationRequestedEvent, tool_call_ids=call_ids)

    def confirmed(self) -> None:
        self.add(ConfirmationGivenEvent, confirmed=True)

    def answers(self, text: str, *, took: float) -> None:
        """Let the model, which was asked `took` seconds ago, answer, and end the turn."""
        view_seq = self.seq
        self.add(AgentMessageEvent, content=text)
        self._step(view_seq, took)
        self.ends("completed")

    def ends(self, outcome: Outcome, detail: str | None = None) -> None:
        self.add(TurnEndedEvent, outcome=outcome, detail=detail)
        self._turn = None

    def condenses(self, summary: str, keep: int = 4) -> None:
        """Forget all but the newest events of the view."""
        gone = [event.id for event in self.state.view][:-keep]
        self.add(CondensationEvent, forgotten_event_ids=gone, summary=summary, summary_offset=0)

    def prompt(self, text: str) -> None:
        self.add(SystemPromptEvent, content=text)

    # --- into a journal -------------------------------------------------------------------------

    async def write(self, journal: Journal) -> None:
        claim = await journal.claim(self.name)
        step = 500
        for begin in range(0, len(self.events), step):
            is_last = begin + step >= len(self.events)
            await journal.append(
                self.name,
                [encode_record(event) for event in self.events[begin : begin + step]],
                epoch=claim.epoch,
                expected_seq=begin + 1,
                is_unfinished=False,
                listing=self.state.listing if is_last else None,
            )


def refund_story() -> Story:
    """A question, two tools side by side, a second message that interrupts, a confirmation."""
    story = Story("refund-7", title="Refund of order 7")
    story.prompt("You are the support desk of a bookshop. Ask before you pay back.")
    story.says("m1", "Where are orders 7 and 9? I have been waiting for two weeks now.")
    one, two = story.at(1.4).calls(
        ("look_up", {"order": 7}), ("look_up", {"order": 9}), text="Let me see.", took=1.3
    )
    story.at(2.1).results(one, "order 7 left the warehouse on Monday")
    story.at(4.8).results(two, "order 9 is with the carrier: the parcel was damaged")
    story.at(6.2).cut_off("Order 7 left on Mon", took=1.3)
    story.interrupts("m2", "Never mind 9. Just pay order 7 back.")
    (call,) = story.at(8.0).calls(("refund", {"order": 7}), text="I can do that.", took=1.7)
    story.asks(call)
    story.at(13.5).confirmed()
    story.at(14.6).queues("m3", "And send me a receipt, please.")
    story.at(15.9).results(call, "order 7 is paid back")
    story.at(17.2).answers("Order 7 is paid back. It takes two days to arrive.", took=1.2)
    story.says("m3", "And send me a receipt, please.")
    (call,) = story.at(18.1).calls(("send_receipt", {"order": 7}), took=0.8)
    story.at(18.6).results(call, "sent")
    story.at(19.4).answers("The receipt is on its way to you.", took=0.7)
    return story


def research_story() -> Story:
    """Four tools side by side, a message that steers, one that rolls back, a pause."""
    story = Story("research", title="Reading list on fencing tokens")
    story.says("a", "Find papers on fencing tokens, and summarize them.")
    ids = story.at(2.2).calls(
        ("search", {"q": "fencing tokens"}),
        ("search", {"q": "leases"}),
        ("search", {"q": "epoch numbers"}),
        ("read_notes", {}),
        took=2.1,
    )
    story.at(2.9).results(ids[3], "no notes yet")
    story.at(4.0).results(ids[0], "12 papers")
    story.at(4.4).queues("b", "Only those after 2015.", steers=True)
    story.at(5.1).results(ids[2], "3 papers")
    story.at(9.7).results(ids[1], "41 papers")
    story.joins("b")
    story.at(12.0).answers("I found 17 papers after 2015. Shall I summarize them?", took=2.3)
    story.at(20.0).says("c", "Yes, all of them.")
    (call,) = story.at(21.6).calls(("summarize", {"papers": 17}), took=1.5)
    story.at(27.0).gives_up(call, may_have_happened=True)
    story.rolls_back("d", "No, wait: only the three on epochs.")
    (call,) = story.at(28.3).calls(("summarize", {"papers": 3}), took=1.2)
    story.at(29.0).pauses()
    story.at(31.0).results(call, "three summaries")
    story.at(36.0).resumes()
    story.at(38.1).answers("Here are the three summaries.", took=2.0)
    return story


def team_story(turns: int = 6, name: str = "team-standup") -> Story:
    """Turns one after another, with condensations between."""
    story = Story(name, title="Standup of the team")
    at = 0.0
    for n in range(turns):
        story.at(at).says(f"s{n}", f"What is the state of task {n}?", author="mira")
        (call,) = story.at(at + 0.9).calls(("task_state", {"task": n}), took=0.8)
        story.at(at + 1.3).results(call, f"task {n} is {'done' if n % 3 else 'open'}")
        story.at(at + 2.0).answers(f"Task {n} is {'done' if n % 3 else 'open'}.", took=0.6)
        if n % 3 == 2:
            story.condenses(f"Up to task {n} all was told.", keep=3)
        at += 65.0
    return story
