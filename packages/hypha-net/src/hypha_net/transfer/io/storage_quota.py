"""The interface by which a caller bounds the disk space of several transfers together.

`partial_file` asks it before it allocates or writes anything. The worker implements it for all files of a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class StorageQuota(Protocol):
    """Bound on the bytes of several files. Its methods are called in worker threads, from several at once."""

    def reserve(self, path: Path, size: int) -> None:
        """Count `size` bytes for the file at `path`, which may hold fewer yet; replaces its earlier reservation.

        Raises:
            TransferRefusedError: the files together would exceed the bound; the reservation stays as it was.
        """
        ...

    def release(self, path: Path) -> None:
        """Count what the file at `path` holds instead of its reservation. No error without one."""
        ...
