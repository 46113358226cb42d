"""The GPUs of this machine, by NVIDIA's management library (NVML): what `detection` offers and `usage` measures.

NVML comes with the driver; where there is none, there are no GPUs. Its indices go by PCI bus, which is why a job's
processes get `CUDA_DEVICE_ORDER=PCI_BUS_ID` beside the devices of their lease.
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
    """One GPU, now."""

    index: int
    memory: int
    """Bytes in all."""
    used: int
    """Bytes in use, by whomever."""
    utilization: float | None
    """Share of the last moments in which it computed, 0 to 1; none where the driver does not tell."""


def read_gpus() -> tuple[Gpu, ...]:
    """Every GPU that the driver shows; none without a driver. Takes up to a second: not for the event loop."""
    try:
        with _library():
            return tuple(_read(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError_LibraryNotFound:
        return ()
    except pynvml.NVMLError as error:
        _log.warning("the GPUs of this machine cannot be read: NVML says %s", error)
        return ()


@contextmanager
def _library() -> Iterator[None]:
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
    except pynvml.NVMLError_NotSupported:  # a slice of a GPU, say
        utilization = None
    return Gpu(index, int(memory.total), int(memory.used), utilization)
