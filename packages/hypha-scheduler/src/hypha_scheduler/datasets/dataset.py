"""Dataset discovery: finds a data node that provides a job's dataset, and reads the list of its slices.

`strategies.diloco.sample_ledger` assigns the slices to workers, and `providers` tracks the data nodes that have them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

import anyio

from hypha_net import transfer
from hypha_net.dataset_directory import FoundDataset, find_dataset
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, TransferRefusedError, UnreachableError
from hypha_proto.codec import from_json
from hypha_proto.datasets import MANIFEST, MAX_MANIFEST, SLICE_SUFFIXES, Manifest, SliceEntry
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.texts import quote
from hypha_proto.transfer import PullRequest
from hypha_scheduler.errors import JobFailedError

_log = logging.getLogger(__name__)

MAX_SLICES: Final = 10_000_000
_PAUSE: Final = 0.25
_MANIFEST_TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True)
class DatasetView:
    """Dataset of a job, pinned to one manifest."""

    name: str
    """Name, as data nodes announce it."""
    provider: PeerId
    """Data node that sent the manifest."""
    slices: tuple[SliceEntry | None, ...]
    """Manifest entry of each slice; None where the data node has no manifest."""
    pinned: str | None = None
    """Digest of the pulled manifest; data nodes that announce another digest do not serve this job."""
    format: str | None = None
    """Format of the slices; None means safetensors."""
    columns: Mapping[str, str] | None = None
    """Kind of each column by name; None where the manifest says nothing."""
    labels: Sequence[str] | None = None
    """Names of the classes; None where the manifest says nothing."""

    @property
    def samples(self) -> list[int | None]:
        """Number of samples of each slice, None where unknown."""
        return [None if entry is None else entry.samples for entry in self.slices]

    def describe(self, index: int) -> str:
        """Return a slice's number, and the name of its file where the manifest gives one."""
        entry = self.slices[index]
        return f"slice {index}" if entry is None else f"slice {index} ({quote(entry.file)})"

    def digest(self, index: int) -> str | None:
        """Return the digest of a slice, or None if unknown."""
        entry = self.slices[index]
        return None if entry is None else entry.digest


async def open_dataset(endpoint: Endpoint, name: str, manifest: Path, *, timeout: float) -> DatasetView:
    """Look up a dataset until a data node provides it, and pull its manifest to the file `manifest`.

    Raises:
        JobFailedError: no usable data node announced it within `timeout` seconds.
    """
    deadline = anyio.current_time() + timeout
    why = "no data node announces it"
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
        _log.info("DHT lookup of dataset %s failed: %s", name, error)
        return []


async def _open(endpoint: Endpoint, name: str, found: FoundDataset, path: Path) -> DatasetView:
    count = found.record.num_slices
    if not 0 < count <= MAX_SLICES:
        raise ValueError(f"it announces {count} slices, allowed are 1 to {MAX_SLICES}")
    request = PullRequest(dataset=name, index=0, name="manifest")
    try:
        await transfer.pull(
            endpoint, found.provider, request, path,
            max_bytes=MAX_MANIFEST, digest=found.record.manifest, timeout=_MANIFEST_TIMEOUT,
        )  # fmt: skip
    except TransferRefusedError as error:
        _log.info("%s has no manifest of dataset %s, so a slice counts as used when its worker requests another: %s",
                  found.provider, name, error)  # fmt: skip
        return DatasetView(name, found.provider, (None,) * count)
    dataset = _pinned(name, found.provider, await anyio.Path(path).read_bytes(), found.record.manifest)
    if len(dataset.slices) != count:
        raise ValueError(f"its manifest has {len(dataset.slices)} slices; {count} announced")
    return dataset


def _pinned(name: str, provider: PeerId, text: bytes, digest: str | None = None) -> DatasetView:
    manifest: Manifest = from_json(Manifest, text)
    empty = [entry.file for entry in manifest.slices if entry.samples == 0]
    if empty or not manifest.slices:
        raise ValueError(f"its manifest has {len(manifest.slices)} slices, {len(empty)} of them empty")
    if manifest.format is not None and manifest.format not in SLICE_SUFFIXES:
        known = ", ".join(SLICE_SUFFIXES)
        raise ValueError(f"its slices are of the format {quote(manifest.format)}, and this scheduler knows {known}")
    return DatasetView(name, provider, manifest.slices, digest, manifest.format, manifest.columns, manifest.labels)


def open_folder(folder: Path, name: str, provider: PeerId, manifest: Path) -> tuple[DatasetView, list[Path]]:
    """Open a dataset in a folder, whose manifest is copied to the file `manifest`; return it and its slices' files.

    Raises:
        ValueError: its manifest is none, or lists a file that is not there or is of another size.
        OSError: it cannot be read or copied.
    """
    text = (folder / MANIFEST).read_bytes()
    dataset = _pinned(name, provider, text)
    files = []
    for entry in dataset.slices:
        assert entry is not None  # there is a manifest
        file = folder / entry.file
        if PurePath(entry.file).name != entry.file or not file.is_file() or file.stat().st_size != entry.size:
            raise ValueError(f"its {MANIFEST} lists {entry.file!r} of {entry.size} bytes, which is not there")
        files.append(file)
    manifest.write_bytes(text)
    return dataset, files
