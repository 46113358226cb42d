"""Detects the resources for ``hypha-worker init``: cores, memory, free disk space, and GPUs.

In a container these are what its quotas allow, not all of the machine.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from hypha_proto.resources import GIGABYTE
from hypha_worker.hardware.control_groups import cpu_quota, memory_quota
from hypha_worker.hardware.nvml import read_gpus


@dataclass(frozen=True, slots=True)
class DetectedResources:
    """Resources of this machine; memory and storage in GB."""

    cpu: float
    memory: float
    storage: float
    devices: tuple[tuple[int, float], ...]
    """Index and memory (GB) of each GPU."""


def detect(work_dir: Path) -> DetectedResources:
    """Detect the resources; storage is that of the disk with `work_dir`, which need not exist."""
    return DetectedResources(
        cpu=_cores(),
        memory=_to_gigabytes(min(psutil.virtual_memory().total, memory_quota())),
        storage=_to_gigabytes(free_bytes(work_dir)),
        devices=tuple((gpu.index, _to_gigabytes(gpu.memory)) for gpu in read_gpus()),
    )


def _cores() -> float:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return round(min(usable, cpu_quota()), 2)


def _to_gigabytes(size: float) -> float:
    return int(size / GIGABYTE * 10) / 10


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk with a folder, which need not exist."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
