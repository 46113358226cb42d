"""Maps the tensors in a model's files to those of the loaded module, and back.

They may have other names and shapes: transformers renames, splits and fuses tensors when it loads them (the experts of
a mixture, for example), and tied weights may be in the files under each of their names. What the library does is found
by loading: the files' elements are replaced by their numbers, a second module is loaded from them, and each of its
elements tells where it came from. Where names and shapes agree and the library converts nothing, that is left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hypha.accelerate_executor.errors import ModelError
from hypha.accelerate_executor.modeling.hf import dtype_argument
from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import weights_of
from hypha_proto.safetensors_io import FLOAT_DTYPES, TensorFile, TensorInfo

STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Name suffixes of running statistics: averaged over workers (counts: those of one), then added without momentum."""
_ALL: Final = slice(None)
_MAX_ELEMENTS: Final = 1 << 31
"""Numbers of a tensor's elements have to fit into 32 bits."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Elements of one tensor of the files that are in the same tensor of the module."""

    member: str
    """Name of the tensor in the module."""
    own: torch.Tensor | slice
    """Positions in it, flattened."""
    stored: torch.Tensor | slice
    """Positions in the tensor of the files, flattened."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the files."""

    info: TensorInfo
    parts: tuple[TensorPart, ...]


class WeightMapping:
    """Which tensors of a module are exchanged, and how the files hold them.

    Attributes:
        members: exchanged tensors by their names in the module: trained parameters, tied ones once, then those
            running statistics that the files hold.
        names: all names in the module of each of `members`.
        tensors: exchanged tensors by their names in the files.
        statistics: those of `tensors` that are running statistics.
        aliases: further names that the files have for a tensor -> its name in `tensors`.
    """

    def __init__(self, module: torch.nn.Module, model_dir: Path) -> None:
        """Compare the headers of the files with the module that was loaded from them.

        Raises:
            ModelError: the files lack a trained tensor, or have it in another shape.
        """
        infos = read_headers(model_dir)
        names = _names_by_tensor(module)
        members = {known[0]: tensor for tensor, known in names.items()}
        self.names = {known[0]: known for known in names.values()}
        found = None if getattr(module, "_weight_conversions", None) else _find_equal(members, self.names, infos)
        if found is None:
            found = _find_by_loading(module, infos, members, self.names)
        self.tensors, self.aliases = found
        used = {part.member for stored in self.tensors.values() for part in stored.parts}
        self.members = {name: tensor for name, tensor in members.items() if name in used}
        self.statistics = frozenset(
            name for name, stored in self.tensors.items() if stored.parts[0].member.endswith(STATISTICS)
        )

    def to_files(self, members: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of each tensor as in the files, on the CPU; they may share memory with `members`.

        Args:
            members: the module's tensors by their names in the module.
        """
        kept: dict[str, torch.Tensor] = {}  # each expert is a part of the same tensor

        def values_of(part: TensorPart) -> torch.Tensor:
            if isinstance(part.own, slice):
                return members[part.member].detach().to("cpu").reshape(-1)
            if part.member not in kept:
                kept[part.member] = members[part.member].detach().to("cpu").reshape(-1)
            return kept[part.member][part.own]

        for name, stored in self.tensors.items():
            values = values_of(stored.parts[0])
            if len(stored.parts) > 1:
                values = values.new_empty(math.prod(stored.info.shape))
                for part in stored.parts:
                    values[part.stored] = values_of(part)
            yield name, values.reshape(stored.info.shape)

    def to_module(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by their names in the module; they may share memory with `tensors`.

        Args:
            tensors: those of the files by their names there.
        """
        found: dict[str, torch.Tensor] = {}
        for name, stored in self.tensors.items():
            values = tensors[name].reshape(-1)
            for part in stored.parts:
                shape = self.members[part.member].shape
                if isinstance(part.own, slice):
                    found[part.member] = values.reshape(shape)
                    continue
                if part.member not in found:
                    found[part.member] = torch.empty(shape, dtype=values.dtype)
                found[part.member].reshape(-1)[part.own] = values[part.stored]
        return found


def read_headers(model_dir: Path) -> dict[str, TensorInfo]:
    """Return dtype and shape of every tensor in a model's files.

    Raises:
        ModelError: a file is malformed.
    """
    infos: dict[str, TensorInfo] = {}
    try:
        for path in weights_of(model_dir):
            with TensorFile(path) as file:
                infos |= file.tensors
    except TensorFileError as error:
        raise ModelError(f"model {error}") from None
    return infos


def _names_by_tensor(module: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return all names of each trained parameter, then of each running statistic that is saved with the model."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    saved = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in saved and name.endswith(STATISTICS):
            names.setdefault(buffer, []).append(name)
    return names


_Found = tuple[dict[str, FileTensor], dict[str, str]]


def _find_equal(
    members: Mapping[str, torch.Tensor], names: Mapping[str, list[str]], infos: Mapping[str, TensorInfo]
) -> _Found | None:
    """Return the mapping if every tensor is in the files under a name and in the shape that the module has."""
    tensors: dict[str, FileTensor] = {}
    aliases: dict[str, str] = {}
    for member, tensor in members.items():
        shape = tuple(tensor.shape)
        present = [name for name in names[member] if name in infos and infos[name].shape == shape]
        if not present and isinstance(tensor, torch.nn.Parameter):
            return None
        if not present:
            continue
        tensors[present[0]] = FileTensor(infos[present[0]], (TensorPart(member, _ALL, _ALL),))
        aliases |= dict.fromkeys(present[1:], present[0])
    return tensors, aliases


def _find_by_loading(
    module: Any, infos: Mapping[str, TensorInfo], members: Mapping[str, torch.Tensor], names: Mapping[str, list[str]]
) -> _Found:
    """Return the mapping that loading numbered elements shows.

    Raises:
        ModelError: a trained tensor does not come from the files element by element.
    """
    order = list(infos)
    if not hasattr(module, "config") or max(info.elements for info in infos.values()) > _MAX_ELEMENTS:
        raise _not_found(next(iter(members)), infos)
    tensor_of, place_of = _load_numbers(module, infos, places=False), _load_numbers(module, infos, places=True)
    parts: dict[str, list[TensorPart]] = {}
    aliases: dict[str, str] = {}
    for member, tensor in members.items():
        numbers = tensor_of[member]
        for number in np.unique(numbers.numpy()).tolist():
            if not 0 < number <= len(order):
                if isinstance(tensor, torch.nn.Parameter):
                    raise _not_found(member, infos)
                continue
            own = (numbers == number).nonzero().squeeze(1)
            parts.setdefault(order[number - 1], []).append(TensorPart(member, own, place_of[member][own]))
        for alias in names[member][1:]:
            if not torch.equal(tensor_of[alias], numbers):
                aliases |= _alias(alias, order, tensor_of[alias], numbers)
    return {name: _stored(name, infos[name], found, members) for name, found in parts.items()}, aliases


def _load_numbers(module: Any, infos: Mapping[str, TensorInfo], *, places: bool) -> dict[str, torch.Tensor]:
    """Load numbers instead of weights; return those of each tensor of the module, flattened.

    Args:
        module: another of its class is loaded.
        infos: tensors of the files.
        places: whether elements are numbered in their tensor, from 0; otherwise each has the number of its tensor,
            from 1: new buffers are 0.
    """
    state: dict[str, torch.Tensor] = {}
    for number, (name, info) in enumerate(infos.items(), 1):
        values = torch.arange(info.elements) if places else torch.tensor([number])
        if info.dtype in FLOAT_DTYPES:  # moved without change, as bits of a float
            values = values.to(torch.int32).view(torch.float32)
        state[name] = values.expand(info.elements).reshape(info.shape)
    loaded = type(module).from_pretrained(
        None, config=copy.deepcopy(module.config), state_dict=state, **dtype_argument(torch.float32)
    )
    return {
        name: (value.view(torch.int32) if value.is_floating_point() else value).reshape(-1).to(torch.int64)
        for name, value in loaded.state_dict().items()
    }


def _stored(name: str, info: TensorInfo, parts: list[TensorPart], members: Mapping[str, torch.Tensor]) -> FileTensor:
    """Return how the module holds a tensor of the files; each of its elements must be there once."""
    places = torch.cat([part.stored for part in parts if isinstance(part.stored, torch.Tensor)])
    if len(places) != info.elements or not torch.equal(places.sort()[0], torch.arange(info.elements)):
        raise ModelError(
            f"the model's files hold {name!r}, of which some elements are not trained, or are in the model twice; "
            "such a model is not supported"
        )
    if len(parts) > 1:
        return FileTensor(info, tuple(parts))
    [part] = parts
    assert isinstance(part.own, torch.Tensor)
    own = part.own[places.argsort()]
    whole = torch.equal(own, torch.arange(members[part.member].numel()))
    return FileTensor(info, (TensorPart(part.member, _ALL if whole else own, _ALL),))


def _alias(alias: str, order: list[str], numbers: torch.Tensor, known: torch.Tensor) -> dict[str, str]:
    """Return the other name that the files have for a tied tensor."""
    pairs = np.unique(torch.stack([numbers, known]).numpy(), axis=1).T.tolist()
    if len(pairs) > 1:
        raise ModelError(f"the model's files hold the tied tensor {alias!r} in several parts, which is not supported")
    [(other, number)] = pairs
    return {order[other - 1]: order[number - 1]}


def _not_found(member: str, infos: Mapping[str, TensorInfo]) -> ModelError:
    return ModelError(
        f"the model's files hold no tensor {member!r}, but for example {next(iter(infos))!r}; load the model "
        "with from_pretrained and save it with save_pretrained of this transformers"
    )
