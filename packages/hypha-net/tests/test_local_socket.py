"""Unix sockets whose paths are longer than the system allows, and clients after one that could not be accepted."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest

from hypha_net.local_socket import PATH_LIMIT, accept_clients, listen, send_answer, send_request, shortened


@pytest.mark.parametrize("size", [PATH_LIMIT, PATH_LIMIT + 1, 1000])
def test_a_socket_is_bound_and_connected_to_by_a_path_of_any_length(tmp_path: Path, size: int) -> None:
    folder = tmp_path
    while (left := size - len(os.fsencode(folder / "s"))) > 1:
        folder /= "x" * min(left - 1, 200)
    path = folder / ("s" * (left + 1))
    folder.mkdir(parents=True, exist_ok=True)
    assert len(os.fsencode(path)) == size
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with shortened(path) as short:
            listener.bind(str(short))
        listener.listen()
        with shortened(path) as short:
            assert (short == path) == (size == PATH_LIMIT)
            client.connect(str(short))
        served, _ = listener.accept()
        served.close()
    assert path.is_socket()


def test_a_folder_that_does_not_exist_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), shortened(tmp_path / ("x" * 150) / "socket"):
        pass


async def test_clients_are_accepted_after_one_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when no further file can be opened: under trio, anyio raises `BrokenResourceError` then."""
    full = OSError(errno.EMFILE, "Too many open files")
    failures = [full, full, full]

    async def answer(client: anyio.abc.SocketStream) -> None:
        async with client:
            await send_answer(client, {"received": (await client.receive()).decode()})

    def ask() -> bytes:
        with send_request(tmp_path / "s", {"a": 1}) as connection:
            return connection.recv(100)

    monkeypatch.setattr("hypha_net.local_socket._ACCEPT_PAUSE", 0.0)
    async with listen(tmp_path / "s", "end it") as listener, anyio.create_task_group() as tasks:
        accept = type(listener).accept

        async def fail_at_first(self: Any) -> Any:
            if failures:
                raise anyio.BrokenResourceError from failures.pop()
            return await accept(self)

        monkeypatch.setattr(type(listener), "accept", fail_at_first)
        tasks.start_soon(accept_clients, listener, lambda client: tasks.start_soon(answer, client))
        assert await anyio.to_thread.run_sync(ask) == b'{"received": "{\\"a\\": 1}"}\n'
        assert caplog.text.count("clients cannot be accepted: [Errno 24] Too many open files") == 1
        with pytest.raises(OSError, match="end it"):
            async with listen(tmp_path / "s", "end it"):
                pass
        tasks.cancel_scope.cancel()
    assert list(tmp_path.iterdir()) == []
