"""The conversation actors: one actor per conversation, the only writer of its event log.

The names that applications need are here, and are loaded when they are first used. The event
classes are in `turnkeeper.actors.events`, the errors in `turnkeeper.actors.errors`, the journals'
port in `turnkeeper.actors.journal`, and the models' in `turnkeeper.actors.models.base`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ != "turnkeeper.actors":
    raise ImportError(
        f"import turnkeeper.actors, not {__name__}: a second copy would share nothing"
    )

if TYPE_CHECKING:
    from .agents.agent import Agent, agent
    from .agents.tool_agent import ConfirmationPolicy, ConfirmRisky, ToolAgent
    from .agents.tools import AfterCall, BeforeCall, Tool, ToolContext, Tools, tool
    from .agents.turn_context import TurnContext
    from .conversations.conversation import Conversation, Follower
    from .conversations.conversations import ConversationConfig, Conversations, Erasure
    from .conversations.turn import Turn, TurnEnd
    from .core.admission import Appended, AppendResult, Duplicate, Rejected, Violation
    from .core.commands import OnOverlap, Sent
    from .core.condensation import (
        Condenser,
        Need,
        PipelineCondenser,
        Proposal,
        RollingCondenser,
        SummarizingCondenser,
    )
    from .core.listing import ConversationPage, ListedConversation
    from .core.metrics import Metrics
    from .core.search import SearchHit, SearchResults
    from .core.status import AgentExecutionStatus
    from .core.stuck import Circle, StuckDetector
    from .core.view import View
    from .events import Event, FileContent, ImageContent, LoggedEvent, Task, TextDelta, TokenUsage
    from .journal import ConversationInfo, Deletion, Journal
    from .journals.memory import MemoryJournal, MemoryStore
    from .journals.postgres.journal import PostgresJournal
    from .journals.sqlite.journal import SQLiteJournal
    from .journals.sqlite.state import ConversationState
    from .models.base import Model, ModelRequest, ModelResponse, Prices, ToolSpec
    from .models.scripted import ScriptedModel
    from .tool_calls import ToolCall, ToolResult
    from .values.frozen import FrozenObject

__all__ = [
    "AfterCall",
    "Agent",
    "AgentExecutionStatus",
    "AppendResult",
    "Appended",
    "BeforeCall",
    "Circle",
    "Condenser",
    "ConfirmRisky",
    "ConfirmationPolicy",
    "Conversation",
    "ConversationConfig",
    "ConversationInfo",
    "ConversationPage",
    "ConversationState",
    "Conversations",
    "Deletion",
    "Duplicate",
    "Erasure",
    "Event",
    "FileContent",
    "Follower",
    "FrozenObject",
    "ImageContent",
    "Journal",
    "ListedConversation",
    "LoggedEvent",
    "MemoryJournal",
    "MemoryStore",
    "Metrics",
    "Model",
    "ModelRequest",
    "ModelResponse",
    "Need",
    "OnOverlap",
    "PipelineCondenser",
    "PostgresJournal",
    "Prices",
    "Proposal",
    "Rejected",
    "RollingCondenser",
    "SQLiteJournal",
    "ScriptedModel",
    "SearchHit",
    "SearchResults",
    "Sent",
    "StuckDetector",
    "SummarizingCondenser",
    "Task",
    "TextDelta",
    "TokenUsage",
    "Tool",
    "ToolAgent",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "ToolSpec",
    "Tools",
    "Turn",
    "TurnContext",
    "TurnEnd",
    "View",
    "Violation",
    "agent",
    "tool",
]

_PLACE_OF = {
    "AfterCall": "agents.tools",
    "Agent": "agents.agent",
    "AgentExecutionStatus": "core.status",
    "Appended": "core.admission",
    "BeforeCall": "agents.tools",
    "Circle": "core.stuck",
    "Condenser": "core.condensation",
    "ConfirmRisky": "agents.tool_agent",
    "ConfirmationPolicy": "agents.tool_agent",
    "Conversation": "conversations.conversation",
    "ConversationConfig": "conversations.conversations",
    "ConversationInfo": "journal",
    "ConversationPage": "core.listing",
    "ConversationState": "journals.sqlite.state",
    "Conversations": "conversations.conversations",
    "Deletion": "journal",
    "Duplicate": "core.admission",
    "Erasure": "conversations.conversations",
    "Event": "events",
    "FileContent": "events",
    "Follower": "conversations.conversation",
    "FrozenObject": "values.frozen",
    "ImageContent": "events",
    "Journal": "journal",
    "ListedConversation": "core.listing",
    "LoggedEvent": "events",
    "MemoryJournal": "journals.memory",
    "MemoryStore": "journals.memory",
    "Metrics": "core.metrics",
    "Model": "models.base",
    "ModelRequest": "models.base",
    "ModelResponse": "models.base",
    "Need": "core.condensation",
    "OnOverlap": "core.commands",
    "AppendResult": "core.admission",
    "PipelineCondenser": "core.condensation",
    "PostgresJournal": "journals.postgres.journal",
    "Prices": "models.base",
    "Proposal": "core.condensation",
    "Rejected": "core.admission",
    "RollingCondenser": "core.condensation",
    "SQLiteJournal": "journals.sqlite.journal",
    "ScriptedModel": "models.scripted",
    "SearchHit": "core.search",
    "SearchResults": "core.search",
    "Sent": "core.commands",
    "StuckDetector": "core.stuck",
    "SummarizingCondenser": "core.condensation",
    "Task": "events",
    "TextDelta": "events",
    "TokenUsage": "events",
    "Tool": "agents.tools",
    "ToolAgent": "agents.tool_agent",
    "ToolCall": "tool_calls",
    "ToolContext": "agents.tools",
    "ToolResult": "tool_calls",
    "ToolSpec": "models.base",
    "Tools": "agents.tools",
    "Turn": "conversations.turn",
    "TurnContext": "agents.turn_context",
    "TurnEnd": "conversations.turn",
    "View": "core.view",
    "Violation": "core.admission",
    "agent": "agents.agent",
    "tool": "agents.tools",
}
# Modules with public names of their own, which this face leaves to them.
_OTHER_FACES = ("errors", "events", "journal", "models.base", "models.messages", "blocking")


def __getattr__(name: str) -> object:
    """Load a name where it is first used. Raises ImportError if another module has it."""
    if name in _PLACE_OF:
        value: object = getattr(import_module(f".{_PLACE_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    for place in () if name.startswith("_") else _OTHER_FACES:
        module = import_module(f".{place}", __name__)
        # Not what that module imports itself.
        if getattr(vars(module).get(name), "__module__", None) == module.__name__:
            raise ImportError(f"{name} is in {__name__}.{place}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
