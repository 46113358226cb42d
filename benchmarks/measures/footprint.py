"""Memory of eight concurrent transfers at either end: peak resident size as the kernel reports it, less that before."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.children import Child
from benchmarks.measures.transfer import node_pair, pull_rate
from benchmarks.run import MIB, BenchmarkRun
from benchmarks.tables import Row

AT_ONCE = 8


def measure(run: BenchmarkRun) -> list[Row]:
    """Run all transfers concurrently, each into its own file."""
    source, digest = run.file("source", run.size)
    with ExitStack() as stack:
        taker, giver = node_pair(stack, run)
        giver.ask("offer", path=str(source), digest=digest)
        before = {child: child.memory() for child in (giver, taker)}
        pull_rate(run, taker, giver, digest, AT_ONCE)
        grown = {child: (_peak(child) - before[child]) / MIB for child in before}
    what = f"memory that {AT_ONCE} transfers of {run.size // MIB} MiB take"
    return [
        Row(f"{what}, giving", "MiB", grown[giver], bound="< 128 MiB"),
        Row(f"{what}, taking", "MiB", grown[taker], bound="< 128 MiB"),
    ]


def _peak(child: Child) -> int:
    """Return the largest resident size so far, in bytes (Linux only)."""
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not report the peak memory of a process (VmHWM)")
