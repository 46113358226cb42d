"""The outer step of DiLoCo (arXiv:2311.08105), from update files to an update file; needs the extra `update`.

The weighted mean of the updates, then a step of SGD.

With delta the weighted mean of ``theta_local - theta_global`` and m the momentum, each a tensor per parameter:

    m      = mu * m + delta
    update = lr * (delta + mu * m)      Nesterov
    update = lr * m                     classical

Every worker adds `update` to theta_global, which equals a step of `torch.optim.SGD` on the gradient ``-delta``. Running
statistics are averaged and added without momentum; those that every update declares to be integers are taken from the
first member whose weight is not 0, since the mean of counts is the count of no model. The products of updates and
weights are rounded to float32; they are summed, and the step is computed, in float64. The momentum is stored in a file
between rounds: the one that follows from the float32 update (`hypha_proto.outer_momentum`), which the scheduler
computes too. Everything is read from memory maps and computed block by block, by several threads, in arrays that are
allocated once. A result depends only on the numbers at the same position, so neither on the size of blocks nor on the
number of threads.

Used by the parameter server and, to replay a job, by the executor.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Final

import numpy as np

from hypha_proto.errors import TensorFileError
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_momentum import Float64Array, derive_momentum_into
from hypha_proto.safetensors_io import Float32Array, TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, open_update


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


BLOCK: Final = 1 << 17
"""Numbers per block: small enough that two blocks in float64 fit into the processor's caches, large enough that threads
seldom wait for the interpreter lock."""
PART: Final = 1 << 20
"""Numbers in one part, which a thread computes before it takes the next part."""
MAX_THREADS: Final = 4
"""Maximum number of threads of an outer step; more would wait for memory."""
LARGEST: Final = 1e30
"""Largest absolute value allowed in an update. With larger ones the outer step may be infinite in float32, which would
end the job for all members."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Names, shapes and dtypes of an update's tensors; equal for all updates of a job."""

    tensors: Mapping[str, TensorInfo]
    statistics: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """See `UpdateMetadata`."""

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
                return f"tensor {name!r} is missing"
            found = other.tensors[name]
            if found != info:
                return f"tensor {name!r} is {found.dtype} {list(found.shape)}, expected {info.dtype} {list(info.shape)}"
        extra = sorted(other.tensors.keys() - self.tensors.keys())
        if extra:
            return f"tensor {extra[0]!r} is not part of this model"
        if self.statistics != other.statistics:
            return "it declares other tensors as running statistics"
        if self.aliases != other.aliases:
            return "it declares other names of the same tensors"
        return ""

    def momentum_difference(self, momentum: Mapping[str, TensorInfo]) -> str:
        """Return the first difference of the tensors with a momentum from those of a momentum file, as `difference`."""
        moving = {name: info.shape for name, info in self.tensors.items() if name not in self.statistics}
        for name, info in momentum.items():
            if name not in moving:
                return f"tensor {name!r} is missing"
            if moving[name] != info.shape:
                return f"tensor {name!r} is {list(moving[name])}, expected {list(info.shape)}"
        extra = sorted(moving.keys() - momentum.keys())
        return f"tensor {extra[0]!r} has no momentum" if extra else ""


@dataclass(frozen=True, slots=True)
class InspectedUpdate:
    """What decides whether an update may be averaged with others."""

    layout: TensorLayout
    norm: float
    """Euclidean norm of the update, over all tensors but running statistics."""


def inspect_update(path: Path) -> InspectedUpdate:
    """Check that a file from a peer is well formed, with at least one tensor and only numbers up to `LARGEST`.

    Raises:
        TensorFileError: it is not.
        OSError: the file cannot be read.
    """
    file, metadata = open_update(path)
    with file:
        if not file.tensors:
            raise TensorFileError("the file holds no tensor")
        square = 0.0
        for name, info in file.tensors.items():
            if info.dtype == "BOOL":
                raise TensorFileError(f"tensor {name!r} is boolean and has no mean")
            found = sum(_square(name, block) for block in file.blocks(name))
            square += 0.0 if name in metadata.statistics else found
        layout = TensorLayout(dict(file.tensors), metadata.statistics, metadata.aliases)
        return InspectedUpdate(layout, math.sqrt(square))


def _square(name: str, block: Float32Array) -> float:
    """Return the sum of the squares of some numbers, after checking them."""
    wide = block.astype(np.float64)
    square = float(wide @ wide)
    if not square <= LARGEST**2 and not (np.abs(block) <= LARGEST).all():  # with NaN, both comparisons are false
        what = f"a number beyond {LARGEST:g}" if np.isfinite(block).all() else "NaN or infinity"
        raise TensorFileError(f"tensor {name!r} holds {what}")
    return square


def inspect_momentum(path: Path) -> Mapping[str, TensorInfo]:
    """Check that a file holds a momentum: only finite numbers, in float32; return its tensors.

    Raises:
        TensorFileError: it does not.
        OSError: the file cannot be read.
    """
    with TensorFile(path) as file:
        for name, info in file.tensors.items():
            if info.dtype != "F32":
                raise TensorFileError(f"tensor {name!r} is {info.dtype}, and the momentum is float32")
            if not all(np.isfinite(block).all() for block in file.blocks(name)):
                raise TensorFileError(f"tensor {name!r} holds NaN or infinity")
        return dict(file.tensors)


