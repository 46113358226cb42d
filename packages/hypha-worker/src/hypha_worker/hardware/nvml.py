"""Reads the GPUs of this machine through NVIDIA's management library (NVML).

NVML comes with the driver; without it, no GPUs are found. Its indices follow the PCI bus, which is why a job's
processes get ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` with the devices of their lease. https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import pynvml

_log = logging.getLogger(__name__)

T = TypeVar("T")


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
    uuid: str | None = None
    """``GPU-`` and a UUID; None where the driver does not report it."""
    minor: int | None = None
    """Number of its device node ``/dev/nvidia<minor>``, which may differ from the index; None as above."""


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
    rates = _read_optional(pynvml.nvmlDeviceGetUtilizationRates, device)  # no partition of a GPU (MIG) has them
    return Gpu(
        index,
        int(memory.total),
        int(memory.used),
        None if rates is None else rates.gpu / 100,
        _read_optional(pynvml.nvmlDeviceGetUUID, device),
        _read_optional(pynvml.nvmlDeviceGetMinorNumber, device),
    )


def _read_optional(read: Callable[[object], T], device: object) -> T | None:
    """Return what the driver reports about a device, or None if it does not report that."""
    try:
        return read(device)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
