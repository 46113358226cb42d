"""Safetensors files, read with suspicion and written a tensor at a time (extra `update`).

What moves between an executor, the parameter server and the scheduler are files of this format. A file comes from
another machine, so its header is believed only after every offset has been checked against the file's true size;
after that the data is a memory map and a tensor costs no memory until it is read. `hypha_proto.update_file` builds on
this and is what other packages import.

The layout: u64 little endian with the header's length, the header (JSON: name -> dtype, shape, data_offsets, and
`__metadata__` of text to text), then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha_proto.errors import TensorFileError

HEADER_LIMIT: Final = 16 << 20
"""The longest header that is read, in bytes: about 100,000 tensors."""
NAME_LIMIT: Final = 1024
RANK_LIMIT: Final = 16
_LENGTH_BYTES: Final = 8
_METADATA_KEY: Final = "__metadata__"

# BF16 has no numpy dtype: its bits travel as uint16, the upper half of a float32
_STORED: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(code)
    for name, code in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U64": "<u8",
        "U32": "<u4",
        "U16": "<u2",
        "U8": "u1",
        "BOOL": "?",
    }.items()
}
FLOAT_DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})

Array = NDArray[Any]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor."""

    dtype: str
    """Its safetensors name, such as ``F32`` or ``BF16``."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers the tensor holds (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in the file."""
        return self.elements * _STORED[self.dtype].itemsize


def to_float32(stored: Array, dtype: str) -> Float32Array:
    """Read numbers as they lie in a file of `dtype` as float32, in the same shape (F32: without a copy)."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return stored.astype(np.float32, copy=False)


def from_float(values: Array, dtype: str) -> Array:
    """Turn float32 or float64 numbers into what a file of `dtype` stores: to nearest even, integers also clipped."""
    if dtype == "BF16":
        return _to_bfloat16(values)
    stored = _STORED[dtype]
    with np.errstate(over="ignore"):
        if stored.kind in "iu":
            return _to_integers(values, stored)
        return (np.rint(values) != 0) if stored.kind == "b" else values.astype(stored, copy=False)


def _to_bfloat16(values: Array) -> Array:
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # adding the rounding to a NaN could carry into infinity: keep its top bits and set the quiet one
    return np.where(np.isnan(single), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype("<u2")


def _to_integers(values: Array, stored: np.dtype[Any]) -> Array:
    limits = np.iinfo(stored)
    rounded = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0))
    # the upper limit of 64-bit integers is no float64: clip below it, then set what was at or above it
    whole = np.clip(rounded, float(limits.min), np.nextafter(float(limits.max) + 1.0, 0.0)).astype(stored)
    whole[rounded >= float(limits.max)] = limits.max
    return whole


class TensorFile:
    """A safetensors file as a read-only memory map whose header has been checked.

    Attributes:
        path: where it lies.
        tensors: name -> dtype and shape, in the order of the data.
        metadata: the header's `__metadata__`, text to text.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and check its header.

        Raises:
            TensorFileError: the header does not describe exactly the bytes that follow it.
            OSError: the file cannot be read.
        """
        self.path = path
        size = path.stat().st_size
        if size < _LENGTH_BYTES:
            raise TensorFileError(f"{path.name}: {size} bytes are too few for a safetensors file")
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        length = int.from_bytes(self._data[:_LENGTH_BYTES].tobytes(), "little")
        if length > min(HEADER_LIMIT, size - _LENGTH_BYTES):
            raise TensorFileError(
                f"{path.name}: a header of {length} bytes (limit {HEADER_LIMIT}) in a file of {size} bytes"
            )
        start = _LENGTH_BYTES + length
        try:
            self.metadata, located = _check_header(self._data[_LENGTH_BYTES:start].tobytes(), size - start)
        except TensorFileError as error:
            raise TensorFileError(f"{path.name}: {error}") from None
        self.tensors: dict[str, TensorInfo] = {name: info for name, (info, _) in located.items()}
        self._starts = {name: start + begin for name, (_, begin) in located.items()}

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the map; the system frees it once no array that was handed out refers to it."""
        self._data = np.empty(0, dtype=np.uint8)

    def stored(self, name: str) -> Array:
        """Give a tensor's numbers as the file holds them, read-only and without a copy (BF16 as uint16 bits).

        Raises:
            TensorFileError: the file holds no such tensor.
        """
        info = self._info(name)
        start = self._starts[name]
        return self._data[start : start + info.nbytes].view(_STORED[info.dtype]).reshape(info.shape)

    def tensor(self, name: str) -> Float32Array:
        """Read a whole tensor as float32, in its shape, in memory of its own.

        Raises:
            TensorFileError: the file holds no such tensor.
        """
        return np.array(to_float32(self.stored(name), self._info(name).dtype))

    def blocks(self, name: str, elements: int = 1 << 18) -> Iterator[Float32Array]:
        """Read a tensor as flat float32 pieces of at most `elements` numbers, in order; F32 pieces are not copied.

        Raises:
            TensorFileError: the file holds no such tensor.
        """
        dtype = self._info(name).dtype
        flat = self.stored(name).reshape(-1)
        for begin in range(0, flat.size, elements):
            yield to_float32(flat[begin : begin + elements], dtype)

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorFileError(f"{self.path.name} holds no tensor {name!r}") from None


