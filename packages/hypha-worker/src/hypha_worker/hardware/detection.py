"""What this machine has, for ``hypha-worker init``: cores, memory, free disk, and GPUs."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from hypha_worker.hardware.nvml import read_gpus

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class DetectedResources:
    """Resources of this machine: cores and GB."""

    cpu: int
    memory: float
    storage: float
    devices: tuple[tuple[int, float], ...]
    """Index and memory (GB) of each GPU."""


def detect(work_dir: Path) -> DetectedResources:
    """Look around; `work_dir` says which disk counts and need not exist."""
    return DetectedResources(
        cpu=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        storage=_to_gigabytes(shutil.disk_usage(_nearest_existing(work_dir)).free),
        devices=tuple((gpu.index, _to_gigabytes(gpu.memory)) for gpu in read_gpus()),
    )


def _to_gigabytes(size: int) -> float:
    return int(size / GIGABYTE * 10) / 10


def _memory() -> float:
    total = psutil.virtual_memory().total
    try:  # a container's limit is lower than the machine's memory
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return _to_gigabytes(total)
    return _to_gigabytes(min(total, limit))


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
