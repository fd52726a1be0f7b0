"""The checks of the settings of `Conversations`, so that a wrong one is refused before entering.

Each function checks one group of them, and raises `InvalidInput`, which names the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import float_info
from typing import Final, get_args

from turnkeeper.runtime import Runtime

from ..agents.agent import Agent, is_agent
from ..core.commands import check_overlap
from ..core.condensation import Condenser
from ..core.limits import Limits
from ..core.working_state import ConversationSettings, PromptPolicy, Unfinished
from ..errors import InvalidInput
from ..journal import Journal
from ..owner.actor import Verify
from ..values.text import check_id, check_number, check_text, refuse_class
from ..values.type_names import a_type

__all__ = [
    "check_agent",
    "check_parts",
    "check_recovery",
    "check_resources",
    "check_settings",
    "check_system_prompt",
    "check_waits",
    "is_resumable",
]

_WHOLE = "a whole number from 1 on"
_PROMPT_POLICIES: Final[tuple[str, ...]] = get_args(PromptPolicy)
_UNFINISHED: Final[tuple[str, ...]] = get_args(Unfinished)
_VERIFIES: Final[tuple[str, ...]] = get_args(Verify)


def check_settings(settings: ConversationSettings, limits: Limits) -> None:
    """Check the settings that decide what the agent sees and says, and when."""
    most = limits.known_messages_max - 1
    check_number(
        "queued_messages_max",
        settings.queued_messages_max,
        f"a whole number from 1 to {most}",
        least=1,
        most=most,
        is_whole=True,
    )
    check_number("answer_length_max", settings.answer_length_max, "1 or more", least=1)
    if settings.prompt_policy not in _PROMPT_POLICIES:
        raise InvalidInput(
            f'prompt_policy is {settings.prompt_policy!r}; it takes "current" or "pinned"'
        )
    check_overlap(settings.on_overlap)
    check_system_prompt(settings.system_prompt)
    if settings.unfinished not in _UNFINISHED:
        raise InvalidInput(f'unfinished is {settings.unfinished!r}; it takes "end" or "resume"')


def check_parts(
    agent: Agent,
    journal: Journal,
    condenser: Condenser | None,
    configure: Callable[[str], object] | None,
    runtime: Runtime | None,
) -> None:
    """Check the objects that the application hands in."""
    check_agent(agent)
    _check_journal(journal)
    _check_condenser(condenser)
    if runtime is not None and not isinstance(runtime, Runtime):
        raise InvalidInput(f"runtime is {runtime!r}; it takes a Runtime, or None for a new one")
    if configure is not None and not callable(configure):
        raise InvalidInput(
            f"configure is {configure!r}; it takes a function of a conversation's id that "
            "returns a ConversationConfig"
        )


def check_recovery(recover: str, recover_every_s: float, recover_max: int) -> None:
    """Check which unfinished conversations are opened, how often and how many at once."""
    if recover not in ("on_enter", "on_message"):
        raise InvalidInput(f'recover is {recover!r}; it takes "on_enter" or "on_message"')
    check_number(
        "recover_every_s", recover_every_s, "seconds above 0", above=0, most=float_info.max
    )
    check_number("recover_max", recover_max, _WHOLE, least=1, is_whole=True)


def check_resources(
    name: str, idle_s: float | None, active_max: int | None, verify: Verify
) -> None:
    """Check the region's name, and how much the owners keep in memory and verify."""
    check_id("name", name)
    if verify not in _VERIFIES:
        raise InvalidInput(f"verify is {verify!r}; it takes one of {', '.join(_VERIFIES)}")
    if idle_s is not None:
        check_number("idle_s", idle_s, "seconds from 0 on, or None", least=0)
    if active_max is not None:
        check_number("active_max", active_max, f"{_WHOLE}, or None", least=1, is_whole=True)


def check_waits(park_s: float, condense_s: float) -> None:
    """Check how long the owners wait for a call, and for a condenser."""
    check_number("park_s", park_s, "seconds from 0 on", least=0)
    check_number("condense_s", condense_s, "seconds above 0", above=0, most=float_info.max)


def _check_journal(journal: Journal) -> None:
    if isinstance(journal, type) or not callable(getattr(journal, "append", None)):
        raise InvalidInput(
            f"journal is {journal!r}, {a_type(journal)}; it takes a journal, such as "
            'SQLiteJournal("chats.db"), PostgresJournal("postgresql://…") or MemoryJournal()'
        )


def _check_condenser(condenser: Condenser | None) -> None:
    refuse_class("condenser", condenser)
    if condenser is None:
        return
    if not all(callable(getattr(condenser, name, None)) for name in ("need", "propose")):
        raise InvalidInput(
            f"condenser is {condenser!r}; it takes a condenser, such as RollingCondenser(), or one "
            "of your own with the methods `need(view)` and `async propose(view, need)`"
        )


def check_agent(agent: Agent) -> None:
    """Raise `InvalidInput` unless this is an object with `async run(turn)`."""
    refuse_class("agent", agent)
    if not is_agent(agent):
        raise InvalidInput(
            f"an agent needs a method `async run(turn)`, and {agent!r} has none; use @agent to "
            "make one of a function"
        )
    if str(getattr(agent.run, "__module__", "")).startswith("pydantic_ai."):
        raise InvalidInput(
            "an agent of pydantic-ai takes a prompt, and no turn; give PydanticAgent(agent), from "
            "turnkeeper.actors.integrations.pydantic_ai"
        )


def check_system_prompt(system_prompt: str | None) -> None:
    """Raise `InvalidInput` if this is blank, or no text."""
    if system_prompt is not None:
        check_text("system_prompt", system_prompt)
        if not system_prompt.strip():
            raise InvalidInput(
                "the system prompt is blank, which providers refuse; give it a text, or None"
            )


def is_resumable(agent: Agent) -> bool:
    """Return True if the agent says that it can be run again on a turn that has begun."""
    return getattr(agent, "is_resumable", False) is True
