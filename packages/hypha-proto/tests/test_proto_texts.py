"""Texts are shortened to their limit, at both ends whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_proto.texts import one_line, quote, shorten


@given(st.text(), st.integers(1, 40))
def test_a_shortened_text_keeps_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        head, tail = short[: limit // 2], short[limit // 2 + 1 :]
        assert (len(short), short[limit // 2]) == (limit, "…")
        assert text.startswith(head)
        assert text.endswith(tail)


@pytest.mark.parametrize(("value", "shown"), [("a\n", r"'a\n'"), ([1], "[1]"), ("x" * 100, f"'{'x' * 39}…{'x' * 38}'")])
def test_a_quoted_value(value: object, shown: str) -> None:
    assert quote(value) == shown


def test_one_line_of_an_error() -> None:
    assert one_line(ValueError(" no\n\n  room "), 80) == "no room"
    assert one_line("a b c d", 5) == "a … d"
