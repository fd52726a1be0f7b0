"""Bodies: those of other protocols, read in part, and bounds on the faults of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .access import Action
from .faults import invalid_id
from .names import is_new_id
from .service import ConversationCaller, May, Service

__all__ = ["PART_RULE", "Given", "Items", "MayByBody", "keep_one_unknown", "one_unknown"]

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of any length. It is checked up to its first fault: an error for each item that is wrong
would take a thousand times the memory of a body that has nothing else, and stop the event loop."""


def keep_one_unknown(given: object, fields: Mapping[str, object]) -> object:
    """Return an object without its unknown members except the first.

    Pydantic makes an error for each of them, which took the event loop 4 s for a body that has
    nothing else. One is enough: the error says which members are allowed, and names no other.
    """
    if not isinstance(given, dict):
        return given
    known = {name: given[name] for name in fields if name in given}
    if len(known) == len(given):
        return given
    unknown = next(name for name in given if name not in fields)
    return {**known, unknown: given[unknown]}


def one_unknown(model: type[BaseModel]) -> BeforeValidator:
    """Let a model that refuses unknown members make an error for one of them only."""
    return BeforeValidator(lambda given: keep_one_unknown(given, model.model_fields))


PART_RULE = "each part must be a text, or a file as base64 or by its web address"


class Given(BaseModel):
    """The fields that are read of an object that a client sends; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class MayByBody(May):
    """Admits a request if its sender may do this to the conversation that the body names."""

    def __init__(self, action: Action, field: str) -> None:
        super().__init__(action)
        self._field = field

    async def __call__(self, request: Request) -> ConversationCaller:
        service: Service = request.app.state.service
        # A request without a body is refused when the body is checked against its model.
        body = await request.json() if await request.body() else None
        local_id = body.get(self._field) if isinstance(body, dict) else None
        if not isinstance(local_id, str):
            local_id = ""
        principal = await service.admit(request, self.action, local_id)
        # In a path, an id that begins with a tilde would mean another conversation.
        if not is_new_id(local_id) or local_id.startswith("~"):
            raise invalid_id(pointer=f"#/{self._field}")
        return await service.caller_in(principal, local_id)
