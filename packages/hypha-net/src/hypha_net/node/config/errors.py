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
    annotation_at,
    description_of,
    dotted,
    field_at,
    fields_by_key,
    suggest_key,
    table_types,
)
from hypha_net.node.config.models import mask_secrets
from hypha_net.node.config.toml_positions import Key
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
    found: dict[str, list[tuple[Key, ErrorDetails]]] = {}
    for details in error.errors(include_url=False):
        key = _present(model, details["loc"], data) if details["type"] != "missing" else tuple(details["loc"])
        found.setdefault(dotted(key), []).append((key, details))
    return [_problem(model, entries, data, where, variables) for entries in found.values()]


def _problem(
    model: type[BaseModel],
    entries: list[tuple[Key, ErrorDetails]],
    data: dict[str, Any],
    where: Callable[[Key], str | None],
    variables: bool,
) -> Problem:
    key = entries[0][0]
    name = dotted(key)
    about = description_of(model, key)
    if entries[0][1]["type"] == "missing":
        variable = ", or HYPHA_" + "__".join(str(part).upper() for part in key) if variables else ""
        origin = (where(key[:-1]) if key[:-1] else None) or ""
        remedy = f"set {name} in the file{variable}" + (f". {about}" if about else "")
        return Problem(origin, name, reason="is missing", remedy=remedy)
    if entries[0][1]["type"] == "extra_forbidden":
        return _unknown_key(model, tuple(entries[0][1]["loc"]), where(key) or "")
    # leave out union branches that expect a table: they do not help a person who wrote a plain value
    plain = [details for _, details in entries if details["type"] != "model_type"]
    reasons = list(dict.fromkeys(map(_reason, plain or [details for _, details in entries])))
    value = _shown(data, key) if key and where(key) else _ABSENT
    return Problem(where(key) or "", name, value, "; or ".join(reasons), about)


def _unknown_key(model: type[BaseModel], key: Key, where: str) -> Problem:
    holder = annotation_at(model, key[:-1])
    here = [name for table in table_types(holder) for name in fields_by_key(table)]
    table = f" of [{dotted(key[:-1])}]" if key[:-1] else ""
    return Problem(where, dotted(key), reason=f"is not a key{table}", remedy=suggest_key(str(key[-1]), model, here))


def _reason(details: ErrorDetails) -> str:
    """Return pydantic's reason, with Python's names of types replaced by those of TOML and JSON."""
    if (expected := _EXPECTED.get(details["type"])) is not None:
        return expected
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:] if message.startswith(("Input", "Extra", "Field")) else message


def _present(model: type[BaseModel], location: Sequence[str | int], data: Any) -> Key:
    """Return the part of pydantic's location that exists in the data or model: it also contains branches of unions."""
    key: Key = ()
    for part in location:
        data = _inside(data, part)
        if data is _ABSENT and (isinstance(part, int) or field_at(model, (*key, part)) is None):
            break
        key = (*key, part)
    return key


def _inside(data: Any, part: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(part, _ABSENT)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else _ABSENT


def _shown(data: Any, key: Key) -> object:
    for part in key:
        data = _inside(data, part)
    return _ABSENT if isinstance(data, dict) else mask_secrets(data, dotted(key))
