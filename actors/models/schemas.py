"""JSON schemas of tools: converted so that every provider accepts them; and the check of arguments.

`api_schema` returns the schema that a model is given. All three APIs want an object at the top, not
a combination of schemas. One of them wants `items` in every array; another restricts the names of
properties and checks the whole schema against draft 2020-12, with its patterns. A single tool that
breaks one of these rules makes the provider refuse every request of its agent.

`find_misfit` checks arguments against a schema. It checks the keywords that models get wrong:
types, enumerations, required and additional properties, items, bounds, and combinations of schemas.
It ignores other keywords (formats, patterns, conditions), which the tool itself has to check.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeGuard
from urllib.parse import unquote

from ..values.frozen import FrozenObject
from ..values.type_names import a_type

__all__ = ["api_schema", "find_misfit"]

Schema: TypeAlias = Mapping[str, object]

_DEPTH_MAX = 100
_PROPERTY_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_COMBINATIONS = ("allOf", "anyOf", "oneOf")
_NOT_AT_THE_TOP = (*_COMBINATIONS, "$ref", "const", "else", "enum", "if", "not", "then")
_SCHEMAS = (
    *("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = (*_COMBINATIONS, "prefixItems")
_TABLES = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


# --- schemas for the providers -------------------------------------------------------------------


def api_schema(schema: Schema) -> FrozenObject:
    """Return this schema of a tool's arguments as the providers' APIs accept it.

    A combination of schemas at the top becomes one object with the properties of all of them. Forms
    of earlier drafts are written as draft 2020-12 writes them. Patterns that Python cannot read,
    though JavaScript may, are left out: providers refuse them. Raises `ValueError`, with the place,
    if no API would take the schema.
    """
    _check_references(schema, schema)
    top = _resolved(schema, schema)
    if top.get("type", "object") != "object":
        raise ValueError(f"type: the arguments are an object, not {top['type']!r}")
    properties: dict[str, object] = {}
    for part in _parts(top, schema, _COMBINATIONS):
        for name, one in _table(part.get("properties", {}), "properties").items():
            properties.setdefault(name, one)
    required: dict[str, None] = {}
    for part in _parts(top, schema, ("allOf",)):
        names = part.get("required", ())
        if _is_list_of_names(names):
            required.update(dict.fromkeys(names))
    whole = {key: value for key, value in top.items() if key not in _NOT_AT_THE_TOP}
    whole |= {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    whole |= {"type": "object", "properties": properties}
    if required:
        whole["required"] = list(required)
    mended = _mended_object(whole, "", 1)
    _check_references(mended, mended)  # a part that was left out may have been referred to
    return FrozenObject(mended)


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Return the schema that a chain of references within `root` ends at."""
    for _ in range(_DEPTH_MAX):
        reference = schema.get("$ref")
        if reference is None:
            return schema
        target = _referred(reference, root)
        if isinstance(target, bool):
            raise ValueError(f"$ref: {reference!r} is no schema of an object")  # noqa: TRY004 - the schema is at fault
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    raise ValueError("$ref: the references go round in a circle")


def _referred(reference: object, root: Schema) -> Schema | bool:
    target: object = root
    for step in str(reference).split("/")[1:]:
        target = _entry(target, step)
    if not str(reference).startswith("#") or not isinstance(target, Mapping | bool):
        raise ValueError(f"$ref: {reference!r} is not in the schema")
    return target


def _entry(target: object, step: str) -> object:
    """Return the entry that one step of a reference leads to; None if there is none."""
    name = step.replace("~1", "/").replace("~0", "~")
    if isinstance(target, list | tuple):
        return target[int(name)] if name.isdecimal() and int(name) < len(target) else None
    if not isinstance(target, Mapping):
        return None
    return target[name] if name in target else target.get(unquote(name))


def _check_references(schema: object, root: Schema, depth: int = 1) -> None:
    """Raise `ValueError` if a reference into the schema leads nowhere: providers refuse it.

    References that lead out of the schema are not checked, nor are parts with an `$id`: a part is
    the root of its own references.
    """
    if depth > _DEPTH_MAX:
        raise ValueError(f"nested more than {_DEPTH_MAX} deep")
    if isinstance(schema, list | tuple):
        for part in schema:
            _check_references(part, root, depth + 1)
    if not isinstance(schema, Mapping) or ("$id" in schema and schema is not root):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        _referred(reference, root)
    for key in (*_SCHEMAS, *_LISTS):
        _check_references(schema.get(key), root, depth + 1)
    for key in _TABLES:
        if isinstance(table := schema.get(key), Mapping):
            for one in table.values():
                _check_references(one, root, depth + 1)


def _parts(
    schema: Schema, root: Schema, combinations: Sequence[str], depth: int = 1
) -> Iterator[Schema]:
    """Yield this schema and those that it combines."""
    yield schema
    if depth > _DEPTH_MAX:
        raise ValueError(f"nested more than {_DEPTH_MAX} deep")
    for key in combinations:
        parts = schema.get(key, ())
        for part in parts if isinstance(parts, list | tuple) else ():
            if isinstance(part, Mapping):
                yield from _parts(_resolved(part, root), root, combinations, depth + 1)


