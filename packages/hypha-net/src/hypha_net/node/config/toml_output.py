"""TOML that programs write: the commented file of ``init``, and the values and origins that ``config show`` prints."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hypha_net.node.config.introspection import Key, dotted, fields_by_key, leaves, listed_tables, table_types
from hypha_net.node.config.loader import DEFAULT, Loaded
from hypha_net.node.config.models import NodeConfig, mask_secrets

_WIDTH: Final = 110


def render_config(model: type[NodeConfig], values: Mapping[str, Any], program: str) -> str:
    """Render a commented TOML document.

    Args:
        values: values to fill in, nested as in the file; a list of tables becomes one ``[[table]]`` each. Every
            other option is written as a comment with its default.
    """
    head = [
        f"Configuration of {program}. Every option is listed; those behind a # are at their default.",
        f"Start with: {program} run --config FILE. Check without starting: {program} run --check --config FILE.",
    ]
    return render_table(model, values, head)


def render_table(model: type[BaseModel], values: Mapping[str, Any], head: Sequence[str]) -> str:
    """Render a commented TOML document that is one table of any model.

    Args:
        values: see `render_config`.
        head: first lines, which become comments.
    """
    return "\n".join([*(f"# {line}" for line in head), *_table(model, values, ())]) + "\n"


def _table(model: type[BaseModel], values: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    """Yield the keys of a table, then its sub-tables: in TOML a key belongs to the header above it."""
    later: list[tuple[str, FieldInfo]] = []
    for name, info in fields_by_key(model).items():
        if _is_table(info, values.get(name)):
            later.append((name, info))
        else:
            yield ""
            yield from _comment(info.description)
            yield from _assignment(name, info, values)
    for name, info in later:
        yield from _sub_table(info, values.get(name), (*at, name))


def _is_table(info: FieldInfo, value: Any) -> bool:
    if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return True
    only_tables = bool(table_types(info.annotation)) and not isinstance(_default(info), (str, int, float, bool))
    return only_tables or bool(listed_tables(info.annotation))


def _sub_table(info: FieldInfo, value: Any, at: tuple[str, ...]) -> Iterator[str]:
    listed = listed_tables(info.annotation)
    found = listed or table_types(info.annotation)
    given = (value if isinstance(value, list) else [value]) if value else []
    for index, entry in enumerate(given or [{}]):
        yield ""
        yield from _comment(info.description if not index else None)
        header = f"[[{'.'.join(at)}]]" if listed else f"[{'.'.join(at)}]"
        body = (
            list(_table(found[0], entry, at)) if found else [f"{key} = {to_toml(part)}" for key, part in entry.items()]
        )
        yield from ([header, *body] if given else _commented([header, *body]))


def _commented(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield f"# {line}" if line and not line.startswith("#") else line


def _comment(description: str | None) -> Iterator[str]:
    for paragraph in (description or "").splitlines():
        yield from (f"# {line}" for line in textwrap.wrap(paragraph, _WIDTH))


def _assignment(name: str, info: FieldInfo, values: Mapping[str, Any]) -> Iterator[str]:
    if name in values:
        yield f"{name} = {to_toml(values[name])}"
        return
    default = _default(info)
    if default is None:
        yield f"# {name} ="
    else:
        yield from (f"# {line}" for line in f"{name} = {to_toml(default)}".splitlines())


def _default(info: FieldInfo) -> Any:
    if info.is_required():
        return None
    return info.get_default(call_default_factory=True, validated_data={})


def to_toml(value: Any, *, width: int | None = _WIDTH) -> str:
    """Return a plain value as TOML; a list wider than `width` is split over several lines."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{key_text(key)} = {to_toml(part)}" for key, part in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, (list, tuple)):
        parts = [to_toml(part) for part in value]
        line = f"[{', '.join(parts)}]"
        return (
            line if width is None or len(line) <= width else "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
        )
    # JSON string escapes are valid in TOML
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False, default=str)


def key_text(name: str) -> str:
    """Return a bare key, quoted if TOML requires it."""
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


@dataclass(frozen=True, slots=True)
class Row:
    """One value and its origin."""

    key: str
    value: Any
    origin: str
    written: str
    """The key in TOML syntax: a part with a dot is quoted."""

    def __str__(self) -> str:
        if self.value is None:
            return f"# {self.written} is not set  # {self.origin}"
        return f"{self.written} = {to_toml(self.value, width=None)}  # {self.origin}"


def rows(loaded: Loaded[NodeConfig]) -> list[Row]:
    """Return every key of a configuration, in the model's order."""
    data = mask_secrets(loaded.config.model_dump(mode="json", by_alias=True))
    return [Row(key := dotted(at), value, _origin(loaded, key), _written(at)) for at, value in leaves(data)]


def _written(at: Key) -> str:
    return dotted(tuple(key_text(part) if isinstance(part, str) else part for part in at))


def _origin(loaded: Loaded[NodeConfig], key: str) -> str:
    """Return the origin of the key, of a key inside it (for a masked table), or of the table that contains it."""
    for known, origin in loaded.origins.items():
        if known == key or known.startswith((f"{key}.", f"{key}[")) or key.startswith((f"{known}.", f"{known}[")):
            return origin
    return DEFAULT
