"""Several processes of one executor, started by `accelerate launch`: the first leads, the others follow.

Only the leader (rank 0) talks to the bridge and has batches; it hands every process its part and says what comes next.
A follower knows no rounds: it does what it hears until it hears that the job is over. Orders go over processes of one
machine and one owner, by torch.distributed's gloo, beside what the device itself exchanges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

import torch
import torch.distributed as dist

from hypha.accelerate_executor.errors import TeamBroken

if TYPE_CHECKING:
    from hypha.accelerate_executor.data.microbatches import MicroBatch
    from hypha.accelerate_executor.options import ModelFiles

_SLACK: Final = 600.0
"""Seconds a follower waits longer for its leader than the leader itself waits for anyone."""

_CONNECTION: Final = re.compile(r"gloo|nccl|Connection (reset|closed)|Broken pipe|ProcessGroup|rank \d", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The model's files have come."""

    files: ModelFiles


@dataclass(frozen=True, slots=True)
class Compute:
    """A part of a batch to train on."""

    pieces: Sequence[MicroBatch]


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Bring this process's shards of the weights together with the others'."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Take the leader's weights."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The job is over."""


Command = LoadModel | Compute | GatherWeights | LoadWeights | Shutdown


class ProcessGroup(Protocol):
    """The processes that compute for one job, as each of them sees it."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this is the one that talks to the bridge."""
        ...

    def order(self, orders: Sequence[Command]) -> Command:
        """Give each process its order (the leader's business); returns the leader's own."""
        ...

    def hear(self) -> Command:
        """Wait for the next order (a follower's business)."""
        ...

    def spread(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make tensors those of the leader, in place; every process calls it with the same names."""
        ...


class SingleProcess:
    """One process, which leads nobody."""

    size = 1
    leads = True

    def order(self, orders: Sequence[Command]) -> Command:
        """Give back the one order."""
        return orders[0]

    def hear(self) -> Command:
        """There is no leader to hear."""
        raise AssertionError("a single process leads")

    def spread(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """There is nobody else."""


class MultiProcess:
    """Several processes; made when `torch.distributed` has been started."""

    def __init__(self, timeout: float) -> None:
        """Open a channel of its own for orders.

        Args:
            timeout: seconds that the leader may be busy with the bridge between two orders.
        """
        self.size = dist.get_world_size()
        self._rank = dist.get_rank()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + _SLACK))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def order(self, orders: Sequence[Command]) -> Command:
        """Send each process its order.

        Raises:
            TeamBroken: another process has ended.
        """
        return self._scatter(list(orders))

    def hear(self) -> Command:
        """Wait for the leader's next order.

        Raises:
            TeamBroken: the leader has ended, or says nothing for too long.
        """
        return self._scatter(None)

    def spread(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast, one tensor after the other over the processors' memory.

        Raises:
            TeamBroken: another process has ended.
        """
        with lost_team(always=True), torch.no_grad():
            for tensor in tensors.values():
                copy = tensor.detach().to("cpu", copy=True).contiguous()
                dist.broadcast(copy, src=0, group=self._group)
                if not self.leads:
                    tensor.copy_(copy)

    def _scatter(self, orders: list[Command] | None) -> Command:
        received: list[Command | None] = [None]
        with lost_team(always=True):
            dist.scatter_object_list(received, orders, src=0, group=self._group)
        [order] = received
        assert order is not None
        return order


def form_team(timeout: float) -> ProcessGroup:
    """Give the team that this process belongs to, when `device.choose_device` has found the others."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return MultiProcess(timeout) if several else SingleProcess()


@contextmanager
def lost_team(always: bool = False) -> Iterator[None]:
    """Say in one line that another process has gone, in place of what its absence broke here.

    Args:
        always: whether any failure within means that; else only those whose text speaks of connections.

    Raises:
        TeamBroken: that is what happened.
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        if not always and _CONNECTION.search(text) is None:
            raise
        raise TeamBroken(f"another process of this executor has ended; its own last line says why ({text})") from None