def _mended(schema: object, at: str, depth: int) -> object:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"{at}: a schema is an object, not {a_type(schema)}")  # noqa: TRY004 - the schema is at fault
    if depth > _DEPTH_MAX:
        raise ValueError(f"nested more than {_DEPTH_MAX} deep")
    return _mended_object(schema, f"{at}.", depth)


def _mended_object(schema: Schema, at: str, depth: int) -> Mapping[str, object]:
    """Return this schema as draft 2020-12 and the providers want it, or raise `ValueError`."""
    mended = _without_odd_patterns(_brought_up_to_date(schema))
    for key, value in mended.items():
        if key in _SCHEMAS:
            mended[key] = _mended(value, f"{at}{key}", depth + 1)
        elif key in _LISTS:
            if not isinstance(value, list | tuple) or not value:
                raise ValueError(f"{at}{key}: not a list of schemas")
            mended[key] = [
                _mended(part, f"{at}{key}.{n}", depth + 1) for n, part in enumerate(value)
            ]
        elif key in _TABLES:
            mended[key] = {
                name: _mended(one, f"{at}{key}.{name}", depth + 1)
                for name, one in _table(value, f"{at}{key}").items()
            }
        elif key in _VALUES and not _VALUES[key](value):
            raise ValueError(f"{at}{key}: {a_type(value)} that does not belong there")
    for name in _table(mended.get("properties", {}), f"{at}properties"):
        if not _PROPERTY_NAME.fullmatch(name):
            raise ValueError(
                f"{at}properties: the name {name!r}; a name has 1 to 64 of the letters a to z, "
                "digits, `_`, `.` and `-`, or providers refuse it"
            )
    if "items" not in mended and "array" in _types(mended):
        mended["items"] = {}
    return mended


def _brought_up_to_date(schema: Schema) -> dict[str, object]:
    """Rewrite forms of earlier drafts, which many tools still use, as in draft 2020-12."""
    new = dict(schema)
    items = new.get("items")
    if isinstance(items, list | tuple):
        new["items"] = new.pop("additionalItems", {})
        if items:
            new["prefixItems"] = items
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(new.get(exclusive), bool) and new.pop(exclusive) and bound in new:
            new[exclusive] = new.pop(bound)
    if isinstance(new.get("required"), bool):
        del new["required"]
    if new.get("type") == "any":
        del new["type"]
    return new


def _without_odd_patterns(schema: dict[str, object]) -> dict[str, object]:
    """Leave out the patterns that Python cannot read. Arguments are not checked by patterns.

    Other properties are then allowed, since one of such a pattern would be among them.
    """
    if not _is_readable(schema.get("pattern")):
        del schema["pattern"]
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, Mapping):
        readable = {name: one for name, one in by_pattern.items() if _is_readable(name)}
        schema["patternProperties"] = readable
        if len(readable) < len(by_pattern) and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
    return schema


def _is_readable(pattern: object) -> bool:
    """Return False for a text that is no regular expression of Python's."""
    if isinstance(pattern, str):
        with warnings.catch_warnings(action="ignore"):
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError):
                return False
    return True


def _table(value: object, at: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{at}: not a table of schemas")  # noqa: TRY004 - the schema is at fault
    return value


def _types(schema: Schema) -> Sequence[object]:
    found = schema.get("type", ())
    return found if isinstance(found, list | tuple) else (found,)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_above_zero(value: object) -> bool:
    return _is_number(value) and value > 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _is_list_of_names(value: object) -> TypeGuard[Sequence[str]]:
    if not _is_list(value) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value)


def _is_table_of_names(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_list_of_names, value.values()))


def _is_type(value: object) -> bool:
    names = (value,) if isinstance(value, str) else value
    return _is_list_of_names(names) and bool(names) and all(name in _FITS for name in names)


_VALUES: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("maxContains", "maxItems", "maxLength", "maxProperties"), _is_count),
    **dict.fromkeys(("minContains", "minItems", "minLength", "minProperties"), _is_count),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), _is_number),
    **dict.fromkeys(("$comment", "$id", "$ref", "$schema", "description", "title"), _is_text),
    **dict.fromkeys(("contentEncoding", "contentMediaType", "format", "pattern"), _is_text),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$dynamicRef"), _is_text),
    **dict.fromkeys(("deprecated", "readOnly", "uniqueItems", "writeOnly"), _is_flag),
    **dict.fromkeys(("enum", "examples"), _is_list),
    "multipleOf": _is_above_zero,
    "required": _is_list_of_names,
    "dependentRequired": _is_table_of_names,
    "type": _is_type,
}
"""Checks of keywords' values; a keyword that is not here may have any value."""

_FOUND_LENGTH_MAX = 500


# --- checking arguments --------------------------------------------------------------------------


def find_misfit(schema: Schema, value: object) -> str | None:
    """Return why this JSON value does not fit the schema, with the place; None if it fits."""
    return _Check(schema).find(schema, value, "")


