"""A tool call before it is in the log, and the result that answers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .errors import InvalidInput
from .values.text import check_bool
from .values.type_names import a_type

__all__ = ["Risk", "ToolCall", "ToolResult"]

Risk: TypeAlias = Literal["low", "medium", "high"]
"""How much a call can do that cannot be undone."""

RISKS: tuple[Risk, ...] = ("low", "medium", "high")
"""All risks, the lowest first."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asked for, before it is in the log. Its arguments are a JSON object."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    provider_call_id: str | None = None
    malformed_arguments: str | None = None
    """The model's text, if it was no JSON object; `arguments` is empty then."""
    risk: Risk | None = None
    """The risk that its tool declares; None if it declares none."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInput(f"a call's name is a str, and {a_type(self.name)} is not")
        if not isinstance(self.arguments, Mapping):
            raise InvalidInput(
                f"arguments of a call are a dict, and {a_type(self.arguments)} is not"
            )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to a call. Raises `InvalidInput` for a field of another type."""

    content: str
    is_error: bool = False
    may_have_happened: bool = False
    """True if the call may or may not have had its effect; it is not run again to find out."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise InvalidInput(
                f"a result's content is a str, and {type(self.content).__name__} is not"
            )
        check_bool("is_error", self.is_error)
        check_bool("may_have_happened", self.may_have_happened)
