"""What this worker has: its resources, the devices among them, and the executors its owner configured. Pure.

`config` says what there is (or `detection` finds it for ``init``); `offers` asks here whether a request fits into what
is free, and `leases` takes what fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources

_SLACK = 1e-9


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One GPU."""

    index: int
    """Its number as the driver counts, which is what a job's visible devices name."""
    memory: float
    """GB."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A part of a machine that one lease holds."""

    resources: Resources
    devices: tuple[Device, ...] = ()
    """Whole devices; their memory is `resources.gpu`. Empty on a machine that lists none."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """A machine, or what is free of it: four amounts, and the devices that the GPU memory consists of.

    Without devices GPU memory is an amount like the others. With devices a lease is of whole ones.
    """

    resources: Resources
    devices: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        if self.devices:
            memory = sum(device.memory for device in self.devices)
            object.__setattr__(self, "resources", _with_gpu(self.resources, memory))

    def fit(self, wanted: Resources) -> Allocation | None:
        """The part that covers `wanted` with as little to spare as can be, or none if it does not fit."""
        if self.resources.lacking(wanted):
            return None
        if not self.devices:
            return Allocation(wanted)
        chosen = _choose_devices(self.devices, wanted.gpu)
        return Allocation(_with_gpu(wanted, sum(device.memory for device in chosen)), chosen)

    def whole(self) -> Allocation:
        """All of it."""
        return Allocation(self.resources, self.devices)

    def without(self, taken: Iterable[Allocation]) -> Capacity:
        """What is left when `taken` is taken."""
        left, gone = self.resources, set[Device]()
        for allocation in taken:
            left -= allocation.resources
            gone.update(allocation.devices)
        devices = tuple(device for device in self.devices if device not in gone)
        return Capacity(left if devices or not self.devices else _with_gpu(left, 0.0), devices)


def _with_gpu(resources: Resources, gpu: float) -> Resources:
    return Resources(gpu=gpu, cpu=resources.cpu, storage=resources.storage, memory=resources.memory)


def _choose_devices(devices: Sequence[Device], memory: float) -> tuple[Device, ...]:
    """The smallest single device that has `memory` GB, else the largest ones until they have it together."""
    if memory <= _SLACK:
        return ()
    for device in sorted(devices, key=lambda device: (device.memory, device.index)):
        if device.memory + _SLACK >= memory:
            return (device,)
    chosen: list[Device] = []
    for device in sorted(devices, key=lambda device: (-device.memory, device.index)):
        chosen.append(device)
        if sum(taken.memory for taken in chosen) + _SLACK >= memory:
            break
    return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """All that a worker can be asked for."""

    capacity: Capacity
    executors: frozenset[ExecutorDescriptor] = field(default_factory=frozenset)

    def missing_executors(self, wanted: Sequence[ExecutorDescriptor]) -> tuple[ExecutorDescriptor, ...]:
        """Those of `wanted` that are not configured here."""
        return tuple(executor for executor in wanted if executor not in self.executors)


def executor_text(executor: ExecutorDescriptor) -> str:
    """``train/diloco-transformer``, for people."""
    return f"{executor.__struct_config__.tag}/{executor.name[:80]}"
