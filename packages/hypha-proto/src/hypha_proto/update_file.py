"""Update files: a worker's pseudo-gradient, or the outer update computed from them; needs the extra `update`.

An update file is a safetensors file (`hypha_proto.safetensors_io`) with one tensor per parameter, named and shaped as
in the model's own files, and metadata. In DiLoCo (arXiv:2311.08105) an executor writes `theta_local - theta_global`;
the parameter server averages these files and writes the change to add to `theta_global`; executors and the scheduler
add it to their copies of the model. Imports numpy, so only programs that work with tensors import this module.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import weights_of
from hypha_proto.safetensors_io import (
    BLOCK,
    FLOAT_DTYPES,
    Array,
    Float32Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    to_float32,
)
from hypha_proto.texts import quote

CODEC_FP32: Final = "fp32"
"""The only codec so far: uncompressed float32."""
_COUNT_LIMIT: Final = 1 << 63
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpdateMetadata:
    """Metadata of an update file, stored as text in the safetensors header."""

    round: int | None = None
    """Number of the round, from 1; None if the writer did not state it."""
    samples: int | None = None
    """Number of samples behind the update, its weight in the mean; None if the writer did not state it."""
    statistics: frozenset[str] = frozenset()
    """Names of the tensors that are running statistics, which are averaged and added without momentum."""
    integers: frozenset[str] = frozenset()
    """Names of the statistics that are integers in the model, such as counts: taken from one member, not averaged."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names that the model's files have for a tensor of the update, such as those of tied weights."""

    def encode(self) -> dict[str, str]:
        """Return the metadata as the header's `__metadata__`."""
        texts = {"codec": CODEC_FP32, "statistics": json.dumps(sorted(self.statistics))}
        if self.integers:
            texts["integers"] = json.dumps(sorted(self.integers))
        if self.aliases:
            texts["aliases"] = encode_aliases(self.aliases)
        if self.round is not None:
            texts["round"] = str(self.round)
        if self.samples is not None:
            texts["samples"] = str(self.samples)
        return texts

    @classmethod
    def decode(cls, texts: Mapping[str, str]) -> UpdateMetadata:
        """Parse a header's `__metadata__`; missing keys get their defaults, since other implementations write none.

        Raises:
            TensorFileError: a key of this class has a malformed value.
        """
        codec = texts.get("codec", CODEC_FP32)
        if codec != CODEC_FP32:
            raise TensorFileError(f"metadata codec: {quote(codec)} is unknown; expected {CODEC_FP32!r}")
        statistics, integers = _decode_names(texts, "statistics"), _decode_names(texts, "integers")
        if not integers <= statistics:
            raise TensorFileError(f"metadata integers: {quote(min(integers - statistics))} is not among the statistics")
        return cls(
            round=_decode_count(texts, "round"),
            samples=_decode_count(texts, "samples"),
            statistics=statistics,
            integers=integers,
            aliases=decode_aliases(texts),
        )


def _decode_count(texts: Mapping[str, str], key: str) -> int | None:
    text = texts.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < _COUNT_LIMIT):
        raise TensorFileError(f"metadata {key}: {quote(text)} is not a count")
    return int(text)


def _decode_names(texts: Mapping[str, str], key: str) -> frozenset[str]:
    return _decode_json(texts.get(key, "[]"), key, frozenset[str], "a list")


