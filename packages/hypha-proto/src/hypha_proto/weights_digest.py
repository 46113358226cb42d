"""Digest of a DiLoCo job's global weights, computed alike by executors and the scheduler; needs the extra `update`.

BLAKE3 over the exchanged tensors in the order of their names: for each the line ``NAME DTYPE SHAPE`` (UTF-8, DTYPE
``F32`` or ``I64``, SHAPE as in ``[3,4]``), then its values in little-endian order, floats as float32 and integers as
int64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import blake3
import numpy as np
from numpy.typing import NDArray


class WeightsDigest:
    """Running digest; tensors must be added in the order of their names, each as one or more blocks."""

    def __init__(self) -> None:
        self._hash = blake3.blake3()
        self._last = ""
        self._dtype = "<f4"

    def begin(self, name: str, shape: tuple[int, ...], *, integers: bool = False) -> None:
        """Begin a tensor, whose values `update` adds.

        Raises:
            ValueError: a name before it sorts after it.
        """
        if name <= self._last:
            raise ValueError(f"tensor {name!r} comes after {self._last!r}: add tensors in the order of their names")
        self._last = name
        kind, self._dtype = ("I64", "<i8") if integers else ("F32", "<f4")
        self._hash.update(f"{name} {kind} [{','.join(map(str, shape))}]\n".encode())

    def update(self, block: NDArray[Any]) -> None:
        """Add the next values of the tensor that was begun last."""
        self._hash.update(np.ascontiguousarray(block, dtype=self._dtype).reshape(-1).view(np.uint8).data)

    def digest(self) -> str:
        """Return the digest as ``blake3:<64 hex digits>``."""
        return f"blake3:{self._hash.hexdigest()}"


def digest_weights(tensors: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return the digest of whole tensors, perhaps memory-mapped, in any order; integer dtypes count as integers."""
    running = WeightsDigest()
    for name, values in sorted(tensors, key=lambda entry: entry[0]):
        running.begin(name, values.shape, integers=np.issubdtype(values.dtype, np.integer))
        running.update(values)
    return running.digest()
