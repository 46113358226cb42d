"""Prompt templates: text with the names of columns in braces, such as ``Question: {question}``. Pure.

``{{`` and ``}}`` stand for braces. Names are looked up in a row as they are: no attributes, no indices, no formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_PART: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def columns_of(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, each once, in their order.

    Raises:
        ValueError: a brace is not closed or not opened, or a name is empty.
    """
    found: dict[str, None] = {}
    for part in _PART.finditer(template):
        text, name = part.group(), part.group(1)
        if text in ("{{", "}}"):
            continue
        if name is None:
            raise ValueError(f"the {text!r} at character {part.start() + 1} has no counterpart; write it twice")
        if not name:
            raise ValueError(f"the braces at character {part.start() + 1} name no column; write {{{{}}}} for them")
        found[name] = None
    return tuple(found)


def render(template: str, text_of: Callable[[str], str]) -> str:
    """Return the text of a template that `columns_of` accepts.

    Args:
        template: the template.
        text_of: returns what stands for a column.
    """
    return _PART.sub(lambda part: part[0][0] if part[1] is None else text_of(part[1]), template)
