"""TOML reader that records the line of each key, which `tomllib` does not report.

`tomllib` parses the document (https://toml.io/en/v1.0.0); a scan of documents that it accepts finds the lines.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_proto.errors import DecodeError

Key = tuple[str | int, ...]
"""Path of a value: table names, keys and array indices."""

_KEY_PART: Final = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*""")
# coarse tokens of a value: strings first, so that brackets, commas and comments inside quotes are skipped
_TOKEN: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*|[\[\]{}\n]|[^\"'#\[\]{}\n]+",
    re.DOTALL,
)


class TomlError(ValueError):
    """Invalid TOML document; `line` is the line of the error, if known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


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
        TomlError: it is not TOML.
    """
    from hypha_proto.codec import check_depth  # imports CBOR and message libraries, which `--help` does not need

    try:
        data = tomllib.loads(text)
        check_depth(data)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise TomlError(re.sub(r" \(at .*\)$", "", str(error)), line) from None
    except (RecursionError, DecodeError):
        raise TomlError("values are nested too deeply", 1) from None
    return Document(data, _LineScanner(text.replace("\r\n", "\n")).lines(), path)


class _LineScanner:
    """Single pass over a well-formed document."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._table: Key = ()
        self._counts: dict[Key, int] = {}
        self._lines: dict[Key, int] = {}

    def lines(self) -> dict[Key, int]:
        while self._skip_blank():
            if self._text[self._at] == "[":
                self._header()
            else:
                self._record_line((*self._table, *self._names()))
                self._at += 1  # the equals sign
                self._value()
        return self._lines

    def _skip_blank(self) -> bool:
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "#":
                self._at = self._end_of_line()
            elif letter.isspace():
                self._at += 1
            else:
                return True
        return False

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _names(self) -> tuple[str, ...]:
        names = []
        while part := _KEY_PART.match(self._text, self._at):
            names.append(_unquoted(part[1]))
            self._at = part.end()
            if self._text[self._at] != ".":
                break
            self._at += 1
        return tuple(names)

    def _header(self) -> None:
        array = self._text.startswith("[[", self._at)
        self._at += 2 if array else 1
        names = self._names()
        if array:
            path = self._header_path(names[:-1]) + names[-1:]
            self._counts[path] = self._counts.get(path, -1) + 1
        self._table = self._header_path(names)
        self._record_line(self._table)
        self._at = self._end_of_line()

    def _header_path(self, names: Key) -> Key:
        """Return the path of a header: an array of tables means its latest element."""
        path: Key = ()
        for name in names:
            path = (*path, name)
            if path in self._counts:
                path = (*path, self._counts[path])
        return path

    def _value(self) -> None:
        depth = 0
        while token := _TOKEN.match(self._text, self._at):
            if token[0] == "\n" and depth == 0:
                return
            depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
            self._at = token.end()

    def _record_line(self, path: Key) -> None:
        for end in range(1, len(path) + 1):
            self._lines.setdefault(path[:end], self._line())

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1


def _unquoted(name: str) -> str:
    if name[0] == "'":
        return name[1:-1]
    return str(next(iter(tomllib.loads(f"{name} = 0")))) if name[0] == '"' else name
