"""Verification of slices: a slice is served only while its file has the digest that the manifest gives.

A file is read again when it has changed since it was last read (`digest_cache`): in the background after the start, and
before it is served.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.from_thread
import anyio.to_thread

from hypha_data.catalog import Dataset
from hypha_data.digest_cache import Fingerprint
from hypha_proto.datasets import MANIFEST, SliceEntry

_log = logging.getLogger(__name__)

READERS: Final = 2
"""Slices that are read at a time in the background, and as many again for requests."""
PROGRESS_INTERVAL: Final = 30.0
"""Seconds between log lines on the progress of reading."""
SAVE_INTERVAL: Final = 10.0
"""Seconds between saves of the digests that were found."""
RECHECK_INTERVAL: Final = 10.0
"""Seconds between looks at the files of withheld slices; a file is read only if it has changed."""


@dataclass(frozen=True, slots=True)
class VerifiedSlice:
    """Slice whose file has the digest of the manifest."""

    index: int
    entry: SliceEntry
    path: Path
    fingerprint: Fingerprint
    """State of the file that was verified."""


class SliceVerifier:
    """Verifies the slices of one dataset. Used in one event loop."""

    def __init__(self, dataset: Dataset) -> None:
        """Start without reading anything."""
        self.dataset = dataset
        self.files_read = 0
        """Number of files that were read because they had changed."""
        self._bytes_read = 0
        self._faults: dict[int, str] = {}
        self._changed = anyio.Event()
        self._locks: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)
        self._on_request = anyio.CapacityLimiter(READERS)
        self._in_background = anyio.CapacityLimiter(READERS)
        self._saving = anyio.CapacityLimiter(1)

    @property
    def withheld(self) -> frozenset[int]:
        """Indices of the slices that were last found not to match the manifest."""
        return frozenset(self._faults)

    async def wait_until_not(self, withheld: frozenset[int]) -> None:
        """Wait until other slices than these are withheld."""
        while self.withheld == withheld:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def verify(self, index: int) -> VerifiedSlice | None:
        """Return slice `index` if its file matches the manifest, else log why it does not and return None.

        Reads the file if it has changed since it was last read.
        """
        return await self._verify(index, self._on_request)

    async def _verify(self, index: int, readers: anyio.CapacityLimiter) -> VerifiedSlice | None:
        entry = self.dataset.manifest.slices[index]
        path = self.dataset.folder / entry.file
        async with self._locks[index]:  # several peers may ask for a slice that has to be read
            try:
                known = await anyio.to_thread.run_sync(self.dataset.digests.find, path)
                found, digest = known or await self._read(path, readers)
            except OSError as error:
                self._report(index, f"it cannot be read: {error.strerror or error}")
                return None
        if digest != entry.digest:
            self._report(index, f"expected {entry.digest}, found {digest}")
            return None
        if self._faults.pop(index, None) is not None:
            self._notify()
            _log.info("dataset %s, slice %d: %s matches again and is served", self.dataset.name, index, path)
        return VerifiedSlice(index, entry, path, found)

    async def _read(self, path: Path, readers: anyio.CapacityLimiter) -> tuple[Fingerprint, str]:
        self.files_read += 1
        return await anyio.to_thread.run_sync(self.dataset.digests.read, path, self._on_read, limiter=readers)

    def _on_read(self, count: int) -> None:
        """Count what a thread has read for the log; raise if the reading is cancelled."""
        self._bytes_read += count
        anyio.from_thread.check_cancelled()

    def _report(self, index: int, fault: str) -> None:
        """Log why a slice is not served, once for each fault."""
        if self._faults.get(index) == fault:
            return
        self._faults[index] = fault
        self._notify()
        dataset, file = self.dataset, self.dataset.slice_path(index)
        if dataset.is_prepared:
            manifest = dataset.folder / MANIFEST
            remedy = f"restore the file; or, if it is meant to be so, remove {manifest} and restart"
        else:
            remedy = "restore the file, or restart this node to announce the dataset as it is now"
        _log.error("dataset %s, slice %d is not served: %s is not as announced: %s; %s",
                   dataset.name, index, file, fault, remedy)  # fmt: skip

    async def is_unchanged(self, verified: VerifiedSlice) -> bool:
        """Return whether the file is still the one that was verified."""
        return await anyio.to_thread.run_sync(verified.fingerprint.matches, verified.path)

    async def find_usable(self) -> bool:
        """Return whether any slice can be served; reads until one can."""
        for index in range(len(self.dataset.manifest.slices)):
            if await self._verify(index, self._in_background) is not None:
                return True
        return False

    async def keep_verified(self) -> None:
        """Verify every slice once, then withheld ones repeatedly, and save their digests, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._save_repeatedly)
            await self.verify_all()
            while True:
                await anyio.sleep(RECHECK_INTERVAL)
                await self.verify_withheld()

    async def verify_withheld(self) -> None:
        """Verify the withheld slices once."""
        await self._verify_each(sorted(self.withheld))

    async def verify_all(self) -> None:
        """Verify every slice once, several at a time; log progress and the result, and save the digests."""
        indices = iter(range(len(self.dataset.manifest.slices)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._log_progress)
            async with anyio.create_task_group() as readers:
                for _ in range(READERS):
                    readers.start_soon(self._verify_each, indices)
            tasks.cancel_scope.cancel()
        await self._save()
        self._log_result()

    async def _verify_each(self, indices: Iterable[int]) -> None:
        for index in indices:
            await self._verify(index, self._in_background)

    async def _log_progress(self) -> None:
        size = sum(entry.size for entry in self.dataset.manifest.slices)
        while True:
            await anyio.sleep(PROGRESS_INTERVAL)
            _log.info("dataset %s: checking slices, %d files with %.1f of at most %.1f GiB read so far",
                      self.dataset.name, self.files_read, self._bytes_read / 2**30, size / 2**30)  # fmt: skip

    def _log_result(self) -> None:
        count, bad = len(self.dataset.manifest.slices), len(self._faults)
        _log.log(
            logging.ERROR if bad else logging.INFO,
            "dataset %s: %d of %d slices match their digests, which took reading %d files",
            self.dataset.name, count - bad, count, self.files_read,
        )  # fmt: skip

    async def _save_repeatedly(self) -> None:
        while True:
            await anyio.sleep(SAVE_INTERVAL)
            await self._save()

    async def _save(self) -> None:
        await anyio.to_thread.run_sync(self.dataset.digests.save, limiter=self._saving)
