"""What a user of the conversation core may write; the type checker must find nothing here."""

from collections.abc import Sequence
from typing import assert_type

from turnkeeper.actors.core.admission import Appended, Duplicate, Rejected, Violation
from turnkeeper.actors.core.condensation import (
    CondensationPlan,
    Condenser,
    Need,
    PipelineCondenser,
    Proposal,
    RollingCondenser,
    SummarizingCondenser,
    check_proposal,
)
from turnkeeper.actors.core.status import AgentExecutionStatus
from turnkeeper.actors.core.view import View
from turnkeeper.actors.events import (
    ActionEvent,
    Event,
    LLMConvertibleEvent,
    Task,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from turnkeeper.actors.journals.sqlite.state import ConversationState
from turnkeeper.actors.models.messages import LLMMessages, to_llm_messages


def events(event: UserMessageEvent, action: ActionEvent) -> None:
    assert_type(encode_event(event), bytes)
    assert_type(decode_event(b""), Event)
    assert_type(Event.model_validate_json("{}"), Event)
    assert_type(UserMessageEvent.model_validate_json("{}"), UserMessageEvent)
    assert_type(list(action.arguments), list[str])
    assert_type(event.content, str)


def states() -> None:
    state = ConversationState(persistence_dir="folder", conversation_id="c")
    assert_type(state.append_event(UserMessageEvent(content="x")), Appended | Duplicate)
    outcome = state.append_event(UserMessageEvent(content="x"), raises=False)
    assert_type(outcome, Appended | Duplicate | Rejected)
    assert_type(state.events, Sequence[Event])
    assert_type(state.view, View)
    assert_type(state.agent_execution_status, AgentExecutionStatus)
    assert_type(state.conversation_history, tuple[LLMConvertibleEvent, ...])
    assert_type(state.task_list, tuple[Task, ...])
    assert_type(state.metrics.total_cost, float)
    assert_type(state.violations, tuple[Violation, ...])
    assert_type(state.at(3), ConversationState)


def views(view: View) -> None:
    assert_type(view[0], LLMConvertibleEvent)
    assert_type(view[1:], Sequence[LLMConvertibleEvent])
    assert_type(view.find_next(2), int | None)
    messages = to_llm_messages(view, "anthropic")
    assert_type(messages, LLMMessages)
    assert_type(messages.system, str)


class Own:
    def need(self, view: View) -> Need | None:
        return "hard" if len(view) > 3 else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        return Proposal((view[0].id,)) if need == "hard" else None


async def summarize(history: str) -> str:
    return history[:10]


def condensers(shown: View, now: View) -> Sequence[Condenser]:
    assert_type(check_proposal(Proposal(()), shown, now), CondensationPlan | str)
    rolling = RollingCondenser(max_size=100)
    return [Own(), PipelineCondenser(SummarizingCondenser(summarize, rolling))]
