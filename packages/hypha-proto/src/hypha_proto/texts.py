"""How messages show a text or value of any length."""

from __future__ import annotations

from typing import Final

QUOTED: Final = 80
"""Characters of a value that a message quotes."""


def shorten(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters: the middle of a longer one is left out, which "…" marks."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def quote(value: object) -> str:
    """Return a value for a message, in quotes if it is text, of at most `QUOTED` characters."""
    return shorten(repr(value), QUOTED)


def one_line(text: object, limit: int) -> str:
    """Return a text, or an error's, without line breaks and repeated spaces, of at most `limit` characters."""
    return shorten(" ".join(str(text).split()), limit)
