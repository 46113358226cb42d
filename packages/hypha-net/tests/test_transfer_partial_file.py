"""Incomplete files of transfers: kept within limits, resumable, and no larger on disk than what was received."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hypha_net.errors import TransferRefusedError
from hypha_net.transfer.io import partial_file


def _suspended_file(folder: Path, digest: str, received: int = 2 << 20) -> Path:
    file = partial_file.open_partial_file(folder / "target", 3 << 20, digest)
    file.append(memoryview(bytes(received)))
    file.suspend()
    return file.path


def test_suspended_files_are_limited_in_number_and_age(tmp_path: Path) -> None:
    old = _suspended_file(tmp_path, "blake3:" + "f" * 64)
    os.utime(old, (time.time() - partial_file.MAX_AGE - 60,) * 2)
    kept = []
    for number in range(partial_file.MAX_SUSPENDED + 3):
        kept.append(_suspended_file(tmp_path, f"blake3:{number:064x}"))
        os.utime(kept[-1], (time.time() - 1000 + number,) * 2)
    written = partial_file.open_partial_file(tmp_path / "target", 3 << 20, "blake3:" + "e" * 64)
    os.utime(written.path, (1, 1))  # old, but it is being written
    _suspended_file(tmp_path, "blake3:" + "d" * 64)
    assert not old.exists()
    assert written.path.exists()
    assert len(list(tmp_path.iterdir())) <= partial_file.MAX_SUSPENDED + 2
    assert kept[-1].exists()
    assert not kept[0].exists()


def test_stored_bytes_survive_the_end_of_the_process(tmp_path: Path) -> None:
    digest = "blake3:" + "a" * 64
    file = partial_file.open_partial_file(tmp_path / "target", 3 << 20, digest)
    file.append(memoryview(bytes(2 << 20)))
    file.file.close()  # as the end of the process does
    assert partial_file.resumable_bytes(tmp_path / "other", digest) == 2 << 20
    assert partial_file.open_partial_file(tmp_path / "other", 3 << 20, digest).received == 2 << 20


def test_small_partial_file_is_not_kept(tmp_path: Path) -> None:
    _suspended_file(tmp_path, "blake3:" + "a" * 64, 1000)
    assert list(tmp_path.iterdir()) == []


def test_suspended_file_uses_only_the_space_of_its_bytes(tmp_path: Path) -> None:
    file = partial_file.open_partial_file(tmp_path / "target", 64 << 20, "blake3:" + "a" * 64)
    file.append(memoryview(bytes(2 << 20)))
    assert file.path.stat().st_blocks * 512 >= 64 << 20
    file.suspend()
    assert file.path.stat().st_blocks * 512 < 4 << 20
    again = partial_file.open_partial_file(tmp_path / "target", 64 << 20, "blake3:" + "a" * 64)
    assert again.received == 2 << 20
    assert file.path.stat().st_blocks * 512 >= 64 << 20
    again.discard()


class Quota:
    """Allows files of 5 MiB in all."""

    def __init__(self) -> None:
        self.reserved: dict[Path, int] = {}

    def reserve(self, path: Path, size: int) -> None:
        if sum(self.reserved.values()) - self.reserved.get(path, 0) + size > 5 << 20:
            raise TransferRefusedError("full")
        self.reserved[path] = size

    def release(self, path: Path) -> None:
        self.reserved.pop(path, None)


def test_a_quota_is_asked_before_anything_is_allocated(tmp_path: Path) -> None:
    quota = Quota()
    first = partial_file.open_partial_file(tmp_path / "a", 3 << 20, "blake3:" + "a" * 64, quota)
    with pytest.raises(TransferRefusedError):
        partial_file.open_partial_file(tmp_path / "b", 3 << 20, "blake3:" + "b" * 64, quota)
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    first.append(memoryview(bytes(2 << 20)))
    first.suspend()
    assert quota.reserved == {}
