"""Introspection of configuration models: keys, types and descriptions by position."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Key = tuple[str | int, ...]
"""Path of a value: table names, keys and array indices."""


def dotted(key: Key, *, indices: bool = True) -> str:
    """Return a key as text: ``executors[0].name``, or ``executors.name`` without indices."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]" if indices else ""
        else:
            text += f".{part}" if text else part
    return text


def leaves(value: Any, at: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the position and value of everything that is neither a table with keys nor a list of tables."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, (*at, name))
    elif isinstance(value, list | tuple) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield from leaves(part, (*at, index))
    else:
        yield at, value


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a model's fields by the names that a file uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def union_members(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation accepts, with unions and `Annotated` unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from union_members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from union_members(part)
    else:
        yield annotation


def table_types(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a value of this annotation may be validated by."""
    return [kind for kind in union_members(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def item_types(annotation: Any) -> list[Any]:
    """Return the element annotations of the lists that a value of this annotation may be."""
    return [
        get_args(kind)[0] for kind in union_members(annotation) if get_origin(kind) in (list, tuple) and get_args(kind)
    ]


def listed_tables(annotation: Any) -> list[type[BaseModel]]:
    """Return the models of the elements of the lists that a value of this annotation may be."""
    return [table for item in item_types(annotation) for table in table_types(item)]


def allows_any_key(annotation: Any) -> bool:
    """Return whether a value may be a table with arbitrary keys."""
    return any(kind is dict or get_origin(kind) in (dict, Mapping) for kind in union_members(annotation))


def accepts(annotation: Any, kind: type) -> bool:
    """Return whether a value may be of exactly the type `kind`."""
    return any(part is kind for part in union_members(annotation))


def annotation_at(model: type[BaseModel], key: Key) -> Any:
    """Return the annotation of the value at `key`; None if the model has no such key."""
    found: Any = model
    for part in key:
        if isinstance(part, int):
            found = next(iter(item_types(found)), None)
        else:
            found = next((f[part].annotation for t in table_types(found) if part in (f := fields_by_key(t))), None)
        if found is None:
            return None
    return found


def field_at(model: type[BaseModel], key: Key) -> FieldInfo | None:
    """Return the field that the last name of `key` refers to."""
    while key and isinstance(key[-1], int):
        key = key[:-1]
    if not key:
        return None
    holder = annotation_at(model, key[:-1])
    return next((f[key[-1]] for t in table_types(holder) if key[-1] in (f := fields_by_key(t))), None)


def description_of(model: type[BaseModel], key: Key) -> str:
    """Return the description of a key, or an empty string."""
    info = field_at(model, key)
    return (info.description or "") if info is not None else ""


def suggest_key(model: type[BaseModel], key: Key) -> str:
    """Return a hint for an unknown key: a similar key in its table or another one, or the list of known keys."""
    tables = table_types(annotation_at(model, key[:-1])) or [model]
    return suggest_name(str(key[-1]), model, [name for table in tables for name in fields_by_key(table)])


def suggest_name(name: str, model: type[BaseModel], here: list[str]) -> str:
    """Return a hint for an unknown key of a table that has the keys `here`, as `suggest_key` does."""
    if close := difflib.get_close_matches(name, here, n=1, cutoff=0.6):
        return f"did you mean {close[0]}?"
    paths = list(_paths(model))
    exact = [path for path in paths if path[-1] == name]
    if exact:
        return f"did you mean {dotted(exact[0])}?"
    known = {str(path[-1]): path for path in reversed(paths)}
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return f"did you mean {dotted(known[close[0]])}?"
    return f"known here: {', '.join(sorted(here))}"


def _paths(model: type[BaseModel], at: Key = (), seen: tuple[type[BaseModel], ...] = ()) -> Iterator[Key]:
    for name, info in fields_by_key(model).items():
        key = (*at, name)
        yield key
        for table in table_types(info.annotation) + listed_tables(info.annotation):
            if table not in seen:
                yield from _paths(table, key, (*seen, model))


def with_absolute_paths(value: Any, annotation: Any, base: Path) -> Any:
    """Return `value` with every relative path in it (by annotation) resolved against `base`."""
    if isinstance(value, str) and accepts(annotation, Path):
        return str(base / Path(value).expanduser()) if value else value
    if isinstance(value, list):
        inner = next(iter(item_types(annotation)), None)
        return [with_absolute_paths(part, inner, base) for part in value]
    if isinstance(value, dict):
        known = {
            name: info.annotation for table in table_types(annotation) for name, info in fields_by_key(table).items()
        }
        return {name: with_absolute_paths(part, known.get(name), base) for name, part in value.items()}
    return value
