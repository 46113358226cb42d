"""Computes the weights of a DiLoCo job again, from its start model and its outer updates.

As executors and the scheduler do: each sum is rounded to float32, integers are added in float64 and rounded. Reads
every file once, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import weights_of
from hypha_proto.safetensors_io import (
    FLOAT_DTYPES,
    Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    from_float,
    to_float32,
)
from hypha_proto.update_file import check_fit, open_update
from hypha_proto.weights_digest import WeightsDigest

_GROUP: Final = 64
"""Outer updates that are open at the same time."""
_BLOCK: Final = 1 << 18


def compute_weights(start_dir: Path, updates: Sequence[Path]) -> Iterator[str]:
    """Yield the digest of the start model's weights, over the tensors of the updates, and of those after each update.

    Needs room in the system's temporary directory for the weights in float32 if there are more than 64 updates, and
    for twice as much if there are more than 128.

    Args:
        start_dir: directory of the start model.
        updates: files of the outer updates, in order.

    Raises:
        TensorFileError: a file is malformed, or an update does not fit the model.
        OSError: a file cannot be read or written.
    """
    sources = weights_of(start_dir)
    with TemporaryDirectory(prefix="hypha-audit-") as scratch:
        for begin in range(0, len(updates), _GROUP):
            result = Path(scratch) / f"{begin}.safetensors"
            is_last = begin + _GROUP >= len(updates)
            digests = _add_updates(sources, updates[begin : begin + _GROUP], None if is_last else result)
            yield from digests if begin == 0 else digests[1:]
            if begin:
                sources[0].unlink()
            sources = [result]


def _add_updates(sources: Sequence[Path], updates: Sequence[Path], result: Path | None) -> list[str]:
    """Return the digests of weights before and after each of some updates; write those after the last to `result`."""
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in sources]
        changes = [stack.enter_context(open_update(path)[0]) for path in updates]
        weights = {name: file for file in files for name in file.tensors}
        _check_fit(changes, {name: file.tensors[name] for name, file in weights.items()})
        infos = {name: _wide(weights[name].tensors[name]) for name in sorted(changes[0].tensors)}
        writer = None if result is None else stack.enter_context(TensorFileWriter(result, infos))
        digests = [WeightsDigest() for _ in range(len(changes) + 1)]
        for name, info in infos.items():
            for digest in digests:
                digest.begin(name, info.shape, integers=info.dtype == "I64")
            for values in _sums(weights[name], changes, name):
                for digest, value in zip(digests, values, strict=True):
                    digest.update(value)
                if writer is not None:
                    writer.write_stored(name, values[-1])
        return [digest.digest() for digest in digests]


def _check_fit(changes: Sequence[TensorFile], known: Mapping[str, TensorInfo]) -> None:
    for change in changes:
        check_fit(change, known, {})
        if change.tensors.keys() != changes[0].tensors.keys():
            raise TensorFileError(f"{change.path.name}: it does not hold the tensors of {changes[0].path.name}")


def _wide(info: TensorInfo) -> TensorInfo:
    return TensorInfo("F32" if info.dtype in FLOAT_DTYPES else "I64", info.shape)


def _sums(source: TensorFile, changes: Sequence[TensorFile], name: str) -> Iterator[list[Array]]:
    """Yield blocks of a tensor before the updates and after each of them."""
    dtype, flat = source.tensors[name].dtype, source.stored(name).reshape(-1)
    for begin in range(0, flat.size, _BLOCK):
        stored = flat[begin : begin + _BLOCK]
        values: list[Array] = [to_float32(stored, dtype) if dtype in FLOAT_DTYPES else stored.astype("<i8")]
        for change in changes:
            [added] = change.blocks(name, _BLOCK, begin=begin, end=begin + _BLOCK)
            if dtype in FLOAT_DTYPES:
                values.append(values[-1] + added)
            else:
                values.append(from_float(values[-1].astype("<f8") + added, "I64"))
        yield values
