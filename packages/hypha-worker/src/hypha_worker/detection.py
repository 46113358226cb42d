"""What this machine has, for ``hypha-worker init``: cores, memory, free disk, GPUs as the driver's tool lists them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

GIGABYTE = 10**9
_MEBIBYTE = 1 << 20
_QUERY = ("--query-gpu=index,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Detected:
    """Resources of this machine: cores and GB."""

    cpu: int
    memory: float
    storage: float
    devices: tuple[tuple[int, float], ...]
    """Index and memory (GB) of each GPU."""


def detect(work_dir: Path) -> Detected:
    """Look around; `work_dir` says which disk counts and need not exist."""
    return Detected(
        cpu=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        storage=_rounded(shutil.disk_usage(_existing(work_dir)).free),
        devices=_devices(),
    )


def _rounded(size: int) -> float:
    return int(size / GIGABYTE * 10) / 10


def _memory() -> float:
    total = psutil.virtual_memory().total
    try:  # a container's limit is lower than the machine's memory
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return _rounded(total)
    return _rounded(min(total, limit))


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _devices() -> tuple[tuple[int, float], ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listed = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(read_device(line) for line in listed.splitlines() if line.strip())


def read_device(line: str) -> tuple[int, float]:
    """Index and GB from a line such as ``0, 81559`` (MiB). Raises ValueError for another."""
    index, memory = line.split(",")
    return int(index), _rounded(int(memory) * _MEBIBYTE)
