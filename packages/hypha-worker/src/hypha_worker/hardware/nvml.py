"""Reads the GPUs of this machine through NVIDIA's management library (NVML).

Called by `detection` and `usage`. NVML comes with the driver; without it, no GPUs are found. Its indices follow the PCI
bus, which is why a job's processes get ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` with the devices of their lease.
https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pynvml

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its current use."""

    index: int
    memory: int
    """Bytes in total."""
    used: int
    """Bytes in use, by all processes."""
    utilization: float | None
    """Share of recent time in which it computed, 0 to 1; None where the driver does not report it."""


def read_gpus() -> tuple[Gpu, ...]:
    """Return every GPU that the driver reports. Takes up to a second: call it in a thread."""
    try:
        with _open_nvml():
            return tuple(_read(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError_LibraryNotFound:
        return ()
    except pynvml.NVMLError as error:
        _log.warning("the GPUs of this machine cannot be read: NVML says %s", error)
        return ()


@contextmanager
def _open_nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    try:
        utilization = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
    except pynvml.NVMLError_NotSupported:  # such as a partition of a GPU (MIG)
        utilization = None
    return Gpu(index, int(memory.total), int(memory.used), utilization)
