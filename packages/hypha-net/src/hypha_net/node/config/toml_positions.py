"""TOML reader that records the line of each key, which `tomllib` does not report.

`tomllib` parses the document (https://toml.io/en/v1.0.0), then each statement of a document that it accepts by itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_net.node.config.errors import ConfigError, Problem
from hypha_net.node.config.introspection import Key
from hypha_proto.errors import DecodeError

_BEGIN: Final = re.compile(r"""\s*(\[.*\]\s*(#.*)?$|("[^"]*"|'[^']*'|[^=,"'])+=)""")
"""Line that is a header or an assignment, unless it is part of a value of several lines."""


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed document and the lines of its keys."""

    data: dict[str, Any]
    lines: dict[Key, int]
    path: Path

    def where(self, key: Key) -> str:
        """Return ``file:line`` of a key, or of the nearest table that contains it; only the file if neither exists."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.lines:
                return f"{self.path}:{self.lines[key[:end]]}"
        return str(self.path)


def read_toml(text: str, path: Path) -> Document:
    """Parse a document.

    Raises:
        ConfigError: it is not TOML.
    """
    from hypha_proto.codec import check_depth  # imports CBOR and message libraries, which `--help` does not need

    try:
        data = tomllib.loads(text)
        check_depth(data)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError([Problem(f"{path}:{line}", reason=f"is not TOML: {reason}")]) from None
    except (RecursionError, DecodeError):
        raise ConfigError([Problem(f"{path}:1", reason="is not TOML: values are nested too deeply")]) from None
    return Document(data, _find_lines(text.replace("\r\n", "\n")), path)


def _find_lines(text: str) -> dict[Key, int]:
    """Return the line of each key and table of a well-formed document; of one that has several, the first."""
    lines: dict[Key, int] = {}
    tables: dict[Key, int] = {}
    """Last index of each array of tables."""
    table: Key = ()
    for line, statement, parsed in _statements(text):
        names = _names(parsed)
        if not statement.startswith("["):
            path = (*table, *names)
        else:
            if statement.startswith("[["):
                array = (*_with_indices(names[:-1], tables), names[-1])
                tables[array] = tables.get(array, -1) + 1
            path = table = _with_indices(names, tables)
        for end in range(1, len(path) + 1):
            lines.setdefault(path[:end], line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the line of each header and assignment, its text, and what `tomllib` makes of it."""
    begin, statement = 1, ""
    for number, line in enumerate((*text.split("\n"), "[end]"), 1):
        if _BEGIN.match(line) and (parsed := _parse(statement)) is not None:
            if parsed:
                yield begin, statement.lstrip(), parsed
            begin, statement = number, ""
        statement += f"{line}\n"


def _parse(text: str) -> dict[str, Any] | None:
    """Return the values in some lines, or None if they end within a value."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _names(parsed: Any) -> Key:
    """Return the names in a header or before an equals sign."""
    names: list[str] = []
    while isinstance(parsed, dict) and len(parsed) == 1:
        [(name, parsed)] = parsed.items()
        names.append(name)
        parsed = parsed[0] if parsed == [{}] else parsed
    return tuple(names)


def _with_indices(names: Key, tables: dict[Key, int]) -> Key:
    """Return the path of a table; the name of an array of tables means its last one."""
    path: Key = ()
    for name in names:
        path = (*path, name)
        path = (*path, tables[path]) if path in tables else path
    return path
