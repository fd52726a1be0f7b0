"""What the type checker must reject: each line that it lets pass is an unused ignore, an error."""

from turnkeeper.actors.core.condensation import Condenser, SummarizingCondenser
from turnkeeper.actors.core.view import View
from turnkeeper.actors.events import ActionEvent, UserMessageEvent
from turnkeeper.actors.journals.sqlite.state import ConversationState
from turnkeeper.actors.models.messages import to_llm_messages


def events(action: ActionEvent) -> None:
    action.arguments["at"] = 1  # type: ignore[index]
    action.arguments.update(at=1)  # type: ignore[attr-defined]
    action.thinking.append(1)  # type: ignore[attr-defined]
    UserMessageEvent(content=1)  # type: ignore[arg-type]
    UserMessageEvent()  # type: ignore[call-arg]


def views(view: View, state: ConversationState) -> None:
    view[0] = view[1]  # type: ignore[index]
    view.append(view[0])  # type: ignore[attr-defined]
    view.manipulation_indices[0] = 3  # type: ignore[index]
    to_llm_messages(view, "gemini")  # type: ignore[arg-type]
    messages = to_llm_messages(view)
    messages[0]["role"] = "system"  # type: ignore[index]
    state.append_event("hello")  # type: ignore[call-overload]
    _ = state.append_event(view[0]).violation  # type: ignore[union-attr]


class Blind:
    def need(self, view: View) -> bool:
        return bool(view)


def condensers() -> Condenser:
    SummarizingCondenser(lambda history: history)  # type: ignore[arg-type,return-value]
    return Blind()  # type: ignore[return-value]
