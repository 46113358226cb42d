"""The arithmetic of an outer step on blocks of tensors, in arrays that are allocated once; needs the extra `update`.

Each operation is one pass of numpy over a block that stays in the processor's cache. A
result depends only on the numbers at the same position, so neither on the size of blocks nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_momentum import Float64Array, derive_momentum_into
from hypha_proto.safetensors_io import Float32Array


class BlockArithmetic:
    """Computes an outer step block by block. For one thread; arrays that it returns are valid until the next block."""

    def __init__(self, optimizer: Nesterov, elements: int) -> None:
        """Allocate arrays for blocks of up to `elements` elements."""
        self._optimizer = optimizer
        self._wide = np.empty((2, elements))
        self._narrow = np.empty((2, elements), np.float32)
        self._mean: Float64Array = self._wide[0, :0]

    def average(self, blocks: Sequence[Float32Array], shares: Sequence[np.float32]) -> None:
        """Compute the weighted mean of blocks, for `mean` or `step`: float32 products, and their sum in float64."""
        size = blocks[0].size
        self._mean, product = self._wide[0, :size], self._narrow[0, :size]
        np.multiply(blocks[0], shares[0], out=product)
        np.copyto(self._mean, product)
        for block, share in zip(blocks[1:], shares[1:], strict=True):
            np.multiply(block, share, out=product)
            np.add(self._mean, product, out=self._mean)

    def mean(self) -> Float32Array:
        """Return the mean."""
        return _round(self._mean, self._narrow[0, : self._mean.size])

    def step(self, velocity: Float32Array | float) -> tuple[Float32Array, Float32Array]:
        """Return the update and the new momentum.

        Args:
            velocity: the block's momentum before the step, 0 before the first one.
        """
        size, optimizer = self._mean.size, self._optimizer
        moved, (update, momentum) = self._wide[1, :size], self._narrow[:, :size]
        np.copyto(moved, velocity)
        moved *= optimizer.momentum
        moved += self._mean
        if optimizer.learning_rate == 0.0:  # nothing follows from updates that are zero
            _round(moved, momentum)
        if not optimizer.is_classical:
            moved *= optimizer.momentum
            moved += self._mean
        moved *= optimizer.learning_rate
        _round(moved, update)
        if optimizer.learning_rate != 0.0:
            derive_momentum_into(momentum, update, velocity, (moved, self._mean), optimizer)
        return update, momentum


def _round(values: Float64Array, result: Float32Array) -> Float32Array:
    with np.errstate(over="ignore"):
        np.copyto(result, values, casting="same_kind")
    return result
