"""Registry of strategies: finds them by entry points of the group ``hypha.strategies``, and loads what a job needs.

The name of an entry point is the `type` of its jobs; its object is a `strategies.base.Strategy`. A strategy runs in the
scheduler's process with all its rights, so a scheduler can restrict which are loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, cast

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from hypha_scheduler.errors import JobRefusedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.strategies.base import Strategy

GROUP: Final = "hypha.strategies"
DEFAULT_TYPE: Final = "diloco"
"""Type of a job that names none."""
_OWN_DISTRIBUTION: Final = "hypha-scheduler"
_OTHER_TYPE: Final = "key_of_other_type"
"""Kind of the error for a key that jobs of another type have; for other unknown keys a similar key is suggested."""


@cache
def _installed() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def known_types(allowed: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the types of jobs that this scheduler can run; `allowed` restricts them unless it is None."""
    return tuple(sorted(name for name in _installed() if allowed is None or name in allowed))


def built_in_types() -> tuple[str, ...]:
    """Return the types that come with this package."""
    own = (name for name, point in _installed().items() if point.dist is None or point.dist.name == _OWN_DISTRIBUTION)
    return tuple(sorted(own))


@cache
def _load(name: str) -> Strategy:
    point = _installed()[name]
    try:
        return cast(Strategy, point.load())
    except Exception as error:  # a third party's module may raise anything on import
        raise JobRefusedError(f"strategy {name!r} ({point.value}) cannot be loaded: {error!r}") from error


def load_strategy(name: str, allowed: Collection[str] | None = None) -> Strategy:
    """Return the strategy of a type.

    Raises:
        JobRefusedError: there is none of this name, `allowed` leaves it out, or its module cannot be imported.
    """
    known = known_types(allowed)
    if name in known:
        return _load(name)
    if name in _installed():
        raise JobRefusedError(f"strategy {name!r} is installed, but scheduler.strategies does not list it")
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise JobRefusedError(f"no strategy {name!r} is installed; known: {', '.join(known) or 'none'}{hint}")


def parse_job(value: Any, allowed: Collection[str] | None = None) -> JobTable:
    """Validate the table of a job with the model of its type.

    Raises:
        ValueError: `value` is not a table, or no strategy of its type can be loaded.
        ValidationError: keys are missing or invalid. A key of another type is an error that names this type.
    """
    if isinstance(value, JobTable):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("job_table", "a job is a table of keys")
    name = value.get("type", DEFAULT_TYPE)
    if not isinstance(name, str):
        raise PydanticCustomError("job_type", "type: the name of a strategy is text")
    try:
        table = load_strategy(name, allowed).job_table
    except JobRefusedError as error:
        raise ValueError(f"type: {error}") from None
    try:
        return table.model_validate(value)
    except ValidationError as error:
        raise _naming_other_types(error, name, allowed) from None


def _naming_other_types(error: ValidationError, name: str, allowed: Collection[str] | None) -> ValidationError:
    """Return the error with the reason for keys that belong to jobs of another type."""
    lines: list[InitErrorDetails] = []
    for details in error.errors(include_url=False):
        kind, message = details["type"], details["msg"]
        owners = _types_with(str(details["loc"][-1]), allowed) if kind == "extra_forbidden" else []
        if owners and len(details["loc"]) == 1:
            kind = _OTHER_TYPE
            message = f'this key belongs to jobs of type = "{owners[0]}"; this job is of type = "{name}"'
        kind_literal = cast(Any, kind)  # pydantic wants literal strings, to keep types and messages few
        line = PydanticCustomError(kind_literal, cast(Any, message))
        lines.append(InitErrorDetails(type=line, loc=details["loc"], input=details["input"]))
    return ValidationError.from_exception_data(error.title, lines)


def _types_with(key: str, allowed: Collection[str] | None) -> list[str]:
    """Return the types that come with this package, or were loaded, whose jobs have a key."""
    types = built_in_types() if allowed is None else [name for name in built_in_types() if name in allowed]
    return [name for name in types if key in _load(name).job_table.model_fields]
