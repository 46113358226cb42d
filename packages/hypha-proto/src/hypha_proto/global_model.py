"""The global model of a DiLoCo job on disk, with float32 weights and the outer momentum; needs the extra `update`.

Executors add every outer update to float32 weights (theta_global). A model file may store fewer bits; sums in its dtype
would lose updates below half the spacing of its numbers. So the weights after each round are kept in float32 in a
directory of their own, and the model files hold the rounded weights:

    start_dir/                             the start model, which is never changed
    state_dir/round-N/weights.safetensors  float32 weights and int64 counts after round N: the tensors of the updates
    state_dir/round-N/momentum.safetensors outer momentum after round N, float32 (see `outer_momentum`)
    state_dir/round-N/state.json           digests of both, and of the round's outer update

A directory appears when all of it is on disk. Functions block, and need memory for a few blocks of a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.file_digests import digest_file
from hypha_proto.job_spec import Nesterov
from hypha_proto.model_listing import weights_of
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.safetensors_io import (
    BLOCK,
    FLOAT_DTYPES,
    Array,
    Float32Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    from_float,
    to_float32,
)
from hypha_proto.texts import quote
from hypha_proto.update_file import check_fit, decode_aliases, encode_aliases, open_update
from hypha_proto.weights_digest import WeightsDigest, digest_weights
from hypha_proto.whole_directory import remove_tree, replace_directory

MOMENTUM: Final = "momentum.safetensors"
"""File of the outer momentum after a round."""
WEIGHTS: Final = "weights.safetensors"
"""File of the weights after a round."""
STATE: Final = "state.json"
"""File of the digests."""
_ROUND: Final = "round"


@dataclass(frozen=True, slots=True)
class RoundState:
    """Digests of the state after a round."""

    round: int
    before: str
    """Digest of the weights before the round, over the tensors of the update (`weights_digest`)."""
    weights: str
    """Digest of the weights after it."""
    momentum: str | None
    """Digest of the outer momentum after it, computed likewise; None if none is kept."""
    update: str
    """Digest of the file of the round's outer update."""


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """Start model, and float32 weights and momentum after rounds."""

    start_dir: Path
    """Directory of the start model's files."""
    state_dir: Path
    """Directory of the states, created when it is needed."""
    optimizer: Nesterov
    """The outer optimizer, from which the momentum follows. None is kept if its momentum factor is 0."""

    def directory(self, round_number: int) -> Path:
        """Return the directory of the state after a round."""
        return self.state_dir / f"round-{round_number}"

    def add(self, update: Path, round_number: int) -> RoundState:
        """Write the state after a round: the previous state plus the outer update, in float32.

        The state is on disk when this returns; after an error nothing of it is left. A state of this round that exists
        is replaced.

        Args:
            update: file of the outer update.
            round_number: its round, from 1; the state of the round before must exist unless it is the first.

        Raises:
            TensorFileError: a file is malformed; the update does not fit the model, is of another round, holds NaN or
                infinity or leads to it; or the state of the round before is missing.
            OSError: a file cannot be read or written.
        """
        with ExitStack() as stack:
            change, metadata = open_update(update)
            stack.enter_context(change)
            if metadata.round not in (None, round_number):
                raise TensorFileError(f"{update.name}: it is of round {metadata.round}, expected round {round_number}")
            sources = self._open_weights(stack, change, metadata.aliases, round_number - 1)
            trained = change.tensors.keys() - metadata.statistics
            moving = self._open_momentum(stack, trained, change, round_number - 1)
            folder = stack.enter_context(replace_directory(self.directory(round_number)))
            about = {_ROUND: str(round_number)}
            if metadata.aliases:
                about["aliases"] = encode_aliases(metadata.aliases)
            state = self._write_state(folder, change, sources, moving, trained, about)
            (folder / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        return state

    def _open_weights(
        self, stack: ExitStack, change: TensorFile, aliases: Mapping[str, str], round_number: int
    ) -> Mapping[str, TensorFile]:
        """Return the file that holds each tensor of an update after a round."""
        if round_number == 0:
            shards = [stack.enter_context(TensorFile(path)) for path in weights_of(self.start_dir)]
            known = {name: info for shard in shards for name, info in shard.tensors.items()}
            check_fit(change, known, aliases)
            return {name: shard for shard in shards for name in shard.tensors.keys() & change.tensors.keys()}
        file = self._open_state(stack, WEIGHTS, round_number)
        if _shapes(file) != _shapes(change) or decode_aliases(file.metadata) != aliases:
            raise TensorFileError(f"{change.path.name}: it does not hold the tensors of the updates before")
        return dict.fromkeys(file.tensors, file)

    def _open_momentum(
        self, stack: ExitStack, trained: Set[str], change: TensorFile, round_number: int
    ) -> TensorFile | None:
        if round_number == 0 or self.optimizer.momentum == 0.0:
            return None
        file = self._open_state(stack, MOMENTUM, round_number)
        if _shapes(file) != {name: change.tensors[name].shape for name in trained}:
            raise TensorFileError(f"{change.path.name}: its statistics are not those of the updates before")
        return file

    def _open_state(self, stack: ExitStack, name: str, round_number: int) -> TensorFile:
        path = self.directory(round_number) / name
        if not path.exists():
            raise TensorFileError(f"{path.parent.name}/{name}: the file is missing")
        file = stack.enter_context(TensorFile(path))
        if file.metadata.get(_ROUND) != str(round_number):
            found = file.metadata.get(_ROUND, "none")
            raise TensorFileError(f"{path.parent.name}/{name}: it is of round {found}, expected round {round_number}")
        return file

    def _write_state(
        self,
        folder: Path,
        change: TensorFile,
        sources: Mapping[str, TensorFile],
        moving: TensorFile | None,
        trained: Set[str],
        metadata: Mapping[str, str],
    ) -> RoundState:
        names = sorted(change.tensors)
        infos = {name: _wide(sources[name].tensors[name]) for name in names}
        before, after, momentum = WeightsDigest(), WeightsDigest(), None
        with TensorFileWriter(folder / WEIGHTS, infos, metadata) as writer:
            for name in names:
                info = sources[name].tensors[name]
                for digest in (before, after):
                    digest.begin(name, info.shape, integers=info.dtype not in FLOAT_DTYPES)
                for old, new in _sums(sources[name], change, name):
                    before.update(old)
                    after.update(new)
                    writer.write_stored(name, new)
        if self.optimizer.momentum != 0.0:
            kept = {name: TensorInfo("F32", change.tensors[name].shape) for name in sorted(trained)}
            moments = WeightsDigest()
            with TensorFileWriter(folder / MOMENTUM, kept, metadata) as writer:
                for name, info in kept.items():
                    moments.begin(name, info.shape)
                    for moved, added in _zip_blocks(moving, change, name):
                        values = derive_momentum(added, moved, self.optimizer)
                        moments.update(values)
                        writer.write_stored(name, values)
            momentum = moments.digest()
        number = int(metadata[_ROUND])
        return RoundState(number, before.digest(), after.digest(), momentum, digest_file(change.path))

    def write_model(self, round_number: int, target: Path) -> None:
        """Write the model files after a round, named and in the dtypes of the start model's, to a directory.

        Round 0 is the start model.

        Raises:
            TensorFileError: a file is malformed or missing.
            OSError: a file cannot be read or written.
        """
        with ExitStack() as stack:
            weights = None if round_number == 0 else self._open_state(stack, WEIGHTS, round_number)
            write_shards(self.start_dir, weights, target)

    def check(self, round_number: int) -> RoundState:
        """Return the digests of the state after a round if its files have them.

        Raises:
            TensorFileError: a file is missing, malformed or damaged.
            OSError: a file cannot be read.
        """
        folder = self.directory(round_number)
        if not folder.is_dir():
            raise TensorFileError(f"{folder.name}: the directory is missing")
        state = _read_state(folder / STATE, round_number)
        files = [(WEIGHTS, state.weights)]
        if self.optimizer.momentum != 0.0:
            files.append((MOMENTUM, state.momentum or ""))
        for name, digest in files:
            with ExitStack() as stack:
                file = self._open_state(stack, name, round_number)
                if digest_weights((name, file.stored(name)) for name in file.tensors) != digest:
                    raise TensorFileError(f"{folder.name}/{name}: the file is damaged: it does not have its digest")
        return state

    def remove_others(self, rounds: Set[int]) -> None:
        """Remove the states of other rounds, and incomplete ones of killed programs.

        Raises:
            OSError: a directory cannot be removed.
        """
        kept = {self.directory(number).name for number in rounds}
        if self.state_dir.is_dir():
            for path in sorted(self.state_dir.iterdir()):
                if path.name not in kept:
                    remove_tree(path)


def write_shards(start_dir: Path, weights: TensorFile | None, target: Path) -> None:
    """Write the weights of a model to a directory, in the files, names and dtypes of the start model.

    Args:
        start_dir: the start model. Tensors that `weights` lacks are copied from it, except aliases of tensors in
            `weights` (`UpdateMetadata.aliases`), which get the values of these.
        weights: float32 weights and int64 counts; None for the start model itself.
        target: the directory.

    Raises:
        TensorFileError: a file is malformed.
        OSError: a file cannot be read or written.
    """
    for path in weights_of(start_dir):
        with TensorFile(path) as shard:
            _write_shard(shard, weights, target / path.name)


def _shapes(file: TensorFile) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in file.tensors.items()}


