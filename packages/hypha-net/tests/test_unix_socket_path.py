"""Unix sockets whose paths are longer than the system allows."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hypha_net.unix_socket_path import PATH_LIMIT, shortened


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
