"""How the weights of a model are read and set, whichever way its processes hold them.

`replica` asks for all weights by the names of the model's files and sets them again. A module that is whole in each
process (one process, DDP, layers on several devices) gives its own tensors; one in shards (FSDP) is gathered first.
All processes call these together; what comes of it matters in the leader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hypha.accelerate_executor.distributed.process_group import ProcessGroup


class Weights(Protocol):
    """Access to all weights at once."""

    def gather(self) -> Mapping[str, torch.Tensor]:
        """Give every tensor that travels, by its name in the files; empty in a follower of a sharded model."""
        ...

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set every tensor of every process to the leader's; followers give none."""
        ...


class WholeWeights:
    """Every process holds the whole model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], team: ProcessGroup) -> None:
        """Take the module's live tensors by their names in the files."""
        self._tensors = tensors
        self._team = team

    def gather(self) -> Mapping[str, torch.Tensor]:
        """Give the live tensors: all processes have the same."""
        return self._tensors

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the given values in, then send them to the others."""
        with torch.no_grad():
            for name, value in tensors.items():
                self._tensors[name].copy_(value)
        self._team.spread(self._tensors)


class ShardedWeights:
    """Each process holds shards, as FSDP lays them."""

    def __init__(self, module: torch.nn.Module, names: frozenset[str]) -> None:
        """Take the wrapped module and the names, as the files have them, of what travels."""
        self._module = module
        self._names = names

    def gather(self) -> Mapping[str, torch.Tensor]:
        """Put the shards together in the leader's memory."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._module, options=options)
        return {
            name: tensor for name, tensor in state.items() if name in self._names and isinstance(tensor, torch.Tensor)
        }

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Cut the leader's tensors into shards."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self._module, dict(tensors), options=options)
