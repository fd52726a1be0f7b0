"""Schemas of tools: rewritten for the providers, and arguments held against them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from turnkeeper.actors.models.schemas import api_schema, find_misfit

VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2, 2.0, 2.5, -1, "", "a", "ab", "abc"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    ),
    max_leaves=5,
)
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                [
                    "string",
                    "integer",
                    "number",
                    "boolean",
                    "null",
                    "array",
                    "object",
                    ["string", "null"],
                ]
            ),
            "enum": st.lists(st.sampled_from([None, True, 1, 0, "a", [1], {"a": 1}]), min_size=1),
            "const": st.sampled_from([None, True, 1, "a"]),
            "minLength": st.integers(0, 2),
            "maxLength": st.integers(0, 2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 2),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 2),
            "minimum": st.integers(0, 2),
            "maximum": st.integers(0, 2),
            "exclusiveMinimum": st.integers(0, 2),
            "exclusiveMaximum": st.integers(0, 2),
            "required": st.lists(st.sampled_from(["a", "b"]), unique=True),
        },
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "$ref": st.just("#/$defs/x"),
        },
    ),
    max_leaves=6,
)


@given(SCHEMAS, LEAVES, VALUES)
def test_a_value_fits_where_the_reference_says_so(schema: Any, referred: Any, value: Any) -> None:  # noqa: ANN401 - JSON
    whole = {**schema, "$defs": {"x": referred}} if isinstance(schema, dict) else {"not": {}}
    expected = Draft202012Validator(whole).is_valid(value)
    found = find_misfit(whole, value)
    assert (found is None) == expected, found


@given(SCHEMAS, LEAVES, st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3))
def test_what_fits_a_schema_fits_what_a_model_is_given_of_it(
    schema: Any,  # noqa: ANN401 - JSON
    referred: Any,  # noqa: ANN401 - JSON
    value: dict[str, Any],
) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"x": referred}}
    given = api_schema(whole)
    Draft202012Validator.check_schema(_plain(given))
    if find_misfit(whole, value) is None:
        assert find_misfit(given, value) is None


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def test_forms_of_a_choice_at_the_top_become_one_object_with_all_their_properties() -> None:
    by_id = {"properties": {"id": {"type": "integer"}}, "required": ["id"]}
    by_name = {"$ref": "#/$defs/named"}
    both = {"properties": {"loud": {"type": "boolean"}}, "required": ["loud"]}
    schema = {
        "anyOf": [by_id, by_name],
        "allOf": [both],
        "$defs": {"named": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
    }
    given: Any = api_schema(schema)
    assert {"anyOf", "allOf"}.isdisjoint(given)
    assert list(given["properties"]) == ["loud", "id", "name"]
    assert given["required"] == ("loud",)
    assert find_misfit(schema, {"id": 1, "loud": True}) is None
    assert find_misfit(schema, {"loud": True}) == (
        "the arguments: it fits none of 2 forms; the first: id: it is required"
    )


def test_forms_of_earlier_drafts_become_those_of_today() -> None:
    pair = {
        "type": "array",
        "items": [{"type": "string"}, {"minimum": 0, "exclusiveMinimum": True}],
    }
    given: Any = api_schema(
        {"properties": {"pair": pair, "any": {"type": "any", "required": True}}}
    )
    assert given["properties"] == {
        "pair": {
            "type": "array",
            "items": {},
            "prefixItems": ({"type": "string"}, {"exclusiveMinimum": 0}),
        },
        "any": {},
    }


def test_a_model_is_not_given_patterns_that_a_provider_may_not_read() -> None:
    """The first is a mistake, and the second one of JavaScript's; the third warns in Python."""
    name = {"type": "string", "pattern": "("}
    by_pattern = {r"^\p{L}$": {}, "[[a]": {}, "^x-": {"pattern": "^y"}}
    schema = {"properties": {"name": name}, "patternProperties": by_pattern}
    given: Any = api_schema({**schema, "additionalProperties": False})

    assert given["properties"] == {"name": {"type": "string"}}
    assert given["patternProperties"] == {"[[a]": {}, "^x-": {"pattern": "^y"}}
    assert "additionalProperties" not in given, "what the second allowed is additional now"

    referring = {"name": {"$ref": "#/patternProperties/("}}
    with pytest.raises(ValueError, match="is not in the schema"):
        api_schema({"properties": referring, "patternProperties": {"(": {}}})


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "array"}, "type: the arguments are an object, not 'array'"),
        ({"properties": {"a b": {}}}, "properties: the name 'a b'"),
        ({"properties": {"a": {"properties": {"größe": {}}}}}, "properties.a.properties: the name"),
        ({"properties": {"a": {"type": "objekt"}}}, "properties.a.type: a str that does not"),
        ({"properties": {"a": 3}}, "properties.a: a schema is an object, not an int"),
        ({"properties": []}, "properties: not a table of schemas"),
        ({"anyOf": [{"$ref": "#/$defs/gone"}]}, "$ref: '#/$defs/gone' is not in the schema"),
        (
            {"properties": {"a": {"items": {"$ref": "#/$defs/gone"}}}, "$defs": {"kept": {}}},
            "$ref: '#/$defs/gone' is not in the schema",
        ),
        ({"$ref": "#"}, "$ref: the references go round in a circle"),
    ],
)
def test_a_schema_that_no_provider_takes_is_refused_with_the_place(
    schema: dict[str, Any], found: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        api_schema(schema)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#/$defs/a b"},
        {"$ref": "#/$defs/a%20b"},
        {"$ref": "#/properties/pair/prefixItems/1"},
        {"$ref": "https://example.org/schema#/$defs/elsewhere"},
        {"$id": "https://example.org/own", "$ref": "#/$defs/own", "$defs": {"own": {}}},
        {"default": {"$ref": "#/$defs/only data"}},
    ],
)
def test_a_reference_that_leads_somewhere_is_kept(part: dict[str, Any]) -> None:
    pair = {"type": "array", "items": {}, "prefixItems": [{}, {}]}
    given: Any = api_schema({"properties": {"part": part, "pair": pair}, "$defs": {"a b": {}}})
    assert given["properties"]["part"] == part


def test_a_schema_with_references_without_end_is_checked_in_good_time() -> None:
    """Each form refers to the next twice: 2 to the power of 60 ways through it."""
    forms = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**forms, "d60": {"type": "string"}}}
    assert "it takes string" in (find_misfit(schema, {}) or "")