class _Check:
    """Checks one value, each part of it against each part of the schema at most once."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # By identity: the value and the schema outlive the check. A part that is being checked
        # counts as fitting, so references that go round in a circle end.
        self._known: dict[tuple[int, int], str | None] = {}

    def find(self, schema: object, value: object, at: str) -> str | None:
        key = (id(schema), id(value))
        if key not in self._known:
            self._known[key] = None
            self._known[key] = next(self._misfits(schema, value, at), None)
        return self._known[key]

    def _misfits(self, schema: object, value: object, at: str) -> Iterator[str]:
        place = at or "the arguments"
        if schema is False:
            yield f"{place}: not allowed"
        if not isinstance(schema, Mapping):
            return
        types = _types(schema)
        if types and not any(_fits(name, value) for name in types):
            yield f"{place}: it takes {' or '.join(map(str, types))}"
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if _is_list(allowed) and not any(_is_same(value, one) for one in allowed):
            yield f"{place}: it takes one of {', '.join(map(repr, allowed))}"[:_FOUND_LENGTH_MAX]
        if isinstance(value, Mapping):
            yield from self._object_misfits(schema, value, at)
        elif isinstance(value, list | tuple):
            yield from self._array_misfits(schema, value, at)
        elif isinstance(value, str):
            yield from _bound_misfits(schema, len(value), "Length", "characters", place)
        elif _is_number(value):
            yield from _number_misfits(schema, value, place)
        yield from self._combination_misfits(schema, value, at)

    def _object_misfits(
        self, schema: Schema, value: Mapping[str, object], at: str
    ) -> Iterator[str]:
        place = at or "the arguments"
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        for name in required if _is_list(required) else ():
            if name not in value:
                yield f"{_inside(at, name)}: it is required"
        yield from _bound_misfits(schema, len(value), "Properties", "properties", place)
        if not isinstance(properties, Mapping):
            return
        # A property that only a pattern names is left to the tool.
        extra = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, one in value.items():
            if name not in properties and extra is False:
                yield f"{_inside(at, name)}: there is no such property"
            elif misfit := self.find(properties.get(name, extra), one, _inside(at, name)):
                yield misfit

    def _array_misfits(self, schema: Schema, value: Sequence[object], at: str) -> Iterator[str]:
        yield from _bound_misfits(schema, len(value), "Items", "items", at or "the arguments")
        first = schema.get("prefixItems", ())
        firsts = first if _is_list(first) else ()
        for n, one in enumerate(value):
            own = firsts[n] if n < len(firsts) else schema.get("items", True)
            if misfit := self.find(own, one, _inside(at, n)):
                yield misfit

    def _combination_misfits(self, schema: Schema, value: object, at: str) -> Iterator[str]:
        place = at or "the arguments"
        if "$ref" in schema and (misfit := self._find_referred(schema["$ref"], value, at)):
            yield misfit
        for key in _COMBINATIONS:
            parts = schema.get(key)
            if not _is_list(parts):
                continue
            found = [self.find(part, value, at) for part in parts]
            fitting = found.count(None)
            if key == "allOf":
                yield from (one for one in found if one is not None)
            elif not fitting:
                yield f"{place}: it fits none of {len(parts)} forms; the first: {found[0]}"
            elif key == "oneOf" and fitting > 1:
                yield f"{place}: it fits {fitting} forms, and takes only one"
        if "not" in schema and self.find(schema["not"], value, at) is None:
            yield f"{place}: it has a form that is not allowed"

    def _find_referred(self, reference: object, value: object, at: str) -> str | None:
        try:
            return self.find(_referred(reference, self._root), value, at)
        except ValueError:
            return None  # outside the schema: left to the tool


def _bound_misfits(schema: Schema, size: int, what: str, unit: str, place: str) -> Iterator[str]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", size)
    if _is_number(least) and size < least:
        yield f"{place}: it takes {least} {unit} or more"
    if _is_number(most) and size > most:
        yield f"{place}: it takes {most} {unit} or fewer"


def _number_misfits(schema: Schema, value: float, place: str) -> Iterator[str]:
    for key, is_right, word in _LIMITS:
        limit = schema.get(key)
        if _is_number(limit) and not is_right(value, limit):
            yield f"{place}: it takes {word} {limit}"


_LIMITS: Sequence[tuple[str, Callable[[float, float], bool], str]] = (
    ("minimum", operator.ge, "at least"),
    ("maximum", operator.le, "at most"),
    ("exclusiveMinimum", operator.gt, "more than"),
    ("exclusiveMaximum", operator.lt, "less than"),
)


def _inside(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)


def _is_same(one: object, other: object) -> bool:
    """True if two JSON values are equal; unlike in Python, true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


def _fits(type_name: object, value: object) -> bool:
    """True if the value has this type, or if JSON does not have such a type."""
    check = _FITS.get(str(type_name))
    return check is None or check(value)


def _is_integer(value: object) -> bool:
    return _is_number(value) and value == int(value)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


_FITS: Mapping[str, Callable[[object], bool]] = {
    "array": _is_list,
    "boolean": _is_flag,
    "integer": _is_integer,
    "null": lambda value: value is None,
    "number": _is_number,
    "object": _is_object,
    "string": _is_text,
}
