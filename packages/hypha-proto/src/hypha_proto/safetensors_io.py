"""Reading and writing safetensors files (https://huggingface.co/docs/safetensors); needs the extra `update`.

Executors, the parameter server and the scheduler exchange files of this format. A file may come from another machine,
so every offset of its header is checked against the file's size before use. The data is memory-mapped: a tensor takes
no memory until it is read. The writer takes one tensor at a time.

File layout: the header's length (u64, little endian), the header (JSON: name -> dtype, shape, data_offsets, and
`__metadata__` of text to text), then the tensors without gaps.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.file_kinds import HEAD, is_text, name_kind
from hypha_proto.texts import quote

HEADER_LIMIT: Final = 16 << 20
"""Maximum length of a header in bytes; enough for about 100,000 tensors."""
NAME_LIMIT: Final = 1024
"""Maximum length of a tensor name in characters."""
RANK_LIMIT: Final = 16
"""Maximum number of dimensions of a tensor."""
BLOCK: Final = 1 << 18
"""Elements of a block, unless the caller asks for others."""
_LENGTH_BYTES: Final = 8
_METADATA_KEY: Final = "__metadata__"

# numpy has no BF16: its bits are handled as uint16, the upper half of a float32
STORED_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
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
"""Dtype of the elements that a file stores, by its safetensors name."""
FLOAT_DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Floating-point dtypes that files may hold."""

Array = NDArray[Any]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype and shape of a tensor, as given in the header."""

    dtype: str
    """Safetensors name of the dtype, such as ``F32`` or ``BF16``."""
    shape: tuple[int, ...]
    """Sizes of the dimensions; empty for a scalar."""

    @property
    def elements(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the file in bytes."""
        return self.elements * STORED_DTYPES[self.dtype].itemsize


def to_float32(stored: Array, dtype: str) -> Float32Array:
    """Convert elements as stored in a file (see `TensorFile.stored`) to float32.

    Args:
        stored: the elements, of any shape, which the result has too.
        dtype: safetensors name of the file's dtype. F32 is returned without a copy.
    """
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return stored.astype(np.float32, copy=False)


def from_float(values: Array, dtype: str) -> Array:
    """Convert float32 or float64 values to the elements that a file of `dtype` stores, in the same shape.

    Rounds to nearest even; values beyond the range of an integer dtype are clipped, NaN becomes 0 there.
    """
    if dtype == "BF16":
        return _to_bfloat16(values)
    stored = STORED_DTYPES[dtype]
    with np.errstate(over="ignore"):
        if stored.kind in "iu":
            return _to_integers(values, stored)
        return (np.rint(values) != 0) if stored.kind == "b" else values.astype(stored, copy=False)


def _to_bfloat16(values: Array) -> Array:
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # rounding a NaN up could overflow to infinity: keep its upper bits and set the quiet bit
    return np.where(np.isnan(single), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype("<u2")


def _to_integers(values: Array, stored: np.dtype[Any]) -> Array:
    limits = np.iinfo(stored)
    rounded = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0))
    # float64 cannot represent the upper limit of 64-bit integers: clip below it, then set values at or above it
    whole = np.clip(rounded, float(limits.min), np.nextafter(float(limits.max) + 1.0, 0.0)).astype(stored)
    return np.where(rounded >= float(limits.max), stored.type(limits.max), whole)


