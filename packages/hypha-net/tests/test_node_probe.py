"""Agent version in identify answers, including malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_net.node.probe import read_agent


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def test_agent_is_read_from_the_message_fields() -> None:
    message = field(1, b"key") + field(2, b"\x04address") + field(5, b"/hypha-identify/0.0.1") + field(6, b"rust/1.0")
    assert read_agent(bytes([len(message)]) + message) == "rust/1.0"
    assert read_agent(bytes([len(message) | 0x80, 0]) + message) == "rust/1.0"


@pytest.mark.parametrize(
    "answer", [b"", b"\xff", b"\x02\x08\x01", b"\x05" + field(1, b"abc"), b"\x02\x32", b"\x09\xfa"]
)
def test_missing_agent_is_empty(answer: bytes) -> None:
    assert read_agent(answer) == ""


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_an_agent_of_bounded_length(answer: bytes) -> None:
    assert len(read_agent(answer)) <= 200
