"""A JSON Schema as a verifier uses it: refused as a whole where it can't be used, never satisfied by accident.

Contract:
- The dialect is 2020-12, or the older one that the schema's `$schema` names. `1.0` is an integer there, `true` is no
  number.
- Nothing is fetched: every `$ref` must lead to a place inside the schema, or to a published meta-schema.
- `format` is asserted. A format that can't be checked here is refused, not passed over; `formats=False` makes
  every format a mere note, as 2020-12 has it by default.
- `multipleOf` counts in decimals, so that 19.99 is a multiple of 0.01.
- `pattern` is read as JSON Schema has it, in ECMA-262's way: `$` is the end of the text and not the place before a last
  line break, and `\\d` and `\\w` are ASCII. How long a pattern takes is its author's affair: the process that checks it is
  stopped at its deadline.
"""

from __future__ import annotations

import copy
import datetime
import ipaddress
import re
import uuid
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from referencing import Resource


DEPTH_OF_PLAIN_VALUES = 16  # checking a level takes a dozen calls or so, and Python allows a thousand


class SchemaError(ValueError):
    """A schema that can't be used; the message says why."""


class Schema:
    """A checked schema. `formats=False` leaves `format` unchecked. Raises SchemaError."""

    def __init__(self, schema: Any, *, formats: bool = True) -> None:
        import jsonschema
        from jsonschema_specifications import REGISTRY
        from referencing import Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        if not isinstance(schema, dict | bool):
            raise SchemaError(f"a schema is an object or a boolean, got {type(schema).__name__}")
        dialect, named = jsonschema.Draft202012Validator, isinstance(schema, dict) and schema.get("$schema")
        if isinstance(named, str):
            dialect = jsonschema.validators.validator_for(schema, default=None)
        if dialect is None:
            raise SchemaError(f"its $schema is {named!r}, which is no dialect that is known here")
        try:
            dialect.check_schema(schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            raise SchemaError(getattr(error, "message", None) or "it is nested too deep") from error
        schema = copy.deepcopy(schema)
        resource = Resource.from_contents(schema, default_specification=DRAFT202012)
        try:
            registry = REGISTRY.with_resource(resource.id() or "", resource).crawl()
            for part, resolver in _objects(resource, registry.resolver_with_root(resource)):
                _read_patterns(part)
                reference = part.get("$ref", part.get("$dynamicRef"))
                if isinstance(reference, str):
                    resolver.lookup(reference)
                if formats and isinstance(part.get("format"), str) and part["format"] not in FORMATS:
                    raise SchemaError(
                        f"format {part['format']!r} can't be checked here; there are {', '.join(FORMATS)}. Leave it out, "
                        "or leave all formats unchecked with formats=False"
                    )
        except Unresolvable as error:
            raise SchemaError(f"$ref {error.ref!r} leads nowhere in the schema, and nothing is fetched") from error
        checker = jsonschema.FormatChecker(formats=())
        for name, check in FORMATS.items() if formats else ():
            checker.checks(name)(_on_text(check))
        self._validator = jsonschema.validators.extend(dialect, {"multipleOf": _multiple_of})(
            schema, registry=registry, format_checker=checker
        )

    def problem(self, value: Any) -> str | None:
        """The first way in which a value does not satisfy the schema, with its place; None if it does.

        Raises SchemaError where the schema turns out to refer to itself without end. A value nested so deep that
        checking it takes too many steps is the value's fault.
        """
        try:
            error = next(iter(self._validator.iter_errors(value)), None)
        except RecursionError as endless:
            if _depth(value) > DEPTH_OF_PLAIN_VALUES:
                return "$: nested too deep to be checked"
            raise SchemaError("it refers to itself without end") from endless
        return error and f"{error.json_path}: {error.message[:300]}"


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)


def _objects(resource: Resource[Any], resolver: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every schema object in a schema, with the resolver of its references."""
    contents = resource.contents
    if not isinstance(contents, dict):
        return
    yield contents, resolver
    for part in resource.subresources():
        yield from _objects(part, resolver.in_subresource(part))


def _read_patterns(part: dict[str, Any]) -> None:
    """Rewrite a schema object's patterns so that Python reads them as ECMA-262 does."""
    if isinstance(part.get("pattern"), str):
        part["pattern"] = _python_pattern(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        part["patternProperties"] = {
            _python_pattern(pattern): inner for pattern, inner in part["patternProperties"].items()
        }


def _python_pattern(pattern: str) -> str:
    """An ECMA-262 pattern in Python's notation. Raises SchemaError if it is none."""
    in_class = False
    parts: list[str] = []
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "$" and not in_class:
            token = r"\Z"
        elif token in ("[", "]"):
            in_class = token == "["
        parts.append(token)
    text = "".join(parts)
    flags = re.match(r"\(\?([imsx]+)\)", text)  # not of ECMA-262, but common
    read = f"(?a{flags[1]}:{text[flags.end() :]})" if flags else f"(?a:{text})"
    try:
        re.compile(read)
    except (re.error, RecursionError) as error:
        raise SchemaError(f"the pattern {pattern!r} can't be used: {error}") from error
    return read


def _multiple_of(validator: Any, factor: Any, value: Any, schema: Any) -> Iterator[Any]:
    import jsonschema

    if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(factor)):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {factor!r}")


def _on_text(check: Callable[[str], object]) -> Callable[[object], bool]:
    """A check of texts as jsonschema calls it: what is no text has no format, and a ValueError is a no."""

    def checked(value: object) -> bool:
        try:
            return not isinstance(value, str) or check(value) is not None
        except ValueError:
            return False

    return checked


def _matching(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern, re.ASCII).fullmatch


_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_HOST = (
    r"(?=.{1,253}$)[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
_URI_TEXT = r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"


def _date(text: str) -> object:
    return re.fullmatch(_DATE, text, re.ASCII) and datetime.date.fromisoformat(text)


def _time(text: str) -> object:
    """RFC 3339; the leap second that it allows is taken as the one before."""
    return re.fullmatch(_TIME, text, re.ASCII) and datetime.time.fromisoformat(text[:8].replace(":60", ":59", 1))


def _date_time(text: str) -> object:
    return (text[10:11] in ("T", "t") and _date(text[:10]) and _time(text[11:])) or None


def _ipv4(text: str) -> object:
    return ipaddress.IPv4Address(text)


def _ipv6(text: str) -> object:
    return None if "%" in text else ipaddress.IPv6Address(text)


def _uuid(text: str) -> object:
    return str(uuid.UUID(text)) == text.lower() or None


def _regex(text: str) -> object:
    try:
        return re.compile(text)
    except (re.error, RecursionError):
        return None


# By the names of JSON Schema's validation vocabulary: a result that is None, or a ValueError, means no.
FORMATS: dict[str, Callable[[str], object]] = {
    "date": _date,
    "time": _time,
    "date-time": _date_time,
    "duration": _matching(r"P(?!$)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?!$)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)"),
    "email": _matching(rf"[^\s@\"(),:;<>\[\]\\]{{1,64}}@{_HOST}"),
    "hostname": _matching(_HOST),
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "uri": _matching(rf"[A-Za-z][A-Za-z0-9+.-]*:{_URI_TEXT}"),
    "uri-reference": _matching(_URI_TEXT),
    "uuid": _uuid,
    "regex": _regex,
    "json-pointer": _matching(r"(?:/(?:[^~/]|~[01])*)*"),
}
