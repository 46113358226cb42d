"""Several processes of one executor, started by `accelerate launch`: one leader and its followers.

Only the leader (rank 0) uses the bridge and has batches; it sends every process commands with its part of the batch. A
follower executes commands until the shutdown. Commands travel between processes of one machine and
one owner, by torch.distributed's gloo backend, separately from the gradient exchange of the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from hypha.accelerate_executor.errors import ProcessGroupError, reason_of

if TYPE_CHECKING:
    from hypha.accelerate_executor.data.microbatches import MicroBatch
    from hypha.accelerate_executor.options import ModelFiles

_SLACK: Final = 600.0
"""Seconds that a follower waits for its leader beyond the leader's own longest wait."""

_CONNECTION: Final = re.compile(r"gloo|nccl|Connection (reset|closed)|Broken pipe|ProcessGroup|rank \d", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load the model from its files."""

    files: ModelFiles


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Seed the random generators and set the learning-rate schedule for a round."""

    round: int
    """Number of the round, from 1."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Discard what the process keeps from round to round beside the weights, because it begins anew."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Train on a part of a batch."""

    micro_batches: Sequence[MicroBatch]


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Gather the shards of the weights in the leader."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load the leader's weights."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Exit: the job is over."""


Command = LoadModel | BeginRound | Reset | Compute | GatherWeights | LoadWeights | Shutdown


class SingleProcess:
    """A single process without followers."""

    size = 1
    """Number of processes."""
    leads = True
    """Whether this process is the leader, which uses the bridge."""

    def scatter_commands(self, commands: Sequence[Command]) -> Command:
        """Return the only command."""
        return commands[0]

    def receive_command(self) -> Command:
        """Raise: there is no leader."""
        raise AssertionError("a single process leads")

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: there is no other process."""


class MultiProcess:
    """Several processes; created after `torch.distributed` is initialised."""

    def __init__(self, timeout: float) -> None:
        """Open a separate gloo group for commands.

        Args:
            timeout: seconds that the leader may take between two commands.
        """
        self.size = dist.get_world_size()
        self._rank = dist.get_rank()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + _SLACK))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self._rank == 0

    def scatter_commands(self, commands: Sequence[Command]) -> Command:
        """Send each process its command (leader only); return the leader's own.

        Raises:
            ProcessGroupError: another process has exited.
        """
        return self._scatter(list(commands))

    def receive_command(self) -> Command:
        """Wait for the leader's next command (followers only).

        Raises:
            ProcessGroupError: the leader has exited or timed out.
        """
        return self._scatter(None)

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the leader's tensors to all processes, in place, one after the other through CPU memory.

        Every process calls it with the same names.

        Raises:
            ProcessGroupError: another process has exited.
        """
        with translate_lost_process(always=True), torch.no_grad():
            for tensor in tensors.values():
                copy = tensor.detach().to("cpu", copy=True).contiguous()
                dist.broadcast(copy, src=0, group=self._group)
                if not self.leads:
                    tensor.copy_(copy)

    def _scatter(self, commands: list[Command] | None) -> Command:
        received: list[Command | None] = [None]
        with translate_lost_process(always=True):
            dist.scatter_object_list(received, commands, src=0, group=self._group)
        [order] = received
        assert order is not None
        return order


ProcessGroup = SingleProcess | MultiProcess
"""The processes that compute for one job."""


def join_process_group(timeout: float) -> ProcessGroup:
    """Return the group of this process; call after `accelerator.choose_device` has initialised the others."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return MultiProcess(timeout) if several else SingleProcess()


@contextmanager
def translate_lost_process(always: bool = False) -> Iterator[None]:
    """Translate failures caused by a lost process to one clear error.

    Args:
        always: whether every failure inside means a lost process; otherwise only those whose text mentions connections.

    Raises:
        ProcessGroupError: another process was lost.
    """
    try:
        yield
    except RuntimeError as error:
        text = reason_of(error)
        if not always and _CONNECTION.search(text) is None:
            raise
        raise ProcessGroupError(
            f"another process of this executor has ended; its own last line says why ({text})"
        ) from None
