"""The faults of a request: where it is wrong and what is allowed there; never its content.

A problem document lists them in `errors`, as RFC 9457 has it: each has a `detail`, and `pointer` (a
JSON Pointer into the body), `parameter` (a part of the address) or `header`. Names and rules come
from our own models and signatures. So nothing that a client sent comes back, or gets into logs of
responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request

from ..errors import InvalidInput
from .problems import OWN, ProblemRaised
from .wire import Json

__all__ = [
    "PROBLEM",
    "PROBLEMS",
    "OwnRoute",
    "argument_faults",
    "invalid_id",
    "unusable",
    "validation_faults",
]

FAULTS_MAX = 20
ID_RULE = "must have 1 to 256 characters, without control characters and slashes"

_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["detail"],
                "properties": {
                    "detail": {"type": "string"},
                    "pointer": {"type": "string"},
                    "parameter": {"type": "string"},
                    "header": {"type": "string"},
                },
            },
        },
    },
}
"""The JSON schema of a problem document."""

PROBLEM: dict[str, Any] = {
    "description": "A problem document (RFC 9457).",
    "content": {"application/problem+json": {"schema": _SCHEMA}},
}
"""A response with a problem document, for the OpenAPI document."""
PROBLEMS: dict[int | str, dict[str, Any]] = {"default": PROBLEM}
"""The responses of each route that are not named there."""

_RULES = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "enum": "must be {expected}",
    "greater_than_equal": "must be {ge} or more",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_type": "must be a whole number",
    "json_invalid": "must be JSON",
    "less_than_equal": "must be {le} or less",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is required",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a text",
    "string_unicode": "must be valid Unicode",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have {min_length} or more items",
}
"""The rules by pydantic's error type. Pydantic's messages may quote the input; these cannot."""

_FIELDS = {
    "a chat message with its images and files": "content",
    "a file": "files",
    "a label": "labels",
    "a tool_call_id": "answers",
    "an event id": "event_ids",
    "the address of a file": "files",
    "the answer to a call, if not True or False,": "answers",
    "the media type of a file": "files",
    "the name of a file": "files",
    "the name of a label": "labels",
    "the url of a file": "files",
}
"""The field of a body that an argument is a part of, if the two names differ."""
_KEYS = ("message_id", "change_id")
"""The arguments that come in the header `Idempotency-Key`."""


def unusable(detail: str, **place: str) -> ProblemRaised:
    """Return the problem of a request that is wrong at this place."""
    return ProblemRaised(OWN["invalid-request"], {"errors": [{**place, "detail": detail}]})


class OwnRoute(APIRoute):
    """A route of our own API, which refuses a query parameter that is unknown or comes twice."""

    def check_parameters(self, request: Request, *, takes_others: bool) -> None:
        """Raise the problem of a request with a parameter that is unknown or comes twice.

        `takes_others`: let unknown parameters through.
        """
        given = request.query_params
        if not given:
            return
        names = dict.fromkeys(_parameters_of(self.dependant))
        if not takes_others and any(name not in names for name in given):
            allowed = f"these parameters only: {', '.join(names)}" if names else "no parameters"
            raise unusable(f"the address may have {allowed}", parameter="")
        if len(given.multi_items()) > len(given):
            for name in names:
                if len(given.getlist(name)) > 1:
                    raise unusable("must come once", parameter=name)


def _parameters_of(dependant: Dependant) -> Iterator[str]:
    """Yield the names of the query parameters that a route takes, itself or by its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _parameters_of(each)


def invalid_id(**place: str) -> ProblemRaised:
    """Return the problem of an id at this place that no conversation can have."""
    return ProblemRaised(OWN["invalid-id"], {"errors": [{**place, "detail": ID_RULE}]})


def validation_faults(error: RequestValidationError, request: Request) -> Json:
    """Return the facts of a request whose body or parameters do not match their types."""
    model = _body_of(request)
    found: list[Mapping[str, str]] = []
    for each in error.errors():
        place, *rest = each["loc"]
        if place == "body":
            parts, fields = _walk(model, rest)
            fault = {"pointer": "".join(["#", *(f"/{part}" for part in parts)])}
        else:
            fields = ()
            fault = {"header" if place == "header" else "parameter": str(rest[0]) if rest else ""}
        fault["detail"] = _rule_of(each["type"], each.get("ctx") or {}, fields)
        if fault not in found:
            found.append(fault)
        if len(found) == FAULTS_MAX:
            break
    return {"errors": found}


def argument_faults(error: InvalidInput, request: Request) -> Json:
    """Return the facts of a request with an argument that the conversation refused."""
    if not error.rule:
        return {}
    return {"errors": [{**_place_of(error.argument, request), "detail": error.rule}]}


def _rule_of(kind: str, context: Mapping[str, object], fields: Sequence[str]) -> str:
    if kind == "extra_forbidden":
        return f"may have these members only: {', '.join(fields)}"
    if kind == "whole":
        return str(context["rule"])
    rule = _RULES.get(kind, "is invalid")
    return rule.format_map(context) if "{" in rule else rule


def _place_of(argument: str, request: Request) -> Mapping[str, str]:
    name = _FIELDS.get(argument, argument)
    fields = _fields_of(_body_of(request))
    for known in (name, "messages"):  # other protocols have a whole message in there
        if known in fields:
            return {"pointer": f"#/{known}"}
    if argument in _KEYS:
        return {"header": "idempotency-key"}
    return {"parameter": name} if name.isidentifier() else {}


# --- the models of bodies -------------------------------------------------------------------------


def _body_of(request: Request) -> object:
    """Return the type of the body that the route takes; None if it takes none."""
    field = getattr(request.scope.get("route"), "body_field", None)
    return None if field is None else field.field_info.annotation


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in a type, also those inside a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _fields_of(annotation: object) -> Mapping[str, object]:
    """Return the types of the members of an object, by their names on the wire."""
    return {
        field.alias or name: field.annotation
        for model in _models_in(annotation)
        for name, field in model.model_fields.items()
    }


def _walk(annotation: object, location: Sequence[int | str]) -> tuple[list[str], Sequence[str]]:
    """Return the parts of a location that we may name, and the members that are allowed at its end.

    A name that is not a field comes from the client, or is pydantic's name for a branch of a union.
    """
    parts: list[str] = []
    fields = _fields_of(annotation)
    for part in location:
        if isinstance(part, int):
            if parts:  # else it is the position in a body that is not JSON
                parts.append(str(part))
        elif part in fields:
            parts.append(part)
            fields = _fields_of(fields[part])
    return parts, tuple(fields)
