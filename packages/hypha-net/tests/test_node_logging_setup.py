"""Logs of a daemon: text from peers cannot forge records, and floods are suppressed."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import socket
from functools import partial

import pytest
import trio

from hypha_net.node import logging_setup
from hypha_net.peer_names import learn_name, name_peers
from hypha_proto.ids import PeerId

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
def test_a_long_text_is_shortened_after_its_secrets_are_hidden(form: logging_setup.LogFormat) -> None:
    out = io.StringIO()
    logging_setup.configure_logs(form, "info", out)
    _log.info("push of %s is refused", "https://host/?key=" + "secret" * 10_000 + " " + "x" * 100_000)
    shown = out.getvalue()
    assert "push of https://host/" in shown
    assert "xx is refused" in shown
    assert "secret" not in shown
    assert len(shown) < 9000


def test_peers_are_named_and_json_has_their_ids() -> None:
    peer, stranger = (PeerId.from_public_key(bytes([number]) * 32) for number in (7, 8))
    learn_name(peer, "gpu-\x1b3")
    shown = f"gpu-?3…{str(peer)[-6:]}"
    address = f"/ip4/192.0.2.1/tcp/1/p2p/{peer}"
    expected = f"{shown} at {address} was refused by {stranger}"

    def logged(form: logging_setup.LogFormat) -> str:
        out = io.StringIO()
        logging_setup.configure_logs(form, "info", out)
        _log.info("%s at %s was refused by %s", peer, address, stranger)
        return out.getvalue().rstrip()

    assert logged("text").endswith(expected)
    entry = json.loads(logged("json"))
    assert (entry["message"], entry["peers"]) == (expected, [str(peer), str(stranger)])
    assert name_peers(str(peer)) == str(peer)  # data


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


def test_a_listener_that_cannot_accept_is_told_of_once_a_minute() -> None:
    """With real connections, of which the process may open no further one: they wait and are accepted then."""
    out = io.StringIO()
    logging_setup.configure_logs("text", "info", out)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    trio.run(_connect_without_descriptors, before)
    [line] = [line for line in out.getvalue().splitlines() if "accept returned EMFILE" in line]
    assert "connections wait for others to end: " in line
    assert "Traceback" not in out.getvalue()


async def _connect_without_descriptors(limit: tuple[int, int]) -> None:
    served = trio.Event()

    async def serve(_stream: trio.SocketStream) -> None:
        served.set()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        client = socket.socket(listener.socket.family)
        lowest = os.dup(client.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
        try:
            client.connect(listener.socket.getsockname()[:2])
            with trio.move_on_after(1.0):
                await served.wait()
            assert not served.is_set()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        await served.wait()
        client.close()
        nursery.cancel_scope.cancel()
