"""The trained model: the scheduler's copy of the start model, to which every outer update is added.

The parameter server pushes the outer updates to the scheduler as to the workers; the copy is the job's result. It is
the rounding of weights that are kept in float32, as workers have them, beside it (`hypha_proto.global_model`).
"""

from __future__ import annotations

import errno
import logging
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_proto.job_spec import Nesterov
from hypha_scheduler.errors import files_unusable
from hypha_scheduler.jobs.artifacts import sync_to_disk, translate_update_errors

OUTER_STATE: Final = "outer-state"
"""Directory of the float32 weights and the outer momentum, in the run directory."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ResultModel:
    """The job's copy of the model, to which outer updates are added."""

    directory: Path
    """Directory of the model's files."""
    optimizer: Nesterov
    """The job's outer optimizer."""
    every: int = 1
    """Number of received updates after which they are added to the files."""
    round: int = 0
    """Last round whose outer update was received."""
    update_bytes: int = 0
    """Size of the last outer update in bytes."""
    _added: int = field(init=False)
    """Last round whose outer update is in the files."""
    _pending: list[Path] = field(default_factory=list)
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    def __post_init__(self) -> None:
        self._added = self.round

    async def apply_update(self, update: Path, round_number: int) -> None:
        """Take the outer update of the next round and add it to the model; the file is deleted afterwards.

        Raises:
            JobFailedError: the update does not match the model.
        """
        async with self._lock:
            if round_number != self.round + 1:
                await anyio.Path(update).unlink(missing_ok=True)
                _log.info("ignoring the outer update of round %d, expected round %d", round_number, self.round + 1)
                return
            self.update_bytes = (await anyio.Path(update).stat()).st_size
            self._pending.append(update)
            if len(self._pending) >= self.every:
                await self._add_pending()
            self.round = round_number

    def largest_update(self) -> int:
        """Return the size limit of an outer update in bytes: float32 for a model stored in 8 bits or more a number."""
        return 4 * sum(path.stat().st_size for path in self.directory.glob("*.safetensors")) + (16 << 20)

    def lacks_room(self, size: int) -> str | None:
        """Return why an outer update of `size` bytes cannot be stored, or None if there is room for it."""
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            return files_unusable(self.directory.parent, [error])
        if size <= free:
            return None
        full = OSError(errno.ENOSPC, f"an outer update has {size} bytes, {free} are free", str(self.directory.parent))
        return files_unusable(self.directory.parent, [full])

    async def finish(self) -> None:
        """Add the remaining updates and sync the model to disk.

        Raises:
            JobFailedError: an update does not match the model.
            OSError: the files cannot be synced.
        """
        async with self._lock:
            await self._add_pending()
            await anyio.to_thread.run_sync(sync_to_disk, *(p for p in self.directory.rglob("*") if p.is_file()))

    async def _add_pending(self) -> None:
        if not self._pending:
            return
        from hypha_proto.global_model import GlobalModel  # imported late: numpy takes 0.1 s

        model = GlobalModel(self.directory, self.directory.with_name(OUTER_STATE), self.optimizer)
        with translate_update_errors(self.directory, self._pending[-1]):
            await anyio.to_thread.run_sync(partial(model.add, self._pending, self._added + 1))
        self._added += len(self._pending)
        for update in self._pending:
            update.unlink()
        self._pending.clear()