def _wide(info: TensorInfo) -> TensorInfo:
    """Return how the weights' file stores a tensor of the model."""
    return TensorInfo("F32" if info.dtype in FLOAT_DTYPES else "I64", info.shape)


def _sums(source: TensorFile, change: TensorFile, name: str) -> Iterator[tuple[Array, Array]]:
    """Yield blocks of a tensor before and after an update, with the arithmetic of executors.

    Integers are added in float64 and rounded.
    """
    dtype, flat = source.tensors[name].dtype, source.stored(name).reshape(-1)
    for number, added in enumerate(change.blocks(name)):
        if not np.isfinite(added).all():
            raise TensorFileError(f"{change.path.name}: {name!r} contains NaN or infinity")
        stored = flat[number * BLOCK : number * BLOCK + added.size]
        if dtype not in FLOAT_DTYPES:
            count = stored.astype("<i8", copy=False)
            yield count, from_float(count.astype(np.float64) + added, "I64")
            continue
        old = to_float32(stored, dtype)
        with np.errstate(over="ignore"):
            new = old + added
        if not np.isfinite(new).all():
            raise TensorFileError(f"{change.path.name}: with it, {name!r} becomes NaN or infinite")
        yield old, new


def _zip_blocks(
    before: TensorFile | None, change: TensorFile, name: str
) -> Iterator[tuple[Float32Array | float, Float32Array]]:
    if before is None:
        yield from ((0.0, block) for block in change.blocks(name))
    else:
        yield from zip(before.blocks(name), change.blocks(name), strict=True)


