"""Schemas: which can be used, what they are satisfied by, and which formats are checked."""

from __future__ import annotations

from typing import Any

import pytest

from reward_workers.json_schema import Schema, SchemaError


def valid(schema: Any, value: Any, **options: Any) -> bool:
    return Schema(schema, **options).problem(value) is None


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{not json", "an object or a boolean"),
        (None, "an object or a boolean"),
        ({"type": "intger"}, "intger"),
        ({"required": "a"}, "'a' is not of type 'array'"),
        ({"pattern": "["}, "not a 'regex'"),
        ({"multipleOf": 0}, "0"),
        ({"$schema": "https://example.org/mine"}, "no dialect"),
        ({"$schema": 7}, "no dialect|is not of type"),
        ({"$ref": "#/$defs/price"}, "leads nowhere"),
        ({"properties": {"a": {"items": {"$ref": "other.json"}}}}, "leads nowhere"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "nothing is fetched"),
        ({"properties": {"a": {"format": "iri"}}}, "format 'iri' can't be checked"),
    ],
)
def test_what_cannot_be_used_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        Schema(schema)


def test_what_refers_to_itself_without_end_is_the_schemas_fault() -> None:
    with pytest.raises(SchemaError, match="without end"):
        Schema({"$ref": "#"}).problem(1)


def test_a_value_nested_too_deep_is_the_values_fault() -> None:
    node = {"anyOf": [{"allOf": [{"oneOf": [{"anyOf": [{"$ref": "#/$defs/node"}]}]}]}]}
    schema = Schema({"$defs": {"node": {"properties": {"c": {"allOf": [node]}}}}, "$ref": "#/$defs/node"})
    value: Any = {}
    for _ in range(10):
        value = {"c": value}
    assert schema.problem(value) is None
    for _ in range(200):
        value = {"c": value}
    assert schema.problem(value) == "$: nested too deep to be checked"


def test_c25_integers_are_by_value_and_booleans_are_none() -> None:
    assert [valid({"type": "integer"}, value) for value in (True, 1.0, 1, 1.5, "1")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert not valid({"type": "number"}, False)
    assert not valid({"enum": [1]}, True)
    assert not valid({"const": False}, 0)


def test_references_inside_the_schema_are_followed() -> None:
    schema = {"$defs": {"price": {"type": "number"}}, "properties": {"p": {"$ref": "#/$defs/price"}}}
    assert valid(schema, {"p": 1})
    assert not valid(schema, {"p": "1"})
    embedded = {
        "$id": "https://example.org/a",
        "$defs": {"x": {"$id": "b", "type": "string"}},
        "items": {"$ref": "b"},
    }
    assert valid(embedded, ["1"])
    assert not valid(embedded, [1])
    assert not valid({"$ref": "https://json-schema.org/draft/2020-12/schema"}, {"type": "nothing"})


def test_the_dialect_that_the_schema_names() -> None:
    tuple_like = {"items": [{"type": "integer"}]}
    assert not valid({"$schema": "http://json-schema.org/draft-07/schema#", **tuple_like}, ["1"])
    with pytest.raises(SchemaError):
        Schema(tuple_like)  # prefixItems in 2020-12


def test_names_and_values_that_look_like_keywords() -> None:
    assert not valid({"properties": {"$ref": {"type": "string"}, "format": {"type": "string"}}}, {"$ref": 1})
    assert valid({"enum": [{"$ref": "#/nowhere"}, {"format": "iri"}]}, {"format": "iri"})


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a$", "a", "a\n"),  # `$` is the end, not the place before a last line break
        (r"^\d+$", "12", "\u0661\u0662"),
        (r"^[$]\$$", "$$", "$$\n"),
        (r"(?i)^abc$", "ABC", "ABC\n"),
        ("b", "abc", "ac"),
    ],
)
def test_patterns_are_read_as_ecma_262(pattern: str, good: str, bad: str) -> None:
    schema = Schema({"pattern": pattern, "patternProperties": {pattern: {}}, "additionalProperties": False})
    assert schema.problem(good) is None
    assert schema.problem(bad) is not None
    assert schema.problem({good: 1}) is None
    assert schema.problem({bad: 1}) is not None


def test_a_shared_pattern_is_read_once_and_the_given_schema_stays_as_it_is() -> None:
    given = {"$defs": {"p": {"pattern": "^a$"}}, "properties": {k: {"$ref": "#/$defs/p"} for k in "uv"}}
    schema = Schema(given)
    assert schema.problem({"u": "a", "v": "a"}) is None
    assert schema.problem({"v": "a\n"}) is not None
    assert given["$defs"] == {"p": {"pattern": "^a$"}}


def test_multiples_are_counted_in_decimals() -> None:
    assert valid({"multipleOf": 0.01}, 19.99)
    assert valid({"multipleOf": 0.1}, 0.3)
    assert not valid({"multipleOf": 0.01}, 19.999)
    assert not valid({"multipleOf": 3}, 1e300 + 1)
    assert valid({"multipleOf": 0.01}, True)  # no number


def test_boolean_schemas() -> None:
    assert valid(True, {"anything": 1})
    assert not valid(False, None)


def test_the_problem_has_a_place() -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}}}}
    assert Schema(schema).problem({"a": [1, "x"]}) == "$.a[1]: 'x' is not of type 'integer'"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29"], ["2026-02-29", "20260101", "2026-1-1", "2026-01-01\n", "2026-W01-1"]),
        ("time", ["23:59:60Z", "01:02:03.4+05:30"], ["24:00:00Z", "01:02:03", "01:02Z", "01:02:03+24:00"]),
        (
            "date-time",
            ["2026-01-01T00:00:00Z", "2026-01-01t00:00:00.1-01:00"],
            ["2026-01-01 00:00:00Z", "2026-01-01"],
        ),
        ("duration", ["P1DT2H", "P2W", "PT0S"], ["P", "PT", "P1", "1D", "P1W2D"]),
        ("email", ["a.b@c.de"], ["a@b@c.de", "a b@c.de", "@c.de", "a@", "plain"]),
        ("hostname", ["a-b.c", "x"], ["-a.b", "a..b", "a_b", "a" * 64]),
        ("ipv4", ["1.2.3.4"], ["01.2.3.4", "1.2.3", "1.2.3.256"]),
        ("ipv6", ["::1", "fe80::1"], ["::g", "fe80::1%eth0", "1.2.3.4"]),
        ("uri", ["https://a.b/c?d=%20#e", "mailto:x@y.z"], ["a.b/c", "https://a b", "https://a/%zz"]),
        ("uri-reference", ["/a/b", "#x", ""], ["a b", "<a>"]),
        ("uuid", ["123E4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "x"]),
        ("regex", ["a+"], ["a("]),
        ("json-pointer", ["", "/a/~0b"], ["a", "/~2"]),
    ],
)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    schema = Schema({"format": name})
    assert [text for text in good if schema.problem(text) is not None] == []
    assert [text for text in bad if schema.problem(text) is None] == []
    assert schema.problem(7) is None  # what is no text has no format
    assert valid({"format": name}, bad[0], formats=False)
