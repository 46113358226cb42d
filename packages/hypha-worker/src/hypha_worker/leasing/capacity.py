"""The capacity of a worker: its resources, its GPUs, and the executors that its owner configured.

Pure. Built by `config` from the configuration (which ``init`` fills in from `hardware.detection`); `service` adds what
`hardware.devices` finds when the worker starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import asdict

from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources

_SLACK = 1e-9


@dataclass(frozen=True, slots=True, order=True)
class GpuCapacity:
    """One GPU."""

    index: int
    """Its number in the driver's order, which a job's visible devices refer to."""
    memory: float
    """GB."""
    uuid: str | None = field(default=None, compare=False)
    """NVIDIA's identifier, such as ``GPU-8932f937-d72c-4106-c12f-20bd9faed9f6``; None if the driver gives none."""
    minor: int | None = field(default=None, compare=False)
    """Number of its device node ``/dev/nvidia<minor>``; None if the driver gives none."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The part of a machine that one lease holds."""

    resources: Resources
    devices: tuple[GpuCapacity, ...] = ()
    """Whole devices; their memory is `resources.gpu`. Empty on a machine that lists none."""

    @property
    def visible_devices(self) -> tuple[GpuCapacity, ...] | None:
        """The GPUs that the lease's job may use; None: all of the machine, whose devices are not known one by one."""
        return None if self.resources.gpu > _SLACK and not self.devices else self.devices


@dataclass(frozen=True, slots=True)
class Capacity:
    """A machine, or what is free of it: four amounts, and the devices that provide the GPU memory.

    With devices, a lease gets whole ones. Without, the GPU memory goes to one lease at a time, whose job may use every
    GPU of the machine.
    """

    resources: Resources
    devices: tuple[GpuCapacity, ...] = ()
    largest_gpu: float = math.inf
    """GB of the largest GPU, if that is known although `devices` is empty."""

    def __post_init__(self) -> None:
        if self.devices:
            memory = sum(device.memory for device in self.devices)
            object.__setattr__(self, "resources", _with_gpu(self.resources, memory))

    def available(self, *, sharded: bool = False) -> Resources:
        """Return the most that one lease can have: GPU memory on a single device unless its model can be `sharded`."""
        if sharded:
            return self.resources
        largest = max((device.memory for device in self.devices), default=self.largest_gpu)
        return _with_gpu(self.resources, min(self.resources.gpu, largest))

    def fit(self, wanted: Resources, *, sharded: bool = False) -> Allocation | None:
        """Return the smallest part that covers `wanted`, or None if it does not fit.

        Args:
            wanted: amounts.
            sharded: whether the executor distributes one model over several devices.
        """
        if self.available(sharded=sharded).lacking(wanted):
            return None
        if not self.devices:
            return Allocation(_with_gpu(wanted, self.resources.gpu) if wanted.gpu > _SLACK else wanted)
        chosen = _choose_devices(self.devices, wanted.gpu)
        return Allocation(_with_gpu(wanted, sum(device.memory for device in chosen)), chosen)

    def whole(self) -> Allocation:
        """Return an allocation of everything."""
        return Allocation(self.resources, self.devices)

    def without(self, taken: Iterable[Allocation]) -> Capacity:
        """Return what is left without the allocations in `taken`."""
        left, used = self.resources, set[GpuCapacity]()
        for allocation in taken:
            left -= allocation.resources
            used.update(allocation.devices)
        devices = tuple(device for device in self.devices if device not in used)
        left = left if devices or not self.devices else _with_gpu(left, 0.0)
        return Capacity(left, devices, self.largest_gpu)


def _with_gpu(resources: Resources, gpu: float) -> Resources:
    return Resources(gpu=gpu, cpu=resources.cpu, storage=resources.storage, memory=resources.memory)


def _choose_devices(devices: Sequence[GpuCapacity], memory: float) -> tuple[GpuCapacity, ...]:
    """Return the smallest single device with `memory` GB, else the largest devices until their sum suffices."""
    if memory <= _SLACK:
        return ()
    for device in sorted(devices, key=lambda device: (device.memory, device.index)):
        if device.memory + _SLACK >= memory:
            return (device,)
    chosen: list[GpuCapacity] = []
    for device in sorted(devices, key=lambda device: (-device.memory, device.index)):
        chosen.append(device)
        if sum(taken.memory for taken in chosen) + _SLACK >= memory:
            break
    return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Everything that a worker can offer."""

    capacity: Capacity
    executors: frozenset[ExecutorDescriptor] = field(default_factory=frozenset)
    defaults: Resources = field(default_factory=Resources)
    """What a job gets of a resource that it asked none of, as far as it is free."""
    sharded: frozenset[ExecutorDescriptor] = field(default_factory=frozenset)
    """Those of `executors` that distribute one model over several GPUs."""

    def is_sharded(self, wanted: Sequence[ExecutorDescriptor]) -> bool:
        """Return whether a lease for these executors may have its GPU memory on several devices."""
        return bool(wanted) and self.sharded.issuperset(wanted)

    def with_defaults(self, wanted: Resources, free: Resources) -> Resources:
        """Return `wanted`, and the defaults of what it asks none of, as far as they are `free`."""
        amounts = {
            name: asked if (asked := getattr(wanted, name)) > _SLACK else min(default, getattr(free, name))
            for name, default in asdict(self.defaults).items()
        }
        return Resources(**amounts)

    def exhausted_defaults(self, wanted: Resources, free: Resources) -> tuple[str, ...]:
        """Return the resources of which a job would get a default, but none is `free` of what the machine has."""
        total = self.capacity.resources
        return tuple(
            name
            for name, default in asdict(self.defaults).items()
            if min(default, getattr(total, name)) > _SLACK >= max(getattr(wanted, name), getattr(free, name))
        )

    def missing_executors(self, wanted: Sequence[ExecutorDescriptor]) -> tuple[ExecutorDescriptor, ...]:
        """Return those of `wanted` that are not configured here."""
        return tuple(executor for executor in wanted if executor not in self.executors)
