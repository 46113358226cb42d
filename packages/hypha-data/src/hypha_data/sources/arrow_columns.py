"""Columns of a table as Arrow arrays: kinds and tensors of a whole column at once.

What holds for a column is returned only if it is certain; otherwise, as with every fault, `table` goes through the
values one by one, and both find the same.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha_data.sources.reader import MAX_TEXT

_FLOAT_LIMIT: Final = float(np.finfo(np.float32).max)
_INTEGER_BYTES: Final = b"0123456789-"
_NUMBER_BYTES: Final = b"0123456789-.eE"
_TARGETS: Final = {"integer": ("int64", "<i8"), "number": ("float64", "<f4"), "boolean": ("uint8", "u1")}


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What holds for the values of a column in a block of rows."""

    first_gap: int | None = None
    """Row of the first value that is missing or an empty text."""
    kind: str = ""
    """As in `hypha_data.sources.reader.Layout.kinds`; empty if there are only gaps."""
    width: int = 0
    """Length of the longest text in bytes."""
    lowest: float = 0
    highest: float = 0
    classes: frozenset[str] = frozenset()
    """The different texts, if they are wanted."""


def import_arrow() -> Any | None:
    """Return pyarrow with the modules that are used here, or None if it is not installed."""
    try:
        for module in ("compute", "csv"):
            importlib.import_module(f"pyarrow.{module}")
        return importlib.import_module("pyarrow")
    except ImportError:
        return None


def find_facts(values: Any, known: str, *, is_typed: bool, with_classes: bool) -> ColumnFacts | None:
    """Return what holds for the values of a block, or None if they are to be looked at one by one.

    Args:
        values: an Arrow array.
        known: kind of the values before; empty if there were none.
        is_typed: whether texts are texts, also if they read as numbers.
        with_classes: whether the different texts are wanted.
    """
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    values = values.dictionary_decode() if types.is_dictionary(values.type) else values
    if types.is_null(values.type):
        return ColumnFacts(first_gap=0 if len(values) else None)
    if types.is_string(values.type) or types.is_large_string(values.type):
        return _facts_of_texts(values, known, is_typed=is_typed, with_classes=with_classes)
    gap = _first(values.is_null()) if values.null_count else None
    values = values.drop_null() if values.null_count else values
    if not len(values):
        return ColumnFacts(first_gap=gap)
    if types.is_boolean(values.type) and known in ("", "boolean"):
        return ColumnFacts(first_gap=gap, kind="boolean", highest=1)
    if types.is_integer(values.type) and values.type != arrow.uint64() and known in ("", "integer"):
        return _facts_of_numbers(values, "integer", gap, 0, frozenset())
    if (types.is_float32(values.type) or types.is_float64(values.type)) and known in ("", "integer", "number"):
        return _facts_of_numbers(values, "number", gap, 0, frozenset())
    return None


def _first(mask: Any) -> int:
    return int(np.argmax(mask.to_numpy(zero_copy_only=False)))


def _facts_of_texts(values: Any, known: str, *, is_typed: bool, with_classes: bool) -> ColumnFacts | None:
    compute = importlib.import_module("pyarrow.compute")
    values = values.fill_null("") if values.null_count else values
    lengths = compute.binary_length(values).to_numpy()
    gap = int(np.argmin(lengths)) if len(lengths) and not lengths.all() else None
    width = int(lengths.max(initial=0))
    if not width:
        return ColumnFacts(first_gap=gap)
    if width > MAX_TEXT:
        return None
    kind = "text" if known == "text" or (is_typed and not known) else ""
    present = values if gap is None else values.filter(compute.greater(compute.binary_length(values), 0))
    classes = frozenset(compute.unique(present).to_pylist()) if with_classes else frozenset()
    if kind:
        return ColumnFacts(first_gap=gap, kind=kind, width=width, classes=classes)
    found = None if is_typed else _parse(present, known)
    return None if found is None else _facts_of_numbers(found[0], found[1], gap, width, classes)