class TensorFile:
    """A safetensors file, memory-mapped read-only, with a validated header. A context manager that closes it.

    Attributes:
        path: path of the file.
        tensors: name -> dtype and shape, in the order of the data.
        metadata: `__metadata__` of the header, text to text.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and validate its header.

        Raises:
            TensorFileError: the header does not describe exactly the bytes that follow it.
            OSError: the file cannot be read.
        """
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD)
        if head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
            kind = "text" if is_text(head) else f"of no known kind, and begins with {head[:8]!r}"
            raise TensorFileError(f"{path.name}: {name_kind(head) or f'it is {kind}'}")
        # a plain array: memmap runs a method of its own on every index and view
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        length = int.from_bytes(self._data[:_LENGTH_BYTES].tobytes(), "little")
        if length > min(HEADER_LIMIT, size - _LENGTH_BYTES):
            header = f"a header of {length} bytes (limit {HEADER_LIMIT}) in a file of {size} bytes"
            raise TensorFileError(f"{path.name}: {name_kind(head) or header}")
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
        """Drop the memory map; the system frees it once no array returned by `stored` refers to it."""
        self._data = np.empty(0, dtype=np.uint8)

    def stored(self, name: str) -> Array:
        """Return a tensor's elements as stored, read-only and without a copy, in its shape (BF16 as uint16 bits).

        Raises:
            TensorFileError: the file holds no tensor `name`.
        """
        info = self._info(name)
        start = self._starts[name]
        return self._data[start : start + info.nbytes].view(STORED_DTYPES[info.dtype]).reshape(info.shape)

    def tensor(self, name: str) -> Float32Array:
        """Read a whole tensor into a new float32 array of its shape.

        Raises:
            TensorFileError: the file holds no tensor `name`.
        """
        return np.array(to_float32(self.stored(name), self._info(name).dtype))

    def blocks(
        self, name: str, elements: int = BLOCK, *, begin: int = 0, end: int | None = None
    ) -> Iterator[Float32Array]:
        """Yield a tensor as one-dimensional float32 blocks of at most `elements` elements, in row-major order.

        Blocks of an F32 tensor are not copied.

        Args:
            name: name of the tensor.
            elements: maximum size of a block.
            begin: first element.
            end: element after the last one; by default all that follow.

        Raises:
            TensorFileError: the file holds no tensor `name`.
        """
        dtype = self._info(name).dtype
        flat = self.stored(name).reshape(-1)[begin:end]
        for start in range(0, flat.size, elements):
            yield to_float32(flat[start : start + elements], dtype)

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorFileError(f"{self.path.name} holds no tensor {name!r}") from None


def _check_header(header: bytes, data_size: int) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
    """Parse a header that must describe exactly `data_size` bytes; return metadata, and each tensor with its offset."""
    entries = _parse_json(header)
    metadata = entries.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFileError(f"{_METADATA_KEY} is not a map of text to text")
    located = {name: _check_entry(name, entry) for name, entry in entries.items()}
    expected = 0
    ordered = sorted(located.items(), key=lambda item: (item[1][1], item[1][0].nbytes))
    for name, (info, begin) in ordered:
        if begin != expected:
            fault = "overlaps the previous tensor" if begin < expected else "leaves a gap after the previous tensor"
            raise TensorFileError(f"{name!r} begins at {begin} and {fault}, which ends at {expected}")
        expected = begin + info.nbytes
    if expected != data_size:
        raise TensorFileError(f"the tensors take {expected} bytes, the file holds {data_size} after its header")
    return metadata, dict(ordered)


