"""Detects the resources for ``hypha-worker init``: cores, memory, free disk space, and GPUs.

In a container these are what its quotas allow, not all of the machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import psutil

from hypha_proto.resources import GIGABYTE
from hypha_worker.hardware.control_groups import cpu_quota, memory_quota
from hypha_worker.hardware.nvml import read_gpus


def detect(work_dir: Path) -> dict[str, Any]:
    """Return the table ``[resources]``; storage is that of the disk with `work_dir`, which need not exist."""
    found: dict[str, Any] = {
        "cpu": _cores(),
        "memory": _to_gigabytes(min(psutil.virtual_memory().total, memory_quota())),
        "storage": _to_gigabytes(free_bytes(work_dir)),
    }
    if devices := [{"index": gpu.index, "memory": _to_gigabytes(gpu.memory)} for gpu in read_gpus()]:
        found |= {"gpu": sum(device["memory"] for device in devices), "devices": devices}
    return found


def _cores() -> float:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return round(min(usable, cpu_quota()), 2)


def _to_gigabytes(size: float) -> float:
    return int(size / GIGABYTE * 10) / 10


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk with a folder, which need not exist."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
