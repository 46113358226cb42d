"""The outer step of DiLoCo (arXiv:2311.08105), from update files to an update file: weighted mean, then SGD.

With delta the weighted mean of ``theta_local - theta_global`` and m the momentum, each a tensor per parameter:

    m      = mu * m + delta
    update = lr * (delta + mu * m)      Nesterov
    update = lr * m                     classical

Every worker adds `update` to theta_global, which equals a step of `torch.optim.SGD` on the gradient ``-delta``. Running
statistics are averaged and added without momentum; those that every update declares to be integers are taken from the
first member whose weight is not 0, since the mean of counts is the count of no model. Everything is computed block by
block from memory maps. Sums are in float64, so that the result is the exact one rounded to float32, in whichever order
the updates are summed. The momentum is stored in a file between rounds: the one that follows from the float32 update
(`hypha_proto.outer_momentum`), which the scheduler computes too.

Called by `server`, in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hypha_proto.errors import TensorFileError
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.update_file import (
    Float32Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    UpdateMetadata,
    open_update,
)

BLOCK: Final = 1 << 16
"""Numbers per block: a float64 block and its operands fit into the processor's cache."""
_CHECK_BLOCK: Final = 1 << 18

Float64Array = NDArray[np.float64]
Velocity = Float32Array | float


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """Settings of the outer optimizer."""

    learning_rate: float
    momentum: float
    nesterov: bool = True


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Names, shapes and dtypes of an update's tensors; equal for all updates of a job."""

    tensors: Mapping[str, TensorInfo]
    statistics: frozenset[str]

    def float32_size(self, file_size: int) -> int:
        """Return about how many bytes a float32 file of these tensors has.

        Args:
            file_size: bytes of a file of this layout, whose header is of about the same length.
        """
        header = file_size - sum(info.nbytes for info in self.tensors.values())
        return 2 * header + sum(4 * math.prod(info.shape) for info in self.tensors.values())

    def difference(self, other: TensorLayout) -> str:
        """Return the first difference of `other` from this layout, for people; empty if they are equal."""
        for name, info in self.tensors.items():
            if name not in other.tensors:
                return f"tensor {name[:80]!r} is missing"
            found = other.tensors[name]
            if found != info:
                return (
                    f"tensor {name[:80]!r} is {found.dtype} {list(found.shape)[:8]}, "
                    f"expected {info.dtype} {list(info.shape)[:8]}"
                )
        extra = sorted(other.tensors.keys() - self.tensors.keys())
        if extra:
            return f"tensor {extra[0][:80]!r} is not part of this model"
        if self.statistics != other.statistics:
            return "it declares other tensors as running statistics"
        return ""


def inspect_update(path: Path) -> TensorLayout:
    """Check that a file from a peer is well formed, with at least one tensor and only finite numbers.

    Raises:
        TensorFileError: it is not.
        OSError: the file cannot be read.
    """
    file, metadata = open_update(path)
    with file:
        if not file.tensors:
            raise TensorFileError("the file holds no tensor")
        for name, info in file.tensors.items():
            if info.dtype == "BOOL":
                raise TensorFileError(f"tensor {name[:80]!r} is boolean and has no mean")
            if not all(np.isfinite(block).all() for block in file.blocks(name, _CHECK_BLOCK)):
                raise TensorFileError(f"tensor {name[:80]!r} holds NaN or infinity")
        return TensorLayout(dict(file.tensors), metadata.statistics)


