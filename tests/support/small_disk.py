"""A small disk for tests of full disks; needs the right to mount."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.requirements import skip_outside_ci


@contextmanager
def small_disk(folder: Path, size: int, mode: str = "755") -> Iterator[None]:
    """Mount a disk of `size` bytes on a folder; skip the test where that is not possible, but fail it in CI."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode={mode}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if mounted.returncode != 0:
        skip_outside_ci(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=10, check=True)


@contextmanager
def limited(kind: int, size: int) -> Iterator[None]:
    """Set a soft limit of this process; one of the file size fails like a full disk, with "too large"."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def fill(path: Path, left: int = 0) -> None:
    """Append to a file until so many bytes of its disk are left.

    Does nothing if there are fewer, or if another process takes the room in between: call it again until the effect is
    seen.
    """
    with path.open("ab") as file:
        disk = os.fstatvfs(file.fileno())
        size = disk.f_bavail * disk.f_frsize - left
        if size <= 0:
            return
        try:
            os.posix_fallocate(file.fileno(), file.tell(), size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Keep the disk of a folder full, also while processes that write to it delete files."""
    path, ended = folder / "filler", threading.Event()

    def keep_full() -> None:
        fill(path)
        while not ended.wait(0.05):
            fill(path)

    thread = threading.Thread(target=keep_full, name="keep the disk full")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink()