def _decode_json(text: str, key: str, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except ValueError as error:
        raise TensorFileError(f"metadata {key}: not {what} of tensor names: {error}") from None


def encode_aliases(aliases: Mapping[str, str]) -> str:
    """Return aliases as the metadata of a header has them."""
    return json.dumps(dict(sorted(aliases.items())))


def decode_aliases(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the aliases that the metadata of a header names.

    Raises:
        TensorFileError: they are malformed.
    """
    return _decode_json(texts.get("aliases", "{}"), "aliases", dict[str, str], "an object")


def open_update(path: Path) -> tuple[TensorFile, UpdateMetadata]:
    """Open an update file and parse its metadata; the caller closes the returned file.

    Raises:
        TensorFileError: the file or its metadata is malformed, `statistics` names a tensor that is not in the file, or
            `aliases` are names of something else.
        OSError: the file cannot be read.
    """
    file = TensorFile(path)
    try:
        metadata = UpdateMetadata.decode(file.metadata)
        unknown = sorted(metadata.statistics - file.tensors.keys())
        if unknown:
            raise TensorFileError(f"metadata statistics: the file holds no tensor {quote(unknown[0])}")
        for alias, name in metadata.aliases.items():
            if alias in file.tensors or name not in file.tensors:
                raise TensorFileError(f"metadata aliases: {quote(alias)} is no further name of {quote(name)}")
    except TensorFileError as error:
        file.close()
        raise TensorFileError(f"{path.name}: {error}") from None
    return file, metadata


def write_update(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Array]],
    metadata: UpdateMetadata,
) -> None:
    """Write an fp32 update file atomically, with one tensor at a time in memory.

    Args:
        path: path of the file, which is replaced if it exists.
        shapes: shape of every tensor.
        tensors: name and float32 or float64 values of each tensor, in any order.
        metadata: metadata of the file.

    Raises:
        TensorFileError: `tensors` does not match `shapes`.
        OSError: the file cannot be written.
    """
    infos = {name: TensorInfo("F32", shape) for name, shape in shapes.items()}
    with TensorFileWriter(path, infos, metadata.encode()) as writer:
        for name, values in tensors:
            writer.write(name, values)


def apply_update_to_dir(model_dir: Path, update: Path) -> None:
    """Add every tensor of an update to the tensor of the same name in the model in a directory, which may be sharded.

    Computes in float32 (in float64 for F64 and integer tensors; integers are rounded) and stores the result in the
    model's dtype. Tensors that are not in the update are copied. Needs memory for one block only. Writes all new files
    before it replaces the first old one, so an error while writing leaves the model unchanged. For the updates of many
    rounds see `global_model`: here each sum is rounded to the dtype of the model.

    Raises:
        TensorFileError: a file is malformed, or the update does not fit the model.
        OSError: a file cannot be read or written.
    """
    paths = weights_of(model_dir)
    change, metadata = open_update(update)
    with change:
        known: dict[str, TensorInfo] = {}
        for path in paths:
            with TensorFile(path) as shard:
                known |= shard.tensors
        check_fit(change, known, metadata.aliases)
        staged = {path: path.with_name(f"{path.name}.{secrets.token_hex(4)}.new") for path in paths}
        try:
            for path, new in staged.items():
                with TensorFile(path) as shard:
                    _write_sum(shard, change, metadata.aliases, new)
            for path, new in staged.items():
                os.replace(new, path)
        finally:
            for new in staged.values():
                new.unlink(missing_ok=True)


def check_fit(change: TensorFile, model: Mapping[str, TensorInfo], aliases: Mapping[str, str]) -> None:
    """Check that a model has every tensor of an update, in its shape.

    Args:
        change: the update.
        model: the model's tensors.
        aliases: of the update; see `UpdateMetadata`.

    Raises:
        TensorFileError: it does not.
    """
    named = {alias: change.tensors[name] for alias, name in aliases.items()}
    for name, info in (change.tensors | named).items():
        if name not in model:
            raise TensorFileError(f"{change.path.name}: the model has no tensor {quote(name)}")
        if model[name].shape != info.shape:
            raise TensorFileError(
                f"{change.path.name}: {quote(name)} has shape {list(info.shape)}, "
                f"the model's is {list(model[name].shape)}"
            )


def _write_sum(model: TensorFile, change: TensorFile, aliases: Mapping[str, str], path: Path) -> None:
    with TensorFileWriter(path, model.tensors, model.metadata) as writer:
        for name, info in model.tensors.items():
            known = aliases.get(name, name)
            if known not in change.tensors:
                writer.write_stored(name, model.stored(name))
                continue
            flat = model.stored(name).reshape(-1)
            for number, block in enumerate(change.blocks(known)):
                writer.write(name, _add(flat[number * BLOCK : number * BLOCK + block.size], info.dtype, block))


def _add(stored: Array, dtype: str, block: Float32Array) -> Array:
    if dtype in FLOAT_DTYPES and dtype != "F64":
        return to_float32(stored, dtype) + block
    return stored.astype(np.float64) + block
