"""Time to connect: TCP, mutual TLS and yamux until streams can be opened, against TCP and mutual TLS alone."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from benchmarks.children import start_child
from benchmarks.measures.transfer import node_pair
from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row

MS = 1000


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure both in turns."""
    source, _ = run.file("source", 1)
    ours, reference = [], []
    with ExitStack() as stack:
        one, other = node_pair(stack, run)
        tls_one, tls_other = (stack.enter_context(start_child("tls", files=run.organisation.node(n))) for n in "cd")
        port = tls_other.ask("listen", path=str(source))
        for _ in range(max(1, run.count // 5)):
            ours.append(one.ask("connect", address=other.about["address"]) * MS)
            reference.append(tls_one.ask("connect", port=port) * MS)
    p50, bare = statistics.median(ours), statistics.median(reference)
    return [Row("connect with mTLS, p50", "ms", p50, bare, "blocking ssl", p50 / bare, "≤ 30 ms")]
