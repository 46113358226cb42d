"""The outer step of DiLoCo, from update files to an update file: weighted mean, then SGD with momentum.

With delta the weighted mean of ``theta_local - theta_global`` and m the momentum, each a tensor per parameter:

    m      = mu * m + delta
    update = lr * (delta + mu * m)      Nesterov
    update = lr * m                     classical

`update` is what everybody adds to theta_global: `torch.optim.SGD` on the gradient ``-delta``. Running statistics are
averaged and added as they are. Everything is computed a block at a time from memory maps: sums in float64, so that the
result is the exact one rounded to float32 whatever the order of the workers; momentum lies in a file between rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hypha_proto.errors import TensorFileError
from hypha_proto.update_file import TensorFile, TensorFileWriter, TensorInfo, UpdateMetadata, open_update

BLOCK: Final = 1 << 16
"""Numbers computed at once: the float64 block and its operands stay in the processor's cache."""
_CHECK_BLOCK: Final = 1 << 18

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The outer optimiser's settings."""

    learning_rate: float
    momentum: float
    nesterov: bool = True


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What every update of a job has in common."""

    tensors: Mapping[str, TensorInfo]
    statistics: frozenset[str]

    def difference(self, other: TensorLayout) -> str:
        """The first way in which `other` is not this layout, for people; empty when it is the same."""
        for name, info in self.tensors.items():
            if name not in other.tensors:
                return f"tensor {name[:80]!r} is missing"
            found = other.tensors[name]
            if found != info:
                return (
                    f"tensor {name[:80]!r} is {found.dtype} {list(found.shape)[:8]}, "
                    f"expected {info.dtype} {list(info.shape)[:8]}"
                )
        surplus = sorted(other.tensors.keys() - self.tensors.keys())
        if surplus:
            return f"tensor {surplus[0][:80]!r} is not of this model"
        if self.statistics != other.statistics:
            return "it names other tensors as running statistics"
        return ""


def inspect_update(path: Path) -> TensorLayout:
    """Check a file that a peer sent: well formed, at least one tensor, and every number finite.

    Raises:
        TensorFileError: it is not so.
        OSError: the file cannot be read.
    """
    file, metadata = open_update(path)
    with file:
        if not file.tensors:
            raise TensorFileError("the file holds no tensor")
        for name, info in file.tensors.items():
            if info.dtype == "BOOL":
                raise TensorFileError(f"tensor {name[:80]!r} is of truth values, which have no mean")
            # a sum of finite numbers of one sign overflows only when they are useless; a NaN never hides in one
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
    """Average update files, step, and write the outer update. Needs the memory of a few blocks.

    Args:
        updates: files of one layout and their weights, which need not sum to one; when all are 0 they count alike.
        momentum: state from the step before; a missing file is zero momentum. Replaced.
        result: where the outer update is written, float32.
        metadata: what the outer update says about itself; its statistics are those of the updates.

    Raises:
        TensorFileError: a file is malformed, or the files do not fit one another.
        ValueError: there is no update, or a weight is negative.
        OSError: a file cannot be read or written.
    """
    shares = _normalise([weight for _, weight in updates])
    with ExitStack() as stack:
        files = [stack.enter_context(open_update(path)[0]) for path, _ in updates]
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
            means = _mean_blocks(files, shares, name)
            if name not in moving:
                for mean in means:
                    out.write(name, mean)
                continue
            for mean, velocity in zip(means, _momentum_blocks(before, name), strict=False):
                step, moved = _step(mean, velocity, optimizer)
                out.write(name, step)
                after.write(name, moved)


def _normalise(weights: Sequence[float]) -> list[float]:
    if not weights:
        raise ValueError("an outer step needs at least one update")
    if min(weights) < 0:
        raise ValueError(f"the weight {min(weights)} of an update is negative")
    total = float(sum(weights))
    return [weight / total for weight in weights] if total > 0 else [1.0 / len(weights)] * len(weights)


def _mean_blocks(files: Sequence[TensorFile], shares: Sequence[float], name: str) -> Iterator[Float64Array]:
    """The weighted mean of one tensor, block by block in float64; a block is valid until the next is asked for."""
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


def _momentum_blocks(before: TensorFile | None, name: str) -> Iterator[NDArray[np.float32] | float]:
    return before.blocks(name, BLOCK) if before is not None else repeat(0.0)


def _step(
    mean: Float64Array, velocity: NDArray[np.float32] | float, optimizer: OuterOptimizer
) -> tuple[Float64Array, Float64Array]:
    """Update and new momentum of one block."""
    moved = np.multiply(velocity, optimizer.momentum, dtype=np.float64) + mean
    direction = mean + optimizer.momentum * moved if optimizer.nesterov else moved
    return optimizer.learning_rate * direction, moved
