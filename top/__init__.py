"""turnkeeper: conversations between people and AI agents, correct under concurrency.

The names of a first program are here, and are loaded when they are first used. All that
applications need is in `turnkeeper.actors`; actors of your own are built on `turnkeeper.runtime`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors.agents.agent import agent
    from .actors.agents.tool_agent import ToolAgent
    from .actors.agents.tools import ToolContext, Tools, tool
    from .actors.agents.turn_context import TurnContext
    from .actors.conversations.conversation import Conversation
    from .actors.conversations.conversations import ConversationConfig, Conversations
    from .actors.conversations.turn import Turn, TurnEnd
    from .actors.core.condensation import RollingCondenser, SummarizingCondenser
    from .actors.journals.memory import MemoryJournal
    from .actors.journals.postgres.journal import PostgresJournal
    from .actors.journals.sqlite.journal import SQLiteJournal
    from .actors.journals.sqlite.state import ConversationState
    from .actors.models.base import ModelResponse
    from .actors.models.scripted import ScriptedModel
    from .actors.tool_calls import ToolCall, ToolResult
    from .runtime import (
        Actor,
        Message,
        OutcomeUnknown,
        OwnershipLost,
        Refused,
        Runtime,
        TurnkeeperError,
        Unavailable,
    )

    __version__: str

__all__ = [
    "Actor",
    "Conversation",
    "ConversationConfig",
    "ConversationState",
    "Conversations",
    "MemoryJournal",
    "Message",
    "ModelResponse",
    "OutcomeUnknown",
    "OwnershipLost",
    "PostgresJournal",
    "Refused",
    "RollingCondenser",
    "Runtime",
    "SQLiteJournal",
    "ScriptedModel",
    "SummarizingCondenser",
    "ToolAgent",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "Tools",
    "Turn",
    "TurnContext",
    "TurnEnd",
    "TurnkeeperError",
    "Unavailable",
    "__version__",
    "agent",
    "tool",
]

_PLACE_OF = {
    "Actor": "runtime",
    "Conversation": "actors.conversations.conversation",
    "ConversationConfig": "actors.conversations.conversations",
    "ConversationState": "actors.journals.sqlite.state",
    "Conversations": "actors.conversations.conversations",
    "MemoryJournal": "actors.journals.memory",
    "Message": "runtime",
    "ModelResponse": "actors.models.base",
    "OutcomeUnknown": "runtime",
    "OwnershipLost": "runtime",
    "PostgresJournal": "actors.journals.postgres.journal",
    "Refused": "runtime",
    "RollingCondenser": "actors.core.condensation",
    "Runtime": "runtime",
    "SQLiteJournal": "actors.journals.sqlite.journal",
    "ScriptedModel": "actors.models.scripted",
    "SummarizingCondenser": "actors.core.condensation",
    "ToolAgent": "actors.agents.tool_agent",
    "ToolCall": "actors.tool_calls",
    "ToolContext": "actors.agents.tools",
    "ToolResult": "actors.tool_calls",
    "Tools": "actors.agents.tools",
    "Turn": "actors.conversations.turn",
    "TurnContext": "actors.agents.turn_context",
    "TurnEnd": "actors.conversations.turn",
    "TurnkeeperError": "runtime",
    "Unavailable": "runtime",
    "agent": "actors.agents.agent",
    "tool": "actors.agents.tools",
}
# Packages with more public names, which this face leaves to them.
_FACES = ("actors", "runtime")


def __getattr__(name: str) -> object:
    """Load a name where it is first used. Raises ImportError if another module has it."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - slow to load, and seldom asked for

        value: object = version("turnkeeper")
    elif name in _PLACE_OF:
        value = getattr(import_module(f".{_PLACE_OF[name]}", __name__), name)
    else:
        for face in () if name.startswith("_") or name in _FACES else _FACES:
            if hasattr(import_module(f".{face}", __name__), name):
                raise ImportError(f"{name} is in {__name__}.{face}", name=name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