def outer_step(
    updates: Sequence[tuple[Path, float]],
    momentum: Path,
    result: Path,
    optimizer: OuterOptimizer,
    metadata: UpdateMetadata,
) -> None:
    """Average update files, take the outer step, and write the outer update. Needs memory for a few blocks.

    Args:
        updates: files of one layout and their weights, which need not sum to one; if all are 0, they count equally.
        momentum: file with the momentum of the previous step; replaced. If it is missing, the momentum is zero.
        result: where the outer update is written, float32.
        metadata: metadata of the outer update; its statistics are those of the updates.

    Raises:
        TensorFileError: a file is malformed, or the files do not match each other.
        ValueError: there is no update, or a weight is negative.
        OSError: a file cannot be read or written.
    """
    shares = _normalise([weight for _, weight in updates])
    with ExitStack() as stack:
        opened = [open_update(path) for path, _ in updates]
        files = [stack.enter_context(file) for file, _ in opened]
        integers = frozenset.intersection(*(declared.integers for _, declared in opened))
        first = files[0]
        for file in files[1:]:
            if file.tensors.keys() != first.tensors.keys():
                raise TensorFileError(f"{file.path.name} and {first.path.name} hold different tensors")
        before = stack.enter_context(TensorFile(momentum)) if momentum.exists() else None
        infos = {name: TensorInfo("F32", info.shape) for name, info in first.tensors.items()}
        moving = {name: info for name, info in infos.items() if name not in metadata.statistics}
        out = stack.enter_context(TensorFileWriter(result, infos, metadata.encode()))
        after = stack.enter_context(TensorFileWriter(momentum, moving))
        for name in infos:
            means = _mean_blocks(files, _only_first(shares) if name in integers else shares, name)
            if name not in moving:
                for mean in means:
                    out.write(name, mean)
                continue
            for mean, velocity in zip(means, _momentum_blocks(before, name), strict=False):
                step = _step(mean, velocity, optimizer)
                out.write(name, step)
                after.write(name, _momentum_after(step, mean, velocity, optimizer))


def _normalise(weights: Sequence[float]) -> list[float]:
    if not weights:
        raise ValueError("an outer step needs at least one update")
    if min(weights) < 0:
        raise ValueError(f"the weight {min(weights)} of an update is negative")
    total = float(sum(weights))
    return [weight / total for weight in weights] if total > 0 else [1.0 / len(weights)] * len(weights)


def _only_first(shares: Sequence[float]) -> list[float]:
    """Return shares that take everything from the first member whose share is not 0."""
    chosen = next(number for number, share in enumerate(shares) if share > 0)
    return [float(number == chosen) for number in range(len(shares))]


def _mean_blocks(files: Sequence[TensorFile], shares: Sequence[float], name: str) -> Iterator[Float64Array]:
    """Yield the weighted mean of one tensor in float64 blocks; each is valid until the next one."""
    shape = files[0].tensors[name].shape
    for file in files[1:]:
        if file.tensors[name].shape != shape:
            raise TensorFileError(f"{file.path.name} and {files[0].path.name} differ in the shape of {name[:80]!r}")
    total, term = np.empty(BLOCK), np.empty(BLOCK)
    for blocks in zip(*(file.blocks(name, BLOCK) for file in files), strict=True):
        size = blocks[0].size
        np.multiply(blocks[0], shares[0], out=total[:size])
        for block, share in zip(blocks[1:], shares[1:], strict=True):
            np.multiply(block, share, out=term[:size])
            total[:size] += term[:size]
        yield total[:size]


def _momentum_blocks(before: TensorFile | None, name: str) -> Iterator[Velocity]:
    return before.blocks(name, BLOCK) if before is not None else repeat(0.0)


def _step(mean: Float64Array, velocity: Velocity, optimizer: OuterOptimizer) -> Float32Array:
    """Return the update of one block."""
    moved = _moved(mean, velocity, optimizer)
    direction = mean + optimizer.momentum * moved if optimizer.nesterov else moved
    with np.errstate(over="ignore"):
        return (optimizer.learning_rate * direction).astype(np.float32)


def _momentum_after(
    update: Float32Array, mean: Float64Array, velocity: Velocity, optimizer: OuterOptimizer
) -> Float32Array | Float64Array:
    """Return the new momentum of one block."""
    if optimizer.learning_rate == 0.0:  # nothing follows from updates that are zero
        return _moved(mean, velocity, optimizer)
    rate, factor = optimizer.learning_rate, optimizer.momentum
    return derive_momentum(update, velocity, learning_rate=rate, momentum=factor, nesterov=optimizer.nesterov)


def _moved(mean: Float64Array, velocity: Velocity, optimizer: OuterOptimizer) -> Float64Array:
    moved: Float64Array = np.multiply(velocity, optimizer.momentum, dtype=np.float64) + mean
    return moved
