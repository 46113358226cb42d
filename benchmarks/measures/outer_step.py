"""Outer steps over update files in the page cache, against a copy in memory, as rates of bytes read and written.

Of an outer step, those bytes count that it cannot do without: each update and the momentum are read once, the outer
update and the new momentum are written once. Of a copy, each byte counts twice.
"""

from __future__ import annotations

from benchmarks.children import start_child
from benchmarks.run import MIB, BenchmarkRun
from benchmarks.tables import Row, paired

UPDATES = 2
FILES = UPDATES + 3
"""Updates, momentum before and after, outer update."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure steps with one and with two threads, and copies, in turns."""
    size, copied = run.size // 8, run.size // 2
    rates: dict[str, list[float]] = {"copy": [], "1": [], "2": []}
    with start_child("outer_step", folder=str(run.folder), size=size, copied=copied) as child:
        child.ask("step", threads=1)  # from now on there is a momentum
        for _ in range(run.repeat):
            for threads in (1, 2):
                run.settle()
                rates[str(threads)].append(FILES * size / MIB / float(child.ask("step", threads=threads)))
            rates["copy"].append(2 * copied / MIB / float(child.ask("copy")))
        grown = float(child.ask("memory", threads=2)) / MIB
    for name in (*(f"update-{number}" for number in range(UPDATES)), "momentum", "outer"):
        (run.folder / name).unlink()
    what = f"outer step over {UPDATES} updates of {size // MIB} MiB"
    reference = f"memory copy of {copied // MIB} MiB, one thread"
    return [
        paired(f"{what}, one thread", rates["1"], rates["copy"], reference, "≥ 0.2"),
        paired(f"{what}, two threads", rates["2"], rates["copy"], reference, "aim 0.4"),
        Row("anonymous memory that it takes", "MiB", grown, bound="≤ 64 MiB"),
    ]
