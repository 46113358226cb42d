"""Interface of the readers, and what they share: layout of the samples, state of the source's files.

Implemented by the other modules of the package; called by `hypha_data.prepare` through `hypha_data.sources.formats`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar

from blake3 import blake3
from numpy.typing import NDArray

from hypha_data.digest_cache import Fingerprint
from hypha_data.errors import DatasetError
from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError
from hypha_proto.wire_schema import OMIT, U64, Message

T = TypeVar("T")

Arrays = Mapping[str, NDArray[Any]]
"""Tensors of consecutive samples, by name; the first dimension is the samples."""
OnProgress = Callable[[str, int], None]
"""Called now and then with what is done, such as ``rows checked``, and how many of them so far."""
BLOCK_ROWS: Final = 1024
"""Largest number of rows of a block."""
BLOCK_BYTES: Final = 8 << 20
"""Size of a block's tensors in bytes, if more than one row fits."""
MAX_TEXT: Final = 1 << 20
"""Largest length of a text of a row in bytes."""
MAX_CLASSES: Final = 10_000
"""Largest number of classes that have names."""
LABELS: Final = "labels"
"""Name of the tensor of labels."""
EXTRA: Final = "uv pip install 'hypha-data[formats]'"


class SampleLayout(Message, frozen=True):
    """Dtype and shape of one sample of a tensor."""

    dtype: str
    """Name in safetensors files, such as ``F32``."""
    shape: tuple[U64, ...]


class Layout(Message, frozen=True):
    """Tensors of each sample, and what the reader found out about the source."""

    tensors: dict[str, SampleLayout]
    labels: Annotated[tuple[str, ...] | None, OMIT] = None
    """Names of the classes in the order of their numbers."""
    kinds: Annotated[dict[str, str] | None, OMIT] = None
    """Kind of each column of a table: integer, number, boolean or text."""
    notices: Annotated[tuple[str, ...] | None, OMIT] = None
    """What the owner should know, one line each."""


class SampleReader(Protocol):
    """Reader of one source."""

    def state(self) -> str:
        """Return a digest of names, sizes and times of the source's files; it differs if any was written to."""
        ...

    def scan(self, on_progress: OnProgress) -> Layout:
        """Check the source as far as the layout requires.

        Raises:
            DatasetError: something cannot be used; the message names file, row, column and remedy.
        """
        ...

    def blocks(self, layout: Layout, first: int) -> Iterator[Arrays]:
        """Yield blocks of samples from sample `first` on, in the source's order.

        Raises:
            DatasetError: as `scan`.
        """
        ...


def files_state(paths: Iterable[Path]) -> str:
    """Return a digest of the names and states of files, in this order.

    Raises:
        DatasetError: one cannot be read.
    """
    hasher = blake3()
    for path in paths:
        try:
            found = Fingerprint.of(path.stat())
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror or error}") from None
        hasher.update(f"{path}\0{tuple(found)}\n".encode(errors="surrogateescape"))
    return f"blake3:{hasher.hexdigest()}"


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of the extra ``formats``.

    Raises:
        DatasetError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = {"PIL": "pillow"}.get(module.partition(".")[0], module.partition(".")[0])
        raise DatasetError(f"{purpose} needs {package}, of the extra formats: {EXTRA}") from None


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DatasetError: it cannot be read, or is none; the message ends with the remedy.
    """
    try:
        found = parse_json(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise DatasetError(f"{path}: {error}; {remedy}") from None
    if not isinstance(found, dict):
        raise DatasetError(f"{path}: is not a JSON object; {remedy}")
    return found


def in_blocks(
    items: Iterable[T], most: int, size: int = 1, measure: Callable[[T], int] = lambda _item: 0
) -> Iterator[list[T]]:
    """Yield consecutive items together: `most` of them, or fewer as soon as their sizes add up to `size`."""
    block: list[T] = []
    total = 0
    for item in items:
        block.append(item)
        total += measure(item)
        if len(block) == most or total >= size:
            yield block
            block, total = [], 0
    if block:
        yield block
