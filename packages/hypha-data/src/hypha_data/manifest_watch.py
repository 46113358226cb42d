"""Notices that the manifest of a served dataset was replaced, and checks the new one before it is served.

A changed manifest is served once all its slices match it; until then the earlier one stays.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_data.catalog import Dataset, open_dataset, read_manifest
from hypha_data.digest_cache import Fingerprint
from hypha_data.errors import DatasetError
from hypha_data.verification import SliceVerifier
from hypha_proto.datasets import MANIFEST

_log = logging.getLogger(__name__)

POLL_INTERVAL: Final = 10.0
"""Seconds between looks at the manifest of a served dataset."""


def find_manifest(folder: Path) -> Fingerprint | None:
    """Return the state of the manifest's file, or None if there is none that can be looked at."""
    try:
        return Fingerprint.of((folder / MANIFEST).stat())
    except OSError:
        return None


async def wait_for_new_manifest(dataset: Dataset, seen: Fingerprint | None) -> tuple[SliceVerifier, Fingerprint]:
    """Wait until the folder has another manifest whose slices all match it; return them and the manifest's state.

    A manifest that cannot be used is logged once; it is looked at again when it or its slices have changed.

    Args:
        dataset: what is served now.
        seen: state of the manifest's file before `dataset` was opened.
    """
    candidate: SliceVerifier | None = None
    while True:
        await anyio.sleep(POLL_INTERVAL)
        found = await anyio.to_thread.run_sync(find_manifest, dataset.folder)
        if found is None:
            candidate, seen = None, None
        elif found != seen:
            seen, candidate = found, await _check_new(dataset)
        elif candidate is not None:
            await candidate.verify_withheld()
        if found is None or candidate is None or candidate.withheld:
            continue
        if await anyio.to_thread.run_sync(find_manifest, dataset.folder) == found:
            return candidate, found


async def _check_new(dataset: Dataset) -> SliceVerifier | None:
    """Read the changed manifest and check its slices; return None if it is what is served, or cannot be used."""
    try:
        changed = await anyio.to_thread.run_sync(_open_changed, dataset)
    except (DatasetError, OSError) as error:
        _warn(dataset, str(error))
        return None
    if changed.digest == dataset.digest:
        return None
    candidate = SliceVerifier(changed)
    await candidate.verify_all()
    if candidate.withheld:
        _warn(dataset, f"{len(candidate.withheld)} of its {len(changed.manifest.slices)} slices do not match it")
    return candidate


def _open_changed(dataset: Dataset) -> Dataset:
    if read_manifest(dataset.name, dataset.folder) is None:  # logs what is wrong with it
        raise DatasetError("it cannot be used")
    changed = open_dataset(dataset.name, dataset.folder)
    if not changed.is_prepared:
        raise DatasetError("it cannot be used")
    return replace(changed, digests=dataset.digests)


def _warn(dataset: Dataset, fault: str) -> None:
    _log.warning(
        "dataset %s: the changed %s is not announced, the earlier one stays: %s; prepare the dataset again, or restore "
        "the file", dataset.name, dataset.folder / MANIFEST, fault,
    )  # fmt: skip
