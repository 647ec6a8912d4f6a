"""Options of trainers: dataclass fields with a help text, a group and a checked type, under the names of TRL.

One place decides what a value may be, so that a keyword argument, a command-line string and a YAML value mean the same
and fail with the same sentence.
"""

import dataclasses
import difflib
import enum
import inspect
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

Refusals = Mapping[str, str]


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    minimum: int | None = None,
    positional: bool = False,
) -> Any:
    """A dataclass field for one option; `minimum` is inclusive, `choices` are the texts that are accepted."""
    metadata = {"help": help, "group": group, "choices": choices, "minimum": minimum}
    return dataclasses.field(default=default, metadata=metadata, kw_only=not positional)


def _to_none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.lower() in ("none", "null")):
        raise ValueError


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "t", "y", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no", "f", "n", "0"):
        return False
    raise ValueError


def _to_float(value: Any) -> float:
    # Strings too: YAML 1.1 reads `2e-5`, without a point, as text.
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_int(value: Any) -> int:
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return int(value) if isinstance(value, numbers.Integral) else int(number)


def _to_dict(value: Any) -> dict:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


def _to_list(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return [_to_text(item) for item in value]


def _to_numbers(value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return [_to_float(item) for item in value]


def _to_text(value: Any) -> str:
    value = value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if not isinstance(value, str):
        raise ValueError
    return str(value)


# In the order in which the members of a union are tried, with the words of the error message.
CONVERTERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (_to_bool, "true or false"),
    int: (_to_int, "a whole number"),
    float: (_to_float, "a number"),
    dict: (_to_dict, "a mapping (JSON text)"),
    list: (_to_list, "a list of names"),
    list[float]: (_to_numbers, "a list of numbers"),
    str: (_to_text, "a text"),
    types.NoneType: (_to_none, "none"),
}


@cache
def fields_of(cls: Any) -> dict[str, dataclasses.Field]:
    """Name -> field of each option of an options class."""
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation of an options class."""
    return typing.get_type_hints(cls)


def member_types(hint: Any) -> set[Any]:
    """The plain types of an annotation: `int | list[str] | None` -> {int, list, NoneType}."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    return {member if member in CONVERTERS else typing.get_origin(member) or member for member in members}


def convert(cls: type, name: str, value: Any) -> Any:
    """`value` as the type of option `name` of `cls`.

    Numbers and truth values may be given as text. Raises ValueError with one sentence that names the option.
    """
    members = member_types(hints(cls)[name])
    result = value
    if not (value is None and types.NoneType in members):
        for member in (kind for kind in CONVERTERS if kind in members):
            try:
                result = CONVERTERS[member][0](value)
                break
            except (ValueError, OverflowError):
                continue
        else:
            expected = " or ".join(CONVERTERS[kind][1] for kind in CONVERTERS if kind in members)
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
    _check_bounds(fields_of(cls)[name], result)
    return result


def _check_bounds(field: dataclasses.Field, value: Any) -> None:
    choices, minimum = field.metadata["choices"], field.metadata["minimum"]
    if choices and isinstance(value, str) and value not in choices:
        raise ValueError(f"{field.name}: expected one of {', '.join(choices)}, got {value!r}{nearest(value, choices)}")
    if minimum is not None and isinstance(value, (int, float)) and not isinstance(value, bool) and value < minimum:
        raise ValueError(f"{field.name}: expected at least {minimum:g}, got {value!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: `; did you mean 'x'?`, or nothing when no known name is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_names(classes: Iterable[type], names: Iterable[str], what: str) -> None:
    """Raises for a name that no class has: ValueError with the reasons where it is refused, else TypeError."""
    known: set[str] = set()
    refused: dict[str, str] = {}
    for cls in classes:
        known |= set(fields_of(cls))
        refused |= getattr(cls, "REFUSED", {})
    refuse_names(names, known, refused, what)


def refuse_names(names: Iterable[str], known: Iterable[str], refused: Mapping[str, str], what: str) -> None:
    """`check_names` for names that are known, or refused with a reason, by themselves."""
    wrong = [name for name in names if name not in known]
    reasons = [f"{name} ({refused[name]})" for name in wrong if name in refused]
    if reasons:
        raise ValueError(f"not supported by jaxtrl: {'; '.join(reasons)}")
    if wrong:
        raise TypeError(f"unknown {what} {wrong[0]!r}{nearest(wrong[0], known)}")


def refuse_arguments(
    names: Iterable[str], function: Callable[..., Any], options: type, refused: Mapping[str, str]
) -> None:
    """Raises, as `check_names` does, for keyword arguments that `function` has no parameter for.

    `refused` gives reasons; a name of `options` is sent to `function`'s parameter `args`.
    """
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    misplaced = {name: f"it is an option: pass args={options.__name__}({name}=...)" for name in fields_of(options)}
    refuse_names(names, known, {**getattr(options, "REFUSED", {}), **misplaced, **refused}, "argument")


class OptionsType(type):
    """Metaclass that checks the names and converts the values of keyword arguments before a dataclass sees them.

    The generated `__init__` can neither give the reason for a refused name nor name the nearest known one.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        check_names([cls], options, "option")
        positional = [name for name, field in fields_of(cls).items() if not field.kw_only]
        first = [convert(cls, name, value) for name, value in zip(positional, args, strict=False)]
        converted = {name: convert(cls, name, value) for name, value in options.items()}
        return super().__call__(*first, *args[len(first) :], **converted)


def count_steps(setting: int | float, total_steps: int) -> int:
    """Steps that a setting of TRL means: itself from 1 on, below 1 a share of all steps (rounded up)."""
    return math.ceil(total_steps * setting) if setting < 1 else int(setting)
