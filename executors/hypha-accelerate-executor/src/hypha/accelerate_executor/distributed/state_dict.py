"""Reading and setting all weights of a model, whether whole or sharded.

`diloco.replica` reads and sets weights by their names in the module. A module that is whole in each process
(one process, DDP, layers on several devices) provides its own tensors; a sharded one (FSDP) is gathered first. All
processes call these methods together; the result is used in the leader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hypha.accelerate_executor.distributed.process_group import ProcessGroup


class WholeWeights:
    """Weights of a model that is whole in every process."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], group: ProcessGroup) -> None:
        """Use the module's own tensors by their names there."""
        self._tensors = tensors
        self._group = group

    def gather(self) -> Mapping[str, torch.Tensor]:
        """Return every exchanged tensor by its name in the module: its own, equal in all processes."""
        return self._tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set every tensor of every process to the leader's; followers pass an empty mapping."""
        with torch.no_grad():
            for name, value in tensors.items():
                self._tensors[name].copy_(value)
        self._group.broadcast(self._tensors)


class ShardedWeights:
    """Weights of a model sharded by FSDP."""

    def __init__(self, module: torch.nn.Module, names: Collection[str]) -> None:
        """Use the wrapped module and the names of the exchanged tensors."""
        self._module = module
        self._names = names

    def gather(self) -> Mapping[str, torch.Tensor]:
        """Gather the shards in the leader's memory; empty in a follower."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._module, options=options)
        return {
            name: tensor for name, tensor in state.items() if name in self._names and isinstance(tensor, torch.Tensor)
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Scatter the leader's tensors into the shards."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self._module, dict(tensors), options=options)


Weights = WholeWeights | ShardedWeights
"""Access to all weights."""
