"""Configuration errors: every problem with its position, reason and remedy.

`validation_problems` translates pydantic's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hypha_net.node.config.introspection import (
    Key,
    description_of,
    dotted,
    field_at,
    suggest_key,
)
from hypha_net.node.config.models import mask_secrets
from hypha_proto.texts import quote

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a configuration."""

    where: str
    """``file:line``, the name of a variable, or a flag; empty if it has no position."""
    key: str = ""
    value: object = _ABSENT
    """The value as it may be shown, with secrets masked."""
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        what = self.key
        if self.value is not _ABSENT:
            what += f" = {quote(self.value)}"
        text = ": ".join(part for part in (self.where, what, self.reason) if part)
        return f"{text}\n    {self.remedy}" if self.remedy else text


_EXPECTED: Final = {
    "dict_type": 'must be a table, {key = value} or in JSON {"key": value}',
    "model_type": 'must be a table, {key = value} or in JSON {"key": value}',
    "tuple_type": "must be a list, [value]",
    "list_type": "must be a list, [value]",
    "set_type": "must be a list, [value]",
    "frozen_set_type": "must be a list, [value]",
}


class ConfigError(Exception):
    """Invalid configuration; its text lists every problem.

    Attributes:
        problems: the same problems, as values.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def validation_problems(
    model: type[BaseModel],
    error: ValidationError,
    data: dict[str, Any],
    where: Callable[[Key], str | None],
    *,
    variables: bool = True,
) -> list[Problem]:
    """Return one problem per key for a validation error of pydantic; branches of a union are combined.

    Args:
        model: what `data` was validated by.
        error: the error.
        data: the values.
        where: describes the origin of the value at a key; None if no source sets it.
        variables: whether ``HYPHA_*`` can set a missing key.
    """
    found: dict[Key, list[ErrorDetails]] = {}
    values: dict[Key, object] = {}
    for details in error.errors(include_url=False):
        key, value = _locate(model, details["loc"], data)
        found.setdefault(key, []).append(details)
        values[key] = value
    # unknown keys first: a misspelt one explains what is missing
    ordered = sorted(found.items(), key=lambda entry: entry[1][0]["type"] != "extra_forbidden")
    return [_problem(model, key, values[key], faults, where, variables) for key, faults in ordered]


def _problem(
    model: type[BaseModel],
    key: Key,
    value: object,
    faults: list[ErrorDetails],
    where: Callable[[Key], str | None],
    variables: bool,
) -> Problem:
    name, about, first = dotted(key), description_of(model, key), faults[0]
    if first["type"] == "missing":
        variable = ", or HYPHA_" + "__".join(str(part).upper() for part in key) if variables else ""
        remedy = f"set {name} in the file{variable}" + (f". {about}" if about else "")
        return Problem((where(key[:-1]) if key[:-1] else None) or "", name, reason="is missing", remedy=remedy)
    origin = where(key)
    if first["type"] == "extra_forbidden":
        table = f" of [{dotted(key[:-1])}]" if key[:-1] else ""
        return Problem(origin or "", name, reason=f"is not a key{table}", remedy=suggest_key(model, key))
    # leave out union branches that expect a table: they do not help a person who wrote a plain value
    plain = [details for details in faults if details["type"] != "model_type"]
    reasons = list(dict.fromkeys(map(_reason, plain or faults)))
    is_shown = key and origin and not isinstance(value, dict)
    shown = mask_secrets(value, name) if is_shown else _ABSENT
    return Problem(origin or "", name, shown, "; or ".join(reasons), about)


def _reason(details: ErrorDetails) -> str:
    """Return pydantic's reason, with Python's names of types replaced by those of TOML and JSON."""
    if (expected := _EXPECTED.get(details["type"])) is not None:
        return expected
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:] if message.startswith(("Input", "Extra", "Field")) else message


def _locate(model: type[BaseModel], location: Sequence[str | int], data: Any) -> tuple[Key, object]:
    """Return pydantic's location of an error without its names of branches of unions, and the value there."""
    key: Key = ()
    for part in location:
        inside = _inside(data, part)
        if inside is not _ABSENT or (isinstance(part, str) and field_at(model, (*key, part)) is not None):
            key, data = (*key, part), inside
    return key, data


def _inside(data: Any, part: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(part, _ABSENT)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else _ABSENT
