"""Prompt templates: text with `{column}` for a row's values, and `{{`, `}}` for braces.

Only values of the row are inserted, by name: no attributes, no indices, no format specifications.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hypha.accelerate_executor.data.row_errors import RowError

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template.

    Attributes:
        texts: literal parts, one more than columns.
        columns: name of the column between two parts.
    """

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template.

        Raises:
            ValueError: a brace is unbalanced, or a name is empty.
        """
        texts, columns, position = [""], list[str](), 0
        for match in _TOKEN.finditer(text):
            texts[-1] += text[position : match.start()]
            position = match.end()
            token, name = match[0], match[1]
            if name is not None:
                if not name:
                    raise ValueError(f"no column is named at character {match.start()}; write {{column}}")
                columns.append(name)
                texts.append("")
            elif token in ("{{", "}}"):
                texts[-1] += token[0]
            else:
                raise ValueError(f"single {token!r} at character {match.start()}; write {token * 2} for a brace")
        texts[-1] += text[position:]
        return cls(tuple(texts), tuple(columns))

    def render(self, value_of: Callable[[str], Any]) -> str:
        """Return the text with the values of one row.

        Args:
            value_of: returns the value of a column; raises `RowError` if there is none.

        Raises:
            RowError: a value is missing, or neither text, a number nor a boolean.
        """
        pieces = [self.texts[0]]
        for column, text in zip(self.columns, self.texts[1:], strict=True):
            pieces += [_as_text(column, value_of(column)), text]
        return "".join(pieces)


def _as_text(column: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    kind = "null" if value is None else "a list" if isinstance(value, list) else "an object"
    raise RowError("wrong-type", f"column {column!r} is {kind}; the prompt takes text, numbers and booleans")
