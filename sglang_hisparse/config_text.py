"""Words about settings: the text beside each key of the schema, how JSON is read, and the parts of a refusal.

`config` and `validation` call it. Types, bounds and choices are read from the schema itself, so that a message, the
reference table and the check cannot disagree. It knows no key by name.
"""

import enum
import json
import math
import typing
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from msgspec import inspect

from sglang_hisparse.errors import ConfigError

_SHOWN_CHARACTERS = 60
_KINDS = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a number"),
    (str, "a string"),
    (list, "a list"),
    (dict, "an object"),
)


@dataclass(frozen=True, slots=True)
class KeyText:
    """What the schema says of a key beside its type: unit, meaning, and the default where that is not a constant."""

    unit: str
    meaning: str
    default: str = ""


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One row of the reference table; every column is text."""

    key: str
    allowed: str
    unit: str
    default: str
    meaning: str


def key_text(annotation: Any) -> KeyText:
    """The KeyText inside a field's annotation. Raises LookupError where the schema has none."""
    for part in (annotation, *typing.get_args(annotation)):
        for extra in getattr(part, "__metadata__", ()):
            if isinstance(extra, KeyText):
                return extra
    raise LookupError(f"no KeyText in {annotation}")


def reason_of(value: Any, annotation: Any) -> str:
    """Why the schema does not accept `value`, as a predicate: "is below 1"."""
    info, _ = _variants(annotation)
    if value is None:
        return "is not allowed"
    if isinstance(info, inspect.EnumType):
        return "is not a known word" if isinstance(value, str) else f"is {kind_of(value)}"
    if isinstance(info, inspect.StrType):
        return "is empty" if isinstance(value, str) else f"is {kind_of(value)}"
    if isinstance(info, inspect.DictType | inspect.BoolType):
        return f"is {kind_of(value)}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {kind_of(value)}"
    if not _is_finite(value):
        return "is not a finite number"
    if isinstance(info, inspect.IntType) and isinstance(value, float):
        return "is not written as an integer"
    if info.ge is not None and value < info.ge:
        return f"is below {info.ge}"
    if info.gt is not None and value <= info.gt:
        return f"is not above {info.gt}"
    if info.le is not None and value > info.le:
        return f"is above {info.le}"
    return f"is not below {info.lt}"


def allowed_by(annotation: Any) -> str:
    """What the schema accepts: "an integer >= 1, or null"."""
    info, nullable = _variants(annotation)
    if isinstance(info, inspect.EnumType):
        words = " or ".join(f'"{member.value}"' for member in info.cls)
    elif isinstance(info, inspect.StrType):
        words = "a string that is not empty"
    elif isinstance(info, inspect.DictType):
        words = "an object"
    elif isinstance(info, inspect.BoolType):
        words = "true or false"
    else:
        bounds = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
        limits = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        words = f"{'an integer' if isinstance(info, inspect.IntType) else 'a number'} {limits}"
    return words + (", or null" if nullable else "")


def convert(key: str, value: Any, annotation: Any) -> Any:
    """`value` as the schema's type, without coercion. Raises ConfigError."""
    # JSON's decoder turns 1e999 into infinity and keeps integers that no double can hold.
    finite = isinstance(value, bool) or not isinstance(value, (int, float)) or _is_finite(value)
    try:
        if finite:
            return msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError:
        pass
    refuse(key, value, reason_of(value, annotation), allowed_by(annotation))


def decode_object(text: str, flag: str, example: str) -> dict[str, Any]:
    """The JSON object that is given to `flag`; raises ConfigError, which shows `example`. No key may come twice."""
    # The standard decoder, because it alone shows repeated keys and the constants NaN and Infinity to its caller.
    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=float)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag}: {shown_text(text)} is not JSON ({error.msg} at character {error.pos}); allowed: a "
            f"JSON object such as {example}"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise ConfigError(
            f"{flag}: {shown_text(text)} cannot be read ({reason}); allowed: a JSON object such as {example}"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: {shown(value)} is {kind_of(value)}; allowed: a JSON object such as {example}")
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(
                f"{shown_key(key)}: {shown(value)} is given after {shown(values[key])}; allowed: each key once"
            )
        values[key] = value
    return values


def refuse(key: str, value: Any, why: str, allowed: str) -> NoReturn:
    """Raise the one form that every refusal of a setting has."""
    raise ConfigError(f"{key}: {shown(value)} {why}; allowed: {allowed}")


def kind_of(value: Any) -> str:
    """A JSON value's kind in words."""
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "null")


def shown(value: Any) -> str:
    """A JSON value on one line, cut where it is long."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    return shown_text(json.dumps(value))


def shown_text(text: str) -> str:
    """Raw text on one line, cut where it is long; empty text as two quotes."""
    line = " ".join(text.split()) or "''"
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 3] + "..."


def shown_key(key: str) -> str:
    """A key as it is, or as a JSON string where it holds anything but a plain name."""
    return key if key.isidentifier() and len(key) <= _SHOWN_CHARACTERS else shown(key)


def _variants(annotation: Any) -> tuple[Any, bool]:
    """The one type of a field besides None, and whether None is accepted."""
    info = inspect.type_info(annotation)
    while isinstance(info, inspect.Metadata):
        info = info.type
    if not isinstance(info, inspect.UnionType):
        return info, False
    others = [part for part in info.types if not isinstance(part, inspect.NoneType)]
    return others[0], len(others) < len(info.types)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