def _parse(texts: Any, known: str) -> tuple[Any, str] | None:
    """Return the numbers that texts stand for, and their kind; None if some may be no numbers."""
    arrow = importlib.import_module("pyarrow")
    starts, data = _content(texts)
    characters = data.tobytes()
    if known in ("", "integer") and not characters.translate(None, _INTEGER_BYTES):
        kind, target = "integer", arrow.int64()
    elif not characters.translate(None, _NUMBER_BYTES):
        kind, target = "number", arrow.float64()
    else:
        return None
    if _has_leading_zero(starts, data):  # such as postal codes: text
        return None
    try:
        return texts.cast(target), kind
    except arrow.ArrowInvalid:
        return None


def _content(texts: Any) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the offset of each text and, last, the end; and the bytes of all texts."""
    arrow = importlib.import_module("pyarrow")
    dtype = np.int64 if arrow.types.is_large_string(texts.type) else np.int32
    _, offsets, content = texts.buffers()
    ends = np.frombuffer(offsets, dtype)[texts.offset : texts.offset + len(texts) + 1]
    return ends - ends[0], np.frombuffer(content, np.uint8)[ends[0] : ends[-1]]


def _has_leading_zero(offsets: NDArray[Any], data: NDArray[np.uint8]) -> bool:
    """Return whether a digit follows on a zero that begins a text, after its sign if it has one."""
    padded = np.append(data, np.zeros(2, np.uint8))
    ends, starts = offsets[1:], offsets[:-1]
    starts = starts + (padded[starts] == ord("-"))
    zeros = padded[starts] == ord("0")
    following = starts[zeros] + 1
    digits = (padded[following] >= ord("0")) & (padded[following] <= ord("9"))
    return bool(np.any(digits & (following < ends[zeros])))


def _facts_of_numbers(
    values: Any, kind: str, gap: int | None, width: int, classes: frozenset[str]
) -> ColumnFacts | None:
    numbers = values.to_numpy()
    low, high = float(numbers.min()), float(numbers.max())
    if not -_FLOAT_LIMIT <= low <= high <= _FLOAT_LIMIT:  # false for NaN too
        return None
    return ColumnFacts(gap, kind, width, low, high, classes)


def to_numbers(values: Any, kind: str) -> NDArray[Any]:
    """Return the numbers of a column of this kind, which may be written as texts.

    Raises:
        ValueError: a value is none.
    """
    arrow = importlib.import_module("pyarrow")
    if values.null_count:
        raise ValueError("a number is missing")
    target, dtype = _TARGETS[kind]
    found: NDArray[Any] = values.cast(getattr(arrow, target)(), safe=False).to_numpy(zero_copy_only=False)
    return found.astype(np.dtype(dtype), copy=False)


def to_class_numbers(values: Any, names: Any) -> NDArray[np.int64]:
    """Return the number of each value in `names`.

    Raises:
        KeyError: a value is not among them.
    """
    compute, arrow = importlib.import_module("pyarrow.compute"), importlib.import_module("pyarrow")
    numbers = compute.index_in(values, value_set=arrow.array(list(names), values.type))
    if numbers.null_count:
        raise KeyError(values[_first(numbers.is_null())].as_py())
    found: NDArray[np.int64] = numbers.to_numpy().astype(np.int64)
    return found


def to_bytes(values: Any, width: int) -> NDArray[np.uint8] | None:
    """Return the UTF-8 bytes of each text, padded with zeros to `width`; None if a text is longer or values are none.

    Texts that are missing are empty.
    """
    arrow, compute = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
    types = arrow.types
    if not (types.is_string(values.type) or types.is_large_string(values.type)):
        return None
    values = values.fill_null("") if values.null_count else values
    if (compute.max(compute.binary_length(values)).as_py() or 0) > width:
        return None
    rows = np.array(values.cast(arrow.large_binary()).to_pylist(), f"S{width}")
    return rows.view(np.uint8).reshape(len(values), width)
