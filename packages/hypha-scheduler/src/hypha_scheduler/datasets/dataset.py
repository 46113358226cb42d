"""Finds a job's dataset: who serves it, and what its slices are.

First room on a slice's way in the scheduler; after it `strategies.diloco.slices` hands the slices out, and `providers`
says who has them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from hypha_net import transfer
from hypha_net.dataset_directory import FoundDataset, find_dataset
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, TransferRefusedError, UnreachableError
from hypha_proto.codec import from_json
from hypha_proto.datasets import Manifest, SliceEntry
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest
from hypha_scheduler.errors import JobFailedError

_log = logging.getLogger(__name__)

MAX_SLICES: Final = 10_000_000
MAX_MANIFEST: Final = 256 << 20
_PAUSE: Final = 0.25
_MANIFEST_TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that can be trained on."""

    name: str
    provider: PeerId
    slices: tuple[SliceEntry | None, ...]
    """What is known of each slice; none where the data node keeps no manifest."""
    pinned: str | None = None
    """Digest of the manifest that was announced and pulled: what other data nodes must announce to serve this job."""

    @property
    def samples(self) -> list[int | None]:
        """Samples of each slice."""
        return [None if entry is None else entry.samples for entry in self.slices]

    def digest(self, index: int) -> str | None:
        """Digest of a slice, where known."""
        entry = self.slices[index]
        return None if entry is None else entry.digest


async def open_dataset(endpoint: Endpoint, name: str, manifest: Path, *, timeout: float) -> Dataset:
    """Look a dataset up until someone serves it, and pull its manifest to `manifest`.

    Raises:
        JobFailedError: nobody announced it within `timeout` seconds, or nobody who did can be used.
    """
    deadline = anyio.current_time() + timeout
    why = "nobody announces it"
    while True:
        for found in await _find(endpoint, name):
            try:
                return await _open(endpoint, name, found, manifest)
            except (NetError, DecodeError, ValueError, OSError) as error:
                why = f"{found.provider}: {error}"
                _log.warning("dataset %s at %s", name, why)
        if anyio.current_time() + _PAUSE >= deadline:
            raise JobFailedError(f"dataset {name!r} was not found within {timeout:g} s: {why}")
        await anyio.sleep(_PAUSE)


async def _find(endpoint: Endpoint, name: str) -> list[FoundDataset]:
    try:
        return await find_dataset(endpoint, name)
    except UnreachableError as error:
        _log.info("the directory cannot be asked for dataset %s: %s", name, error)
        return []


async def _open(endpoint: Endpoint, name: str, found: FoundDataset, path: Path) -> Dataset:
    count = found.record.num_slices
    if not 0 < count <= MAX_SLICES:
        raise ValueError(f"{count} slices are announced, usable are 1 to {MAX_SLICES}")
    request = PullRequest(dataset=name, index=0, name="manifest")
    try:
        await transfer.pull(
            endpoint, found.provider, request, path,
            max_bytes=MAX_MANIFEST, digest=found.record.manifest, timeout=_MANIFEST_TIMEOUT,
        )  # fmt: skip
    except TransferRefusedError as error:
        _log.info("%s has no manifest of dataset %s, slices count as used when more are asked for: %s",
                  found.provider, name, error)  # fmt: skip
        return Dataset(name, found.provider, (None,) * count)
    manifest: Manifest = from_json(Manifest, await anyio.Path(path).read_bytes())
    empty = [entry.file for entry in manifest.slices if entry.samples == 0]
    if len(manifest.slices) != count or empty:
        raise ValueError(
            f"its manifest has {len(manifest.slices)} slices, {len(empty)} of them empty; {count} announced"
        )
    return Dataset(name, found.provider, manifest.slices, found.record.manifest)
