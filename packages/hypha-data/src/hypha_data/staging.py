"""Samples of a source as tensors in files, in the source's order; from there `prepare` shuffles them into slices.

One file a tensor, to which blocks are appended; `rows.json` tells how many rows are on disk, from which an interrupted
conversion continues.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from hypha_data.errors import DatasetError
from hypha_data.sources.reader import Arrays, Layout, OnProgress, SampleReader
from hypha_proto.codec import from_json, to_json
from hypha_proto.safetensors_io import STORED_DTYPES, TensorInfo
from hypha_proto.whole_directory import replace_file
from hypha_proto.wire_schema import U64, Message

_SYNC_BYTES: Final = 64 << 20
"""Bytes after which an interrupted conversion continues at the latest."""


class StagedRows(Message, frozen=True):
    """How much of the conversion is on disk."""

    rows: U64
    is_complete: bool


class StagedSamples:
    """All samples of a source, memory-mapped.

    Attributes:
        tensors: dtype and shape of each tensor.
        length: number of samples.
    """

    def __init__(self, folder: Path, layout: Layout, length: int) -> None:
        """Map the files of a complete conversion."""
        self.length = length
        self.tensors = {name: TensorInfo(each.dtype, (length, *each.shape)) for name, each in layout.tensors.items()}
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.memmap(_file(folder, number), STORED_DTYPES[info.dtype], "r", shape=info.shape).view(np.ndarray)
            for number, (name, info) in enumerate(self.tensors.items())
        }

    def stored(self, name: str) -> NDArray[Any]:
        """Return a tensor's elements, without a copy."""
        return self._arrays[name]


def stage(
    reader: SampleReader, folder: Path, check_unchanged: Callable[[], None], on_progress: OnProgress
) -> tuple[Layout, StagedSamples]:
    """Convert a source, or the rest of it.

    Args:
        reader: the source.
        folder: where the files are; exists, and is empty at first.
        check_unchanged: raises `DatasetError` if the source is of another state than before anything was read.
        on_progress: called after each block.

    Raises:
        DatasetError: the source cannot be used, or changed meanwhile.
        OSError: a file cannot be written.
    """
    try:
        layout = _layout(reader, folder, on_progress)
        rows = _convert(reader, layout, folder, on_progress)
    except (DatasetError, ValueError, KeyError, IndexError):
        check_unchanged()  # a change explains any of them
        raise
    check_unchanged()
    return layout, StagedSamples(folder, layout, rows)


def _layout(reader: SampleReader, folder: Path, on_progress: OnProgress) -> Layout:
    path = folder / "layout.json"
    if path.is_file():
        found: Layout = from_json(Layout, path.read_bytes())
        return found
    made = reader.scan(on_progress)
    replace_file(path, to_json(Layout, made))
    return made


def _convert(reader: SampleReader, layout: Layout, folder: Path, on_progress: OnProgress) -> int:
    path = folder / "rows.json"
    done = StagedRows(rows=0, is_complete=False)
    if path.is_file():
        done = from_json(StagedRows, path.read_bytes())
    if done.is_complete:
        return done.rows
    rows, unsynced = done.rows, 0
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for number, (name, each) in enumerate(layout.tensors.items()):
            files[name] = stack.enter_context(_file(folder, number).open("ab"))
            files[name].truncate(rows * math.prod(each.shape) * STORED_DTYPES[each.dtype].itemsize)
        for block in reader.blocks(layout, rows):
            rows += _append(block, layout, files)
            unsynced += sum(array.nbytes for array in block.values())
            if unsynced >= _SYNC_BYTES:
                _sync(files, path, StagedRows(rows=rows, is_complete=False))
                unsynced = 0
            on_progress("rows converted", rows)
        if not rows:
            raise DatasetError("the source holds no samples; add some")
        _sync(files, path, StagedRows(rows=rows, is_complete=True))
    return rows


def _append(block: Arrays, layout: Layout, files: Mapping[str, BinaryIO]) -> int:
    [length] = {len(array) for array in block.values()}
    for name, each in layout.tensors.items():
        array = np.ascontiguousarray(block[name], STORED_DTYPES[each.dtype])
        if array.shape != (length, *each.shape):
            raise ValueError(f"{name!r} has shape {array.shape}, expected {(length, *each.shape)}")
        files[name].write(array.reshape(-1).view(np.uint8).data)
    return length


def _sync(files: Mapping[str, BinaryIO], path: Path, done: StagedRows) -> None:
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    replace_file(path, to_json(StagedRows, done))


def _file(folder: Path, number: int) -> Path:
    return folder / f"tensor-{number:05d}"