def outer_step(
    updates: Sequence[tuple[Path, float]],
    momentum: Path,
    result: Path,
    optimizer: Nesterov,
    metadata: UpdateMetadata,
    *,
    threads: int | None = None,
) -> None:
    """Average update files, take the outer step, and write the outer update. Needs memory for a few blocks.

    The momentum is replaced last: after an error or a crash the same step can be taken again.

    Args:
        updates: files of one layout and their weights, which need not sum to one; if all are 0, they count equally.
        momentum: file with the momentum of the previous step; replaced. If it is missing, the momentum is zero.
        result: where the outer update is written, float32.
        optimizer: settings of the outer optimizer.
        metadata: metadata of the outer update; its statistics are those of the updates.
        threads: number of threads that compute, this one included; by default one for each processor that is available,
            at most `MAX_THREADS`. Without influence on the result.

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
        before = stack.enter_context(TensorFile(momentum)) if momentum.exists() else None
        infos = {name: TensorInfo("F32", info.shape) for name, info in files[0].tensors.items()}
        moving = {name: info for name, info in infos.items() if name not in metadata.statistics}
        _check_shapes(files, before, moving)
        # the momentum is opened first, hence replaced last
        after = stack.enter_context(TensorFileWriter(momentum, moving, reserve=True))
        out = stack.enter_context(TensorFileWriter(result, infos, metadata.encode(), reserve=True))
        step = _Step(files, _float32(shares), _float32(_only_first(shares)), integers, before, out, after, optimizer)
        _run(step.compute, deque(_divide(infos, moving)), _available_threads() if threads is None else threads)


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


def _float32(shares: Sequence[float]) -> list[np.float32]:
    return [np.float32(share) for share in shares]


def _check_shapes(files: Sequence[TensorFile], before: TensorFile | None, moving: Iterable[str]) -> None:
    first = files[0]
    for file in files[1:]:
        if file.tensors.keys() != first.tensors.keys():
            raise TensorFileError(f"{file.path.name} and {first.path.name} hold different tensors")
        _compare_shapes(file, first, first.tensors)
    if before is not None:
        _compare_shapes(before, first, moving)


def _compare_shapes(file: TensorFile, first: TensorFile, names: Iterable[str]) -> None:
    for name in names:
        if name not in file.tensors:
            raise TensorFileError(f"{file.path.name} holds no tensor {name!r}")
        if file.tensors[name].shape != first.tensors[name].shape:
            raise TensorFileError(f"{file.path.name} and {first.path.name} differ in the shape of {name!r}")


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive elements of a tensor."""

    name: str
    begin: int
    end: int
    moving: bool
    """Whether the tensor has a momentum."""


def _divide(infos: Mapping[str, TensorInfo], moving: Container[str]) -> Iterator[_Part]:
    for name, info in infos.items():
        for begin in range(0, info.elements, PART):
            yield _Part(name, begin, min(begin + PART, info.elements), name in moving)


@dataclass(frozen=True, slots=True)
class _Step:
    """Inputs and outputs of an outer step."""

    updates: Sequence[TensorFile]
    shares: Sequence[np.float32]
    only_first: Sequence[np.float32]
    """Shares for integers."""
    integers: Container[str]
    before: TensorFile | None
    """Momentum before the step."""
    out: TensorFileWriter
    after: TensorFileWriter
    optimizer: Nesterov

    def compute(self, parts: deque[_Part]) -> None:
        """Compute parts until none is left; several threads may do so at the same time."""
        arithmetic = BlockArithmetic(self.optimizer, BLOCK)
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            self._compute_part(part, arithmetic)

    def _compute_part(self, part: _Part, arithmetic: BlockArithmetic) -> None:
        shares = self.only_first if part.name in self.integers else self.shares
        updates = zip(*(_blocks(file, part) for file in self.updates), strict=True)
        velocities: Iterator[Float32Array | float] = repeat(0.0)
        if self.before is not None and part.moving:
            velocities = _blocks(self.before, part)
        for begin, blocks, velocity in zip(range(part.begin, part.end, BLOCK), updates, velocities, strict=False):
            arithmetic.average(blocks, shares)
            if not part.moving:
                self.out.write_stored_at(part.name, begin, arithmetic.mean())
                continue
            update, momentum = arithmetic.step(velocity)
            self.out.write_stored_at(part.name, begin, update)
            self.after.write_stored_at(part.name, begin, momentum)


def _blocks(file: TensorFile, part: _Part) -> Iterator[Float32Array]:
    return file.blocks(part.name, BLOCK, begin=part.begin, end=part.end)


def _available_threads() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, MAX_THREADS)


def _run(compute: Callable[[deque[_Part]], None], parts: deque[_Part], threads: int) -> None:
    """Compute all parts in this thread and some others; wait for all, and raise the first error of any."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            compute(parts)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            parts.clear()

    others = _start_threads(work, min(threads, len(parts)) - 1)
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _start_threads(work: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start up to `count` threads: fewer where the system allows no more."""
    started: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=work, name="outer-step", daemon=True)  # must not delay the program's end
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started