def _parse_json(header: bytes) -> dict[str, Any]:
    try:
        value = parse_json(header)
    except DecodeError as error:
        raise TensorFileError(f"the header is not strict JSON: {error}") from None
    if not isinstance(value, dict):
        raise TensorFileError("the header is not a JSON object")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_entry(name: str, entry: Any) -> tuple[TensorInfo, int]:
    if not 0 < len(name) <= NAME_LIMIT:
        raise TensorFileError(f"a tensor name has {len(name)} characters, allowed are 1 to {NAME_LIMIT}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{name!r} must have exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
        raise TensorFileError(f"{name!r} has dtype {quote(dtype)}, known are {', '.join(STORED_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(_is_size(size) for size in shape):
        raise TensorFileError(f"{name!r} has shape {quote(shape)}, which is not a list of up to {RANK_LIMIT} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise TensorFileError(f"{name!r} has data_offsets {quote(offsets)}, which is not [begin, end]")
    info = TensorInfo(dtype, tuple(shape))
    if not _is_size(math.prod(size or 1 for size in shape) * STORED_DTYPES[dtype].itemsize):  # numpy's own limit
        raise TensorFileError(f"{name!r} has shape {quote(shape)}, which is larger than any memory")
    if offsets[1] - offsets[0] != info.nbytes:
        raise TensorFileError(f"{name!r} spans {offsets[1] - offsets[0]} bytes, {dtype} {shape} takes {info.nbytes}")
    return info, offsets[0]


class TensorFileWriter:
    """Writer of a safetensors file whose shapes are known in advance; takes tensors in blocks and in any order.

    Nothing is buffered: a full disk fails the write itself. A context manager: without an error its exit moves the
    finished file into place atomically, replacing an existing file; with an error it removes what was written.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
        *,
        reserve: bool = False,
    ) -> None:
        """Open a temporary file beside `path` and write the header.

        Args:
            path: path of the finished file.
            tensors: name -> dtype and shape of every tensor that will be written.
            metadata: `__metadata__` of the header, text to text.
            reserve: reserve the disk space of the whole file first, so that a full disk fails here. ext4 then does not
                flush the data when the file replaces another: after a power failure it may be zeros.

        Raises:
            TensorFileError: readers would reject a name or dtype, or the header is too long.
            OSError: the file cannot be created.
        """
        self.path = path
        self._tensors = dict(sorted(tensors.items(), key=_by_alignment))
        header, self._starts = _make_header(self._tensors, metadata or {})
        self._written = dict.fromkeys(self._tensors, 0)
        self._counting = threading.Lock()
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = self._temporary.open("xb", buffering=0)
        try:
            if reserve:
                _reserve(self._file.fileno(), len(header) + sum(info.nbytes for info in self._tensors.values()))
            self._write_bytes(header, 0)
        except BaseException:
            self._discard()
            raise

    def write(self, name: str, values: Array) -> None:
        """Append values to a tensor: all of it, or its next block in row-major order.

        Args:
            name: a tensor of the header.
            values: float32 or float64 values of any shape; converted to the tensor's dtype.

        Raises:
            TensorFileError: the header has no tensor `name`, or more values were written than it has elements.
            OSError: the file cannot be written.
        """
        info = self._tensors.get(name)
        if info is None:
            raise TensorFileError(f"the header of {self.path.name} has no tensor {name!r}")
        self.write_stored(name, from_float(values, info.dtype))

    def write_stored(self, name: str, stored: Array) -> None:
        """Append elements that are already in the tensor's dtype (see `TensorFile.stored`).

        Raises:
            TensorFileError: the header has no tensor `name`, its dtype differs, or too many elements were written.
            OSError: the file cannot be written.
        """
        self.write_stored_at(name, self._written.get(name, 0) // stored.itemsize, stored)

    def write_stored_at(self, name: str, begin: int, stored: Array) -> None:
        """Write elements of a tensor that are in its dtype from element `begin` on.

        Threads may write at the same time. No element may be written twice.

        Raises:
            TensorFileError: the header has no tensor `name`, its dtype differs, or too many elements were written.
            OSError: the file cannot be written.
        """
        info = self._tensors.get(name)
        if info is None or stored.dtype != STORED_DTYPES[info.dtype]:
            raise TensorFileError(f"{name!r} of dtype {stored.dtype} does not match the header of {self.path.name}")
        offset = begin * stored.itemsize
        if begin < 0 or offset + stored.nbytes > info.nbytes:
            raise TensorFileError(f"more than the {info.nbytes} bytes of {name!r} were written to {self.path.name}")
        self._write_bytes(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data, self._starts[name] + offset)
        with self._counting:
            self._written[name] += stored.nbytes

    def _write_bytes(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[count:], offset + count

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
            self._file.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        with suppress(OSError):  # of data that is discarded anyway
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def _reserve(file: int, size: int) -> None:
    """Reserve disk space for a file, where the system and the file system can."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _by_alignment(item: tuple[str, TensorInfo]) -> tuple[int, str]:
    """Return a sort key that puts wide dtypes before narrow ones, so that every tensor is aligned."""
    name, info = item
    if info.dtype not in STORED_DTYPES or not 0 < len(name) <= NAME_LIMIT or name == _METADATA_KEY:
        raise TensorFileError(f"{quote(name)} of dtype {info.dtype!r} would be rejected by readers")
    return -STORED_DTYPES[info.dtype].itemsize, name


def _make_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the data, and the file offset of each tensor."""
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
