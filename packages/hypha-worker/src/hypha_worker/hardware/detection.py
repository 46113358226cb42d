"""Detects this machine's resources for ``hypha-worker init``: cores, memory, free disk space, and GPUs."""

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
    """Resources of this machine; memory and storage in GB."""

    cpu: int
    memory: float
    storage: float
    devices: tuple[tuple[int, float], ...]
    """Index and memory (GB) of each GPU."""


def detect(work_dir: Path) -> DetectedResources:
    """Detect the resources; storage is that of the disk with `work_dir`, which need not exist."""
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
    try:  # in a container, its limit counts and not the machine's memory
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return _to_gigabytes(total)
    return _to_gigabytes(min(total, limit))


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
