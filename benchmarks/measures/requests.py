"""Latency of a small request, each on its own stream: on an idle connection, and during two transfers."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.children import start_child
from benchmarks.measures.transfer import node_pair
from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row, quantile

TRANSFERS = 2
MS = 1000


def measure(run: BenchmarkRun) -> list[Row]:
    """Request a peer's health, idle and on the connection over which two files are transferred repeatedly."""
    source, digest = run.file("source", run.size)
    with ExitStack() as stack:
        asker, answerer = node_pair(stack, run)
        answerer.ask("offer", path=str(source), digest=digest)
        tls_asker, tls_answerer = (
            stack.enter_context(start_child("tls", files=run.organisation.node(n))) for n in "cd"
        )
        tls_asker.ask("connect", port=tls_answerer.ask("listen", path=str(source)))
        peer = answerer.about["peer"]
        asker.ask("ask", peer=peer, count=20)
        idle = asker.ask("ask", peer=peer, count=run.count)
        bare = tls_asker.ask("ping", count=run.count)
        targets = [str(run.folder / f"target-{index}") for index in range(TRANSFERS)]
        asker.ask("keep_pulling", peer=peer, digest=digest, targets=targets)
        busy = asker.ask("ask", peer=peer, count=run.count)
        asker.ask("stop")
    bare_is, under = "a byte there and back, blocking ssl", f"{TRANSFERS} transfers on the same connection"
    return [
        _row("request, idle, p50", idle, bare, 0.5, bare_is, "≤ 2.5 ms"),
        _row("request, idle, p99", idle, bare, 0.99, bare_is, ""),
        _row(f"request, {under}, p50", busy, idle, 0.5, "idle", ""),
        _row(f"request, {under}, p99", busy, idle, 0.99, "idle", "≤ 30 ms"),
    ]


def _row(what: str, ours: list[float], reference: list[float], share: float, reference_is: str, bound: str) -> Row:
    one, other = quantile(ours, share) * MS, quantile(reference, share) * MS
    return Row(what, "ms", one, other, reference_is, one / other, bound)
