"""How much memory eight transfers at once take, at either end: the peak that the kernel saw, less what was there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.children import Child
from benchmarks.measures.transfer import node_pair, pull
from benchmarks.setting import MIB, Setting
from benchmarks.tables import Row

AT_ONCE = 8


def measure(setting: Setting) -> list[Row]:
    """All of them at once, each to a file of its own."""
    source, digest = setting.file("source", setting.size)
    with ExitStack() as stack:
        taker, giver = node_pair(stack, setting)
        giver.ask("offer", path=str(source), digest=digest)
        before = {child: child.memory() for child in (giver, taker)}
        pull(setting, taker, giver, digest, AT_ONCE)
        grown = {child: (_peak(child) - before[child]) / MIB for child in before}
    what = f"memory that {AT_ONCE} transfers of {setting.size // MIB} MiB take"
    return [
        Row(f"{what}, giving", "MiB", grown[giver], bound="< 128 MiB"),
        Row(f"{what}, taking", "MiB", grown[taker], bound="< 128 MiB"),
    ]


def _peak(child: Child) -> int:
    """Largest resident size so far, in bytes; Linux tells."""
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell the peak of a process")
