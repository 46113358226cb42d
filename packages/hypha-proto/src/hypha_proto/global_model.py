"""The global model of a DiLoCo job on disk, with float32 weights and the outer momentum; needs the extra `update`.

Executors add every outer update to float32 weights (theta_global). A model file may store fewer bits: if updates were
added to what it stores, each sum would be rounded, and updates below half the spacing of its numbers would be lost. So
the float32 weights of such tensors are kept in files of their own, and the model's are their rounding:

    model_dir/NAME.safetensors           the model, in its own dtypes
    state_dir/weights/NAME.safetensors   float32 weights of the tensors that NAME.safetensors stores in 16 bits
    state_dir/momentum.safetensors       outer momentum, float32 (see `outer_momentum`)

Each file of `state_dir` states its round in the header's metadata. Called by the scheduler, in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import numpy as np

from hypha_proto.errors import TensorFileError
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.safetensors_io import (
    FLOAT_DTYPES,
    Array,
    Float32Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    from_float,
)
from hypha_proto.update_file import check_fit, model_files, open_update, stage_files

MOMENTUM: Final = "momentum.safetensors"
"""File of the outer momentum in `state_dir`."""
WEIGHTS: Final = "weights"
"""Directory of float32 weights in `state_dir`."""
_ROUND: Final = "round"
_NARROW: Final = frozenset({"F16", "BF16"})
_BLOCK: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """Model, float32 weights and momentum after a round."""

    model_dir: Path
    """Directory of the model's files."""
    state_dir: Path
    """Directory of the other files, created when it is needed."""
    optimizer: Nesterov
    """The outer optimizer, from which the momentum follows. None is kept if its momentum factor is 0."""

    def add(self, updates: Sequence[Path], first_round: int) -> None:
        """Add the outer updates of consecutive rounds, in float32 and one after the other.

        Writes all new files before it replaces the first old one, so an error while writing changes nothing. Needs
        memory for a few blocks.

        Args:
            updates: at least one update file.
            first_round: round of the first one. If it is 1, files in `state_dir` are of an earlier run and are
                replaced; otherwise they must be of the round before.

        Raises:
            TensorFileError: a file is malformed, the updates do not fit the model or each other, or a file of
                `state_dir` is missing or of another round.
            OSError: a file cannot be read or written.
        """
        with ExitStack() as stack:
            changes, statistics = _open_updates(stack, updates)
            shards = {path.name: stack.enter_context(TensorFile(path)) for path in model_files(self.model_dir)}
            check_fit(changes[0], {name: info for shard in shards.values() for name, info in shard.tensors.items()})
            state = self._state_layout(shards, changes[0], statistics)
            before = {name: self._open_state(stack, name, state[name], first_round) for name in state}
            for name in state:
                (self.state_dir / name).parent.mkdir(parents=True, exist_ok=True)
            targets = [*(self.state_dir / name for name in state), *(self.model_dir / name for name in shards)]
            new = stack.enter_context(stage_files(targets))
            metadata = {_ROUND: str(first_round + len(changes) - 1)}
            writers = {
                name: stack.enter_context(TensorFileWriter(new[self.state_dir / name], infos, metadata))
                for name, infos in state.items()
            }
            for name, shard in shards.items():
                wide = f"{WEIGHTS}/{name}"
                _write_shard(shard, before.get(wide), changes, new[self.model_dir / name], writers.get(wide))
            if MOMENTUM in state:
                _write_momentum(before[MOMENTUM], changes, state[MOMENTUM], self.optimizer, writers[MOMENTUM])

    def _state_layout(
        self, shards: Mapping[str, TensorFile], change: TensorFile, statistics: frozenset[str]
    ) -> dict[str, dict[str, TensorInfo]]:
        """Return the tensors of each file of `state_dir` by its relative name."""
        layout: dict[str, dict[str, TensorInfo]] = {}
        for file, shard in shards.items():
            narrow = {name for name, info in shard.tensors.items() if info.dtype in _NARROW and name in change.tensors}
            if narrow:
                layout[f"{WEIGHTS}/{file}"] = _float32(shard.tensors, narrow)
        if self.optimizer.momentum != 0.0:
            layout[MOMENTUM] = _float32(change.tensors, change.tensors.keys() - statistics)
        return layout

    def _open_state(
        self, stack: ExitStack, name: str, layout: Mapping[str, TensorInfo], first_round: int
    ) -> TensorFile | None:
        """Open a file of the round before `first_round`; None before the first round."""
        if first_round == 1:
            return None
        path = self.state_dir / name
        if not path.exists():
            raise TensorFileError(f"{name}: the file is missing, so nothing can be added after round {first_round - 1}")
        file = stack.enter_context(TensorFile(path))
        if file.metadata.get(_ROUND) != str(first_round - 1):
            found = file.metadata.get(_ROUND, "none")[:40]
            raise TensorFileError(f"{name}: it is of round {found}, expected round {first_round - 1}")
        if file.tensors != layout:
            raise TensorFileError(f"{name}: it does not hold the tensors of the update")
        return file


