"""Measures what a job's processes use, as metrics: CPU time, memory, storage I/O, and the job's GPUs.

Nothing is measured unless metrics are exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.to_thread
import psutil

from hypha_net import instrumentation
from hypha_worker.hardware.nvml import read_gpus

INTERVAL: Final = 5.0
"""Seconds between two measurements of a job's processes."""

_CPU_TIME: Final = instrumentation.Counter("process.cpu.time", "s", "CPU time of a job's processes, by mode.")
_CPU_SHARE: Final = instrumentation.Gauge(
    "process.cpu.utilization", "1", "CPU time of a job's processes per core and time."
)
_MEMORY: Final = instrumentation.Level("process.memory.usage", "By", "Physical memory of a job's processes.")
_STORAGE: Final = instrumentation.Counter(
    "process.disk.io", "By", "Bytes that a job's processes read and wrote on disks."
)
_COUNT: Final = instrumentation.Level("hypha.worker.executor.processes", "{process}", "Processes of a job.")
_GPU_SHARE: Final = instrumentation.Gauge("hw.gpu.utilization", "1", "Share of time in which a GPU of a job computes.")
_GPU_MEMORY: Final = instrumentation.Level("hw.gpu.memory.usage", "By", "Memory in use on a GPU of a job.")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources used by one or more processes since they started: seconds and bytes."""

    user: float = 0.0
    system: float = 0.0
    read: int = 0
    written: int = 0
    memory: int = 0
    """Bytes in use now."""


@dataclass(slots=True)
class UsageAccumulator:
    """Sums the use of a process tree while its processes start and end. Pure."""

    _known: dict[tuple[int, float], ProcessUsage] = field(default_factory=dict)

    def add_sample(self, seen: Mapping[tuple[int, float], ProcessUsage]) -> ProcessUsage:
        """Return the use since the last sample, and the memory in use.

        Args:
            seen: the use of each process, by pid and start time.
        """
        nothing = ProcessUsage()
        new = [(use, self._known.get(key, nothing)) for key, use in seen.items()]
        self._known = dict(seen)
        return ProcessUsage(
            user=sum(max(0.0, use.user - before.user) for use, before in new),
            system=sum(max(0.0, use.system - before.system) for use, before in new),
            read=sum(max(0, use.read - before.read) for use, before in new),
            written=sum(max(0, use.written - before.written) for use, before in new),
            memory=sum(use.memory for use, _ in new),
        )


async def measure_usage(pid: int, about: instrumentation.Attributes, devices: Sequence[int] = ()) -> None:
    """Measure the process tree under `pid` until cancelled.

    Args:
        pid: its root.
        about: attributes of the metrics; no other process tree that is being measured has the same.
        devices: GPUs of the job's lease.
    """
    accumulator, cores = UsageAccumulator(), psutil.cpu_count() or 1
    before: float | None = None
    gpus = [{**about, "hw.id": str(index)} for index in devices]
    try:
        while True:
            seen = await anyio.to_thread.run_sync(read_tree, pid, abandon_on_cancel=True)
            now, used = anyio.current_time(), accumulator.add_sample(seen)
            _record_usage(used, len(seen), about)
            if before is not None and now > before:
                _CPU_SHARE.set((used.user + used.system) / (now - before) / cores, about)
            before = now
            if devices:
                await _record_gpus(about, devices)
            await anyio.sleep(INTERVAL)
    finally:
        for gauge in (_CPU_SHARE, _MEMORY, _COUNT):
            gauge.forget(about)
        for gpu in gpus:
            _GPU_SHARE.forget(gpu)
            _GPU_MEMORY.forget(gpu)


def _record_usage(used: ProcessUsage, count: int, about: instrumentation.Attributes) -> None:
    _CPU_TIME.add(used.user, {**about, "cpu.mode": "user"})
    _CPU_TIME.add(used.system, {**about, "cpu.mode": "system"})
    _STORAGE.add(used.read, {**about, "disk.io.direction": "read"})
    _STORAGE.add(used.written, {**about, "disk.io.direction": "write"})
    _MEMORY.set(used.memory, about)
    _COUNT.set(count, about)


async def _record_gpus(about: instrumentation.Attributes, devices: Sequence[int]) -> None:
    for found in await anyio.to_thread.run_sync(read_gpus, abandon_on_cancel=True):
        if found.index in devices:
            gpu = {**about, "hw.id": str(found.index)}
            _GPU_MEMORY.set(found.used, gpu)
            if found.utilization is not None:
                _GPU_SHARE.set(found.utilization, gpu)


def read_tree(pid: int) -> dict[tuple[int, float], ProcessUsage]:
    """Return the use of a process and all its descendants, without those that have ended."""
    found: dict[tuple[int, float], ProcessUsage] = {}
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return found
    for process in tree:
        try:
            with process.oneshot():
                found[process.pid, process.create_time()] = _read(process)
        except psutil.Error:
            continue
    return found


def _read(process: psutil.Process) -> ProcessUsage:
    times = process.cpu_times()
    read = written = 0
    if hasattr(process, "io_counters"):  # not on macOS
        try:
            counters = process.io_counters()
            read, written = counters.read_bytes, counters.write_bytes
        except psutil.AccessDenied:
            pass
    return ProcessUsage(times.user, times.system, read, written, process.memory_info().rss)
