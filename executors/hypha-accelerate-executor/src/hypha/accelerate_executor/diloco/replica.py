"""This worker's weights and the global weights of the last outer step.

Built by `training_setup`. `diloco.loop` calls it for the pseudo-gradient `theta_local - theta_global` at the end of a
round and to merge the outer update. (The sign is opposite to the paper's: the parameter server adds outer updates.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hypha.accelerate_executor.distributed.process_group import SingleProcess
from hypha.accelerate_executor.distributed.state_dict import Weights, WholeWeights
from hypha.accelerate_executor.errors import ModelError
from hypha.accelerate_executor.modeling.weight_mapping import WeightMapping
from hypha_proto.errors import TensorFileError
from hypha_proto.safetensors_io import (
    FLOAT_DTYPES,
    Float32Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    from_float,
    to_float32,
)
from hypha_proto.update_file import UpdateMetadata, encode_aliases, open_update, write_update
from hypha_proto.weights_digest import digest_weights


class Replica:
    """The exchanged tensors of a module and their global values.

    They are exchanged as the model's files have them; see `modeling.weight_mapping`.

    Attributes:
        members: the module's own exchanged tensors by their names in the module.
        names: names of all exchanged tensors in the files.
        mapping: how the files hold them.
    """

    def __init__(self, module: torch.nn.Module, model_dir: Path, keep: bool = True) -> None:
        """Take the module's current values as the global ones.

        Args:
            module: loaded from `model_dir`, in float32.
            model_dir: directory whose files give the tensor names.
            keep: whether to keep a copy of the global values; followers need none.

        Raises:
            ModelError: a trained tensor is missing in the files.
        """
        self.mapping = WeightMapping(module, model_dir)
        self.members = self.mapping.members
        self.names = self.mapping.tensors.keys()
        local = self.mapping.to_files(self.members) if keep else ()
        self._global = {name: values.clone() for name, values in local}
        self._weights: Weights = WholeWeights(self.members, SingleProcess())

    def attach_weights(self, weights: Weights) -> None:
        """Access the module through `weights` from now on, after it was placed on its device."""
        self._weights = weights

    def write_update(self, path: Path, round_number: int, samples: int) -> None:
        """Write the pseudo-gradient `theta_local - theta_global` as an update file.

        Args:
            path: file to write.
            round_number: number of the round.
            samples: samples trained on in the round.

        Raises:
            TensorFileError, OSError: the file cannot be written.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self._global.items()}
        metadata = UpdateMetadata(
            round=round_number,
            samples=samples,
            statistics=self.mapping.statistics,
            integers=frozenset(name for name, value in self._global.items() if not value.is_floating_point()),
            aliases=self.mapping.aliases,
        )
        write_update(path, shapes, self._differences(), metadata)

    def merge(self, path: Path) -> None:
        """Add an outer update to the global values and set the module to them.

        Raises:
            ModelError: see `add`; nothing has changed then.
        """
        self.add(path)
        self.load_global()

    def add(self, path: Path) -> None:
        """Add an outer update to the global values; the module keeps its own until `load_global`.

        Raises:
            ModelError: the file is malformed, does not have exactly the exchanged tensors, or contains NaN or infinity;
                nothing has changed then.
        """
        try:
            file, _ = open_update(path)
        except TensorFileError as error:
            raise ModelError(f"outer update {error}") from None
        with file:
            self._check(file, "outer update")
            for name in self._global:
                self._add(name, torch.from_numpy(file.tensor(name)))

    def replace(self, path: Path) -> None:
        """Replace the global values by those of a file; the module keeps its own until `load_global`.

        Args:
            path: a safetensors file of exactly the exchanged tensors, floats as float32 and counts as int64.

        Raises:
            ModelError: it is not, or it contains NaN or infinity; nothing has changed then.
        """
        try:
            with TensorFile(path) as file:
                self._check(file, "weights")
                self._check_dtypes(file)
                for name, agreed in self._global.items():
                    agreed.copy_(torch.from_numpy(file.stored(name).copy()))
        except TensorFileError as error:
            raise ModelError(f"weights {error}") from None

    def take(self, other: Replica) -> None:
        """Replace the global values by those of another replica of the same model; see `replace`."""
        for name, agreed in self._global.items():
            agreed.copy_(other._global[name])

    def load_global(self) -> None:
        """Set the module, in all processes, to the global values."""
        self._weights.load(self.mapping.to_module(self._global))

    def write_weights(self, path: Path) -> None:
        """Write the global values as the scheduler keeps them after a round (`hypha_proto.global_model`).

        Raises:
            OSError: the file cannot be written.
        """
        stored = {name: value.numpy() for name, value in self._global.items()}
        infos = {
            name: TensorInfo("F32" if value.dtype.kind == "f" else "I64", value.shape) for name, value in stored.items()
        }
        with TensorFileWriter(path, infos, {"aliases": encode_aliases(self.mapping.aliases)}) as writer:
            for name, value in stored.items():
                writer.write_stored(name, value)

    def delivered(self) -> dict[str, torch.Tensor]:
        """Return the global values by their names in the module, rounded to the dtypes of the files."""
        rounded = {name: _round(value, self.mapping.tensors[name].info) for name, value in self._global.items()}
        return self.mapping.to_module(rounded)

    def find_differing(self, module: torch.nn.Module) -> list[str]:
        """Return the names of a module's tensors that are not the global values in the dtypes of the files."""
        state = module.state_dict()
        return [
            name
            for member, value in self.delivered().items()
            for name in self.mapping.names[member]
            if name not in state or not torch.equal(state[name].to("cpu"), value.to(state[name].dtype))
        ]

    def digest(self) -> str:
        """Return the digest of the global values (`hypha_proto.weights_digest`)."""
        return digest_weights((name, tensor.numpy()) for name, tensor in self._global.items())

    def _differences(self) -> Iterator[tuple[str, Float32Array]]:
        for name, values in self.mapping.to_files(self._weights.gather()):
            yield name, (values - self._global[name]).to(torch.float32).numpy()

    def _check(self, file: TensorFile, what: str) -> None:
        if file.tensors.keys() != self._global.keys():
            odd = sorted(file.tensors.keys() ^ self._global.keys())
            fault = "names the unknown tensor" if odd[0] in file.tensors else "lacks the tensor"
            raise ModelError(f"{what} {file.path.name} {fault} {odd[0]!r} ({len(odd)} in total)")
        for name, info in file.tensors.items():
            shape = tuple(self._global[name].shape)
            if info.shape != shape:
                raise ModelError(f"{what} {file.path.name}: {name!r} has shape {info.shape}, the model's is {shape}")
            if not all(np.isfinite(block).all() for block in file.blocks(name)):
                raise ModelError(f"{what} {file.path.name}: {name!r} contains NaN or infinity")

    def _check_dtypes(self, file: TensorFile) -> None:
        for name, info in file.tensors.items():
            expected = "F32" if self._global[name].is_floating_point() else "I64"
            if info.dtype != expected:
                raise ModelError(f"weights {file.path.name}: {name!r} has dtype {info.dtype}, expected {expected}")

    def _add(self, name: str, update: torch.Tensor) -> None:
        agreed = self._global[name]
        if agreed.is_floating_point():
            agreed += update
        else:
            # same arithmetic as `hypha_proto.global_model`, so that the scheduler's weights stay identical
            agreed.copy_((agreed.to(torch.float64) + update.to(torch.float64)).round())


def _round(value: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Return what the files of the model hold of a value."""
    if info.dtype not in FLOAT_DTYPES:
        return value
    return torch.from_numpy(to_float32(from_float(value.numpy(), info.dtype), info.dtype))