def _float32(tensors: Mapping[str, TensorInfo], names: Set[str]) -> dict[str, TensorInfo]:
    return {name: TensorInfo("F32", info.shape) for name, info in tensors.items() if name in names}


def _open_updates(stack: ExitStack, updates: Sequence[Path]) -> tuple[list[TensorFile], frozenset[str]]:
    """Open update files, which must have the same tensors and statistics; also return the statistics."""
    files: list[TensorFile] = []
    statistics: set[frozenset[str]] = set()
    for path in updates:
        file, metadata = open_update(path)
        files.append(stack.enter_context(file))
        statistics.add(metadata.statistics)
        if _shapes(file) != _shapes(files[0]) or len(statistics) > 1:
            raise TensorFileError(f"{path.name} and {updates[0].name} differ in tensors or statistics")
    [found] = statistics
    return files, found


def _shapes(file: TensorFile) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in file.tensors.items()}


def _write_shard(
    shard: TensorFile,
    weights: TensorFile | None,
    changes: Sequence[TensorFile],
    path: Path,
    wide: TensorFileWriter | None,
) -> None:
    """Write a model file with the updates added, and the float32 weights of its narrow tensors to `wide`."""
    with TensorFileWriter(path, shard.tensors, shard.metadata) as writer:
        for name, info in shard.tensors.items():
            if name not in changes[0].tensors:
                writer.write_stored(name, shard.stored(name))
            elif info.dtype not in FLOAT_DTYPES:
                for stored in _integer_sums(shard, changes, name):
                    writer.write_stored(name, stored)
            else:
                narrow = wide is not None and info.dtype in _NARROW
                for values in _float_sums(shard if weights is None or not narrow else weights, changes, name):
                    writer.write(name, values)
                    if wide is not None and narrow:
                        wide.write(name, values)


def _float_sums(start: TensorFile, changes: Sequence[TensorFile], name: str) -> Iterator[Float32Array]:
    for total, *added in zip(start.blocks(name, _BLOCK), *(file.blocks(name, _BLOCK) for file in changes), strict=True):
        for block in added:
            total = total + block
        yield total


def _integer_sums(shard: TensorFile, changes: Sequence[TensorFile], name: str) -> Iterator[Array]:
    """Yield sums in float64, rounded to integers after each update, as executors do."""
    dtype, flat = shard.tensors[name].dtype, shard.stored(name).reshape(-1)
    for number, added in enumerate(zip(*(file.blocks(name, _BLOCK) for file in changes), strict=True)):
        total = flat[number * _BLOCK : (number + 1) * _BLOCK]
        for block in added:
            total = from_float(total.astype(np.float64) + block, dtype)
        yield total


def _write_momentum(
    before: TensorFile | None,
    changes: Sequence[TensorFile],
    layout: Mapping[str, TensorInfo],
    optimizer: Nesterov,
    writer: TensorFileWriter,
) -> None:
    for name in layout:
        previous: Iterator[Float32Array | float] = repeat(0.0) if before is None else before.blocks(name, _BLOCK)
        for moved, *added in zip(previous, *(file.blocks(name, _BLOCK) for file in changes), strict=False):
            for block in added:
                moved = derive_momentum(
                    block,
                    moved,
                    learning_rate=optimizer.learning_rate,
                    momentum=optimizer.momentum,
                    nesterov=optimizer.nesterov is not False,
                )
            writer.write(name, np.asarray(moved))
