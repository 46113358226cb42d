"""Checks of a data node's datasets and files, for ``run --check`` and ``probe``: no slice is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hypha_data.catalog import count_samples, find_slices, read_manifest
from hypha_data.config import DataConfig
from hypha_data.errors import DatasetError
from hypha_data.inspection import find_slice_fault
from hypha_net.node.checks import Check, failed, ok
from hypha_proto.datasets import SAFETENSORS, SLICE_SUFFIXES

_REMEDY = "restore the file, or prepare the dataset again"


def check_datasets(config: DataConfig) -> Iterator[Check]:
    """Check the folders of all datasets, and the files that are provided one by one."""
    if config.dataset_path is not None:
        yield _check_dataset("dataset_path", config.dataset_path.name, config.dataset_path)
    for number, dataset in enumerate(config.datasets):
        yield _check_dataset(f"datasets[{number}].path", dataset.name, dataset.path)
    for number, path in enumerate(config.provide):
        yield _check_file(f"provide[{number}] {path}", path)


def _check_dataset(key: str, name: str, folder: Path) -> Check:
    what = f"{key} {folder}"
    if not folder.is_dir():
        return failed(f"{what}: there is no such folder: `hypha-data prepare` makes one, or correct the path")
    try:
        count, faults = _examine(name, folder)
    except (DatasetError, OSError) as error:
        return failed(f"{what}: {error}")
    if faults:
        return failed(f"{what}: {len(faults)} of {count} slices cannot be served, the first: {faults[0]}; {_REMEDY}")
    return ok(f"{what}: {count} slices are there")


def _examine(name: str, folder: Path) -> tuple[int, list[str]]:
    """Return the number of slices and what is wrong with them: sizes, or headers where there is no manifest."""
    manifest = read_manifest(name, folder)
    files = find_slices(name, folder, manifest)
    if manifest is not None:
        found = ((entry.file, find_slice_fault(folder / entry.file, entry, False)) for entry in manifest.slices)
        return len(manifest.slices), [f"{file}: {fault}" for file, fault in found if fault is not None]
    for file in files:
        if file.suffix == SLICE_SUFFIXES[SAFETENSORS]:
            count_samples(file)
    return len(files), []


def _check_file(what: str, path: Path) -> Check:
    if not path.is_file():
        return failed(f"{what}: there is no such file: correct the path, or remove it from the list")
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return failed(f"{what}: cannot be read: {error.strerror or error}; correct its owner or mode")
    return ok(f"{what}: can be read")
