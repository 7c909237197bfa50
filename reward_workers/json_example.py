"""A value that satisfies a JSON Schema, found by simple means: what a right answer looks like where a row has no gold.

Contract: what is returned satisfies the schema. None says that nothing was found, not that there is nothing: patterns, formats,
references and conditions are not solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_workers.json_schema import Schema


def example(schema: Any) -> Any:
    """A value that satisfies `schema` (a dict or a boolean), None for none found. Raises SchemaError for no schema."""
    checked = Schema(schema, formats=False)
    value = _guess(schema)
    return value if checked.problem(value) is None else None


def _guess(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return None
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return _guess(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or (kind is None and "properties" in schema):
        properties = schema.get("properties", {})
        return {name: _guess(properties.get(name, True)) for name in schema.get("required", properties)}
    if kind == "array":
        return [_guess(schema.get("items", True)) for _ in range(max(1, schema.get("minItems", 1)))]
    if kind == "string":
        return "text".ljust(schema.get("minLength", 0), "t")[: schema.get("maxLength")]
    if kind in ("integer", "number"):
        return schema.get("minimum", min(1, schema.get("maximum", 1)))
    return True if kind == "boolean" else None
