"""This worker's weights and the global weights of the last outer step.

Built by `training_setup`. `diloco.loop` calls it for the pseudo-gradient `theta_local - theta_global` at the end of a
round and to merge the outer update. (The sign is opposite to the paper's: the parameter server adds outer updates.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hypha.accelerate_executor.distributed.process_group import SingleProcess
from hypha.accelerate_executor.distributed.state_dict import Weights, WholeWeights
from hypha.accelerate_executor.errors import ModelError
from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import weights_of
from hypha_proto.update_file import Float32Array, TensorFile, UpdateMetadata, open_update, write_update
from hypha_proto.weights_digest import digest_weights

STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Name suffixes of running statistics: averaged over workers (counts: those of one), then added without momentum."""


class Replica:
    """The exchanged tensors of a module and their global values.

    Attributes:
        parameters: name in the model's files -> trained parameter; tied ones once.
        statistics: name -> running statistic, float32 or an integer count.
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
        names = names_in_files(model_dir)
        self.parameters = _trained_parameters(module, names)
        self.statistics = {name: buffer for name, buffer in module.named_buffers() if _is_statistic(name, names)}
        local = self.local if keep else {}
        self._global = {name: tensor.detach().to("cpu", copy=True) for name, tensor in local.items()}
        self._weights: Weights = WholeWeights(self.local, SingleProcess())

    def attach_weights(self, weights: Weights) -> None:
        """Access the module through `weights` from now on, after it was placed on its device."""
        self._weights = weights

    @property
    def local(self) -> dict[str, torch.Tensor]:
        """Return the module's own exchanged tensors: parameters, then statistics."""
        return {**self.parameters, **self.statistics}

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all exchanged tensors."""
        return frozenset(self.local)

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
            statistics=frozenset(self.statistics),
            integers=frozenset(name for name, value in self.statistics.items() if not value.is_floating_point()),
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
        self._weights.load(self._global)

    def digest(self) -> str:
        """Return the digest of the global values (`hypha_proto.weights_digest`)."""
        return digest_weights((name, tensor.numpy()) for name, tensor in self._global.items())

    def _differences(self) -> Iterator[tuple[str, Float32Array]]:
        tensors = self._weights.gather()
        for name, agreed in self._global.items():
            difference = tensors[name].detach().to("cpu") - agreed
            yield name, difference.to(torch.float32).numpy()

    def _check(self, file: TensorFile, what: str) -> None:
        if file.tensors.keys() != self._global.keys():
            odd = sorted(file.tensors.keys() ^ self._global.keys())
            fault = "names the unknown tensor" if odd[0] in file.tensors else "lacks the tensor"
            raise ModelError(f"{what} {file.path.name} {fault} {odd[0]!r:.200} ({len(odd)} in total)")
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


def names_in_files(model_dir: Path) -> frozenset[str]:
    """Return the names of all tensors in a model's files.

    Raises:
        ModelError: a file is malformed.
    """
    names: set[str] = set()
    try:
        for path in weights_of(model_dir):
            with TensorFile(path) as file:
                names |= file.tensors.keys()
    except TensorFileError as error:
        raise ModelError(f"model {error}") from None
    return frozenset(names)


def _trained_parameters(module: torch.nn.Module, names: frozenset[str]) -> dict[str, torch.nn.Parameter]:
    """Map names in the files to trained parameters; a tied parameter has several names and is in the files once."""
    aliases: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(parameter, []).append(name)
    found: dict[str, torch.nn.Parameter] = {}
    for parameter, known in aliases.items():
        stored = next((name for name in known if name in names), None)
        if stored is None:
            raise ModelError(
                f"the model's files hold no tensor {known[0]!r}; save it once with save_pretrained of this transformers"
            )
        found[stored] = parameter
    return found


def _is_statistic(name: str, names: frozenset[str]) -> bool:
    return name.rpartition(".")[2] in STATISTICS and name in names
