"""Units: many spellings, one name. Nothing is converted: 5 m and 500 cm are different answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reward_workers.math_notation import Token, word_set

_SPELLINGS = {
    "%": "percent percents pct percentage \\%",
    "deg": "degree degrees deg degs",
    "rad": "radian radians rad rads",
    "dollar": "dollars dollar usd us bucks",
    "cent": "cents cent ¢",
    "euro": "euros euro eur €",
    "pound": "pounds pound gbp £",
    "yen": "yen jpy ¥",
    "rupee": "rupees rupee rs inr ₹",
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres kms",
    "nm": "nm nanometer nanometers",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards yds",
    "mi": "mi mile miles",
    "g": "g gram grams gm",
    "kg": "kg kilogram kilograms kgs kilo kilos",
    "mg": "mg milligram milligrams",
    "lb": "lb lbs",
    "oz": "oz ounce ounces",
    "t": "ton tons tonne tonnes",
    "s": "s sec secs second seconds",
    "ms": "ms millisecond milliseconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "l": "L l liter liters litre litres",
    "ml": "mL ml milliliter milliliters millilitre millilitres",
    "gal": "gal gallon gallons",
    "n": "N newton newtons",
    "j": "J joule joules",
    "kj": "kJ kilojoule kilojoules",
    "w": "W watt watts",
    "kw": "kW kilowatt kilowatts",
    "v": "V volt volts",
    "amp": "A amp amps ampere amperes",
    "ohm": "ohm ohms Omega",
    "hz": "Hz hertz",
    "pa": "Pa pascal pascals",
    "k": "K kelvin kelvins",
    "mol": "mol mole moles",
    "coulomb": "C coulomb coulombs",
    "unit": "unit units",
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_STOP = word_set(
    "is are was were be or and not no maybe perhaps possibly if when where for then so but either "
    "because since thus hence equals than to through until versus vs mod modulo plus minus of out by"
)
_SPEEDS = {"mph": "mi h^-1", "kph": "km h^-1", "kmh": "km h^-1"}
_SCALES = {"c": "C", "celsius": "C", "centigrade": "C", "f": "F", "fahrenheit": "F"}  # of temperatures
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
CURRENCIES = word_set("dollar cent euro pound yen rupee")
MAX_WORDS = 5


def is_unit(word: str) -> bool:
    """Whether a word is a unit that is known by name."""
    lower = word.lower()
    return word in _NAMES or (lower in _NAMES and len(word) > 2) or lower in _POWERS or lower in _SPEEDS


def unit_of_symbol(name: str) -> str | None:
    """The unit that a lone letter stands for, `m`; None if it is none."""
    return _NAMES.get(name) if len(name) == 1 else None


def unit_of(tokens: Sequence[Token]) -> str | None:
    """The one name of a unit phrase, `m^2` for `square metres`, `m s^-1` for `m/s`; empty for `units`; None if it is no unit
    phrase.
    """
    words: list[str] = []
    for token in tokens:
        if token.kind == "text":
            words += re.findall(r"[A-Za-z]+|[\d]+|[%€£¥₹¢^/]|\S", token.text)
        elif token.text not in ("{", "}", "."):
            words.append(token.text)
    parts: list[str] = []
    power = ""
    for place, word in enumerate(words):
        lower = word.lower()
        if parts[-1:] == ["deg"] and lower in _SCALES:
            parts[-1] += _SCALES[lower]
        elif word in ("^", "*", ",", "(", ")", "cdot"):
            continue
        elif lower in ("/", "per"):
            parts.append("/")
        elif lower in _SPEEDS:
            parts += _SPEEDS[lower].split()
        elif lower in _POWERS:
            if lower.endswith("ed") and parts:
                parts[-1] += _POWERS[lower]
            else:
                power = _POWERS[lower]
        elif word.isdigit():
            sign = "-" if words[max(0, place - 2) : place] == ["^", "-"] else ""
            raised = sign or words[place - 1 : place] == ["^"]
            if not parts or len(word) > 1 or parts[-1] == "%" or (parts[-1] == "in" and not raised):
                return None  # `1 in 6` is no unit
            parts[-1] += f"^{sign}{word}" if sign or word != "1" else ""
        elif lower in _STOP or not re.fullmatch(r"[A-Za-z]+|\\?%|[€£¥₹¢'.-]", word):
            return None
        elif word in ("'", "-", "."):
            continue
        else:
            name = _NAMES.get(word) or _NAMES.get(lower) or (lower.removesuffix("s") if len(lower) > 3 else lower)
            parts.append(name + power)
            power = ""
    if len(parts) > MAX_WORDS:
        return None
    divided = [f"{part}^-1" if "^" not in part else part.replace("^", "^-") for part in parts]
    named = [divided[i] if parts[i - 1 : i] == ["/"] else part for i, part in enumerate(parts) if part != "/"]
    return re.sub(r"^unit(\^\d)?$", "", " ".join(named))


def known(unit: str) -> bool:
    """Whether every part of a unit's name is a unit known by name."""
    return all(re.sub(r"\^.*", "", part) in _SPELLINGS or part.startswith("deg") for part in unit.split())