def _write_shard(shard: TensorFile, weights: TensorFile | None, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aliases = {} if weights is None else decode_aliases(weights.metadata)
    with TensorFileWriter(path, shard.tensors, shard.metadata) as writer:
        for name, info in shard.tensors.items():
            known = aliases.get(name, name)
            if weights is None or known not in weights.tensors:
                writer.write_stored(name, shard.stored(name))
            elif info.dtype in FLOAT_DTYPES:
                for block in weights.blocks(known):
                    writer.write(name, block)
            else:
                writer.write_stored(name, _narrow(weights.stored(known), shard.stored(name)))


def _narrow(counts: Array, like: Array) -> Array:
    """Convert int64 counts to another integer dtype, clipped to its range."""
    if like.dtype.kind == "b":
        return np.asarray(counts != 0)
    limits = np.iinfo(like.dtype)
    high = min(int(limits.max), np.iinfo("i8").max)
    return np.asarray(np.clip(counts, max(int(limits.min), np.iinfo("i8").min), high), dtype=like.dtype)


def _read_state(path: Path, round_number: int) -> RoundState:
    try:
        found: Any = parse_json(path.read_bytes())
        state = RoundState(**{name: found[name] for name in RoundState.__dataclass_fields__})
    except FileNotFoundError:
        raise TensorFileError(f"{path.parent.name}/{path.name}: the file is missing") from None
    except (DecodeError, KeyError, TypeError) as error:
        raise TensorFileError(f"{path.parent.name}/{path.name}: the file is malformed: {error!r}") from None
    if state.round != round_number:
        raise TensorFileError(
            f"{path.parent.name}/{path.name}: it is of round {quote(state.round)}, expected round {round_number}"
        )
    return state