def _check_header(header: bytes, data_size: int) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
    """Read a header that must describe exactly `data_size` bytes: metadata, and each tensor with its offset."""
    entries = _parse_json(header)
    metadata = _check_metadata(entries.pop(_METADATA_KEY, {}))
    located = {name: _check_entry(name, entry) for name, entry in entries.items()}
    expected = 0
    ordered = sorted(located.items(), key=lambda item: (item[1][1], item[1][0].nbytes))
    for name, (info, begin) in ordered:
        if begin != expected:
            fault = "overlaps the tensor before it" if begin < expected else "leaves a gap before it"
            raise TensorFileError(f"{name!r} begins at {begin} and {fault}, which ends at {expected}")
        expected = begin + info.nbytes
    if expected != data_size:
        raise TensorFileError(f"the tensors take {expected} bytes, the file holds {data_size} after its header")
    return metadata, dict(ordered)


def _parse_json(header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except TensorFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"the header is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise TensorFileError("the header is not a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise TensorFileError("the header names something twice")
    return entries


def _refuse_constant(text: str) -> Any:
    raise TensorFileError(f"the header holds {text}, which is no JSON")


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFileError(f"{_METADATA_KEY} is not a map of text to text")
    return metadata


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_entry(name: str, entry: Any) -> tuple[TensorInfo, int]:
    if not 0 < len(name) <= NAME_LIMIT:
        raise TensorFileError(f"a tensor's name has {len(name)} letters, allowed are 1 to {NAME_LIMIT}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{name!r} does not say exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _STORED:
        raise TensorFileError(f"{name!r} has dtype {str(dtype)[:40]!r}, known are {', '.join(_STORED)}")
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(_is_size(size) for size in shape):
        raise TensorFileError(f"{name!r} has shape {str(shape)[:80]}, which is not a list of up to {RANK_LIMIT} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise TensorFileError(f"{name!r} has data_offsets {str(offsets)[:80]}, which is not [begin, end]")
    info = TensorInfo(dtype, tuple(shape))
    if not _is_size(math.prod(size or 1 for size in shape) * _STORED[dtype].itemsize):  # numpy counts so, too
        raise TensorFileError(f"{name!r} has shape {str(shape)[:80]}, which is larger than any memory")
    if offsets[1] - offsets[0] != info.nbytes:
        raise TensorFileError(f"{name!r} spans {offsets[1] - offsets[0]} bytes, {dtype} {shape} takes {info.nbytes}")
    return info, offsets[0]


class TensorFileWriter:
    """Writes a safetensors file whose shapes are known beforehand, one piece of a tensor after the other.

    Use as a context manager: leaving it without an error puts the finished file in place in one step (an existing
    file is replaced), leaving it with one removes what was written. Tensors may be written in any order.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Open a temporary file beside `path` and write the header.

        Args:
            path: where the finished file will lie.
            tensors: name -> dtype and shape of everything that will be written.
            metadata: text to text, for the header.

        Raises:
            TensorFileError: a name or dtype is one that readers refuse.
            OSError: the file cannot be made.
        """
        self.path = path
        self._tensors = dict(sorted(tensors.items(), key=_by_alignment))
        header, self._starts = _make_header(self._tensors, metadata or {})
        self._written = dict.fromkeys(self._tensors, 0)
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = self._temporary.open("xb")
        try:
            self._file.write(header)
        except BaseException:
            self._discard()
            raise

    def write(self, name: str, values: Array) -> None:
        """Append numbers to a tensor: all of it, or its next piece in row-major order.

        Args:
            name: one of the tensors that the header names.
            values: float32 or float64 numbers, which are converted to the tensor's dtype.

        Raises:
            TensorFileError: the header has no such tensor, or no room left in it.
        """
        info = self._tensors.get(name)
        if info is None:
            raise TensorFileError(f"the header of {self.path.name} names no tensor {name!r}")
        self.write_stored(name, from_float(values, info.dtype))

    def write_stored(self, name: str, stored: Array) -> None:
        """Append numbers that are already as the file holds them (see `TensorFile.stored`).

        Raises:
            TensorFileError: the header has no such tensor, or its dtype or room does not fit.
        """
        info = self._tensors.get(name)
        if info is None or stored.dtype != _STORED[info.dtype]:
            raise TensorFileError(f"{name!r} of dtype {stored.dtype} does not fit the header of {self.path.name}")
        if self._written[name] + stored.nbytes > info.nbytes:
            raise TensorFileError(f"{name!r} gets more than its {info.nbytes} bytes in {self.path.name}")
        self._file.seek(self._starts[name] + self._written[name])
        self._file.write(np.ascontiguousarray(stored).data)
        self._written[name] += stored.nbytes

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
            return
        try:
            missing = [name for name, info in self._tensors.items() if self._written[name] != info.nbytes]
            if missing:
                raise TensorFileError(f"{self.path.name} lacks data of {len(missing)} tensors, first {missing[0]!r}")
            self._file.close()  # which writes the last bytes: a disk may be full only now
            os.replace(self._temporary, self.path)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        with suppress(OSError):  # of bytes that were not written yet, and need not be
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def _by_alignment(item: tuple[str, TensorInfo]) -> tuple[int, str]:
    """Order wide numbers before narrow ones, so that every tensor is aligned."""
    name, info = item
    if info.dtype not in _STORED or not 0 < len(name) <= NAME_LIMIT or name == _METADATA_KEY:
        raise TensorFileError(f"{name[:80]!r} of dtype {info.dtype!r} is nothing that readers accept")
    return -_STORED[info.dtype].itemsize, name


def _make_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Give the bytes before the data, and where in the file each tensor starts."""
    entries: dict[str, Any] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for name, info in tensors.items():
        begins[name], end = end, end + info.nbytes
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise TensorFileError(f"a header of {len(text)} bytes for {len(tensors)} tensors is over {HEADER_LIMIT}")
    start = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, {name: start + begin for name, begin in begins.items()}
