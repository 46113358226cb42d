"""Logs of a daemon: text from peers cannot forge records, and floods are suppressed."""

from __future__ import annotations

import io
import json
import logging

import pytest

from hypha_net.node import logging_setup

_log = logging.getLogger("hypha_net.test")


def test_message_text_cannot_forge_a_record_or_move_the_cursor() -> None:
    out = io.StringIO()
    logging_setup.configure_logs("text", "info", out)
    _log.info("push of %s", "a\n2026-01-01T00:00:00.000Z ERROR hypha: forged\r\x1b[2J\x9b1m\tb")
    first, second = out.getvalue().splitlines()
    assert first.endswith("push of a")
    assert second == r"  2026-01-01T00:00:00.000Z ERROR hypha: forged\x0d\x1b[2J\x9b1m" + "\tb"


def test_exception_text_cannot_forge_a_record() -> None:
    out = io.StringIO()
    logging_setup.configure_logs("text", "info", out)
    try:
        raise ValueError("a\n2026-01-01T00:00:00.000Z ERROR hypha: forged\x1b[2J")
    except ValueError:
        _log.exception("serving failed")
    first, *others = out.getvalue().splitlines()
    assert first.endswith("serving failed")
    assert others[0] == "  Traceback (most recent call last):"
    assert others[-1] == r"  2026-01-01T00:00:00.000Z ERROR hypha: forged\x1b[2J"
    assert all(line.startswith("  ") for line in others)


@pytest.mark.parametrize("form", ["text", "json"])
def test_flood_from_one_source_line_is_suppressed_for_a_minute(
    form: logging_setup.LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    logging_setup.configure_logs(form, "info", out)

    def complain(number: int) -> None:
        _log.warning("complaint %d", number)

    for number in range(3 * logging_setup.FLOOD):
        complain(number)
    _log.warning("another thing")
    lines = out.getvalue().splitlines()
    assert len(lines) == logging_setup.FLOOD + 1
    assert f"complaint {logging_setup.FLOOD - 1} (no more of these" in lines[-2]
    assert "another thing" in lines[-1]
    monkeypatch.setattr(logging_setup, "FLOOD_SECONDS", 0.0)
    complain(0)
    assert "complaint 0" in out.getvalue().splitlines()[-1]
    monkeypatch.undo()
    for _ in range(2 * logging_setup.FLOOD):
        _log.warning("output", extra={"unlimited": True})
    assert "more of these" not in out.getvalue().splitlines()[-1]
    assert sum("output" in line for line in out.getvalue().splitlines()) == 2 * logging_setup.FLOOD
    if form == "json":
        assert all(json.loads(line)["level"] == "warning" for line in out.getvalue().splitlines())
