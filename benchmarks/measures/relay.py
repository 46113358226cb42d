"""Rate of one file through a gateway's relay, against two TLS hops through a plain asyncio forwarder.

Our transfer is also encrypted end to end inside the circuit: the gateway cannot read what it forwards.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.children import start_child
from benchmarks.measures.transfer import pull_rate, tls_rate
from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row, paired


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure both in turns."""
    source, digest = run.file("source", run.size)
    issue = run.organisation.node
    ours, reference = [], []
    with ExitStack() as stack:
        gateway = stack.enter_context(start_child("node", files=issue("gateway", "gateway"), role="gateway"))
        taker, giver = (
            stack.enter_context(start_child("node", files=issue(name), gateway=gateway.about["address"], listen=False))
            for name in "ab"
        )
        giver.ask("offer", path=str(source), digest=digest)
        taker.ask("connect", address=giver.ask("circuit"))
        tls_taker, tls_giver = (stack.enter_context(start_child("tls", files=issue(name))) for name in "cd")
        port = tls_giver.ask("listen", path=str(source))
        forwarder = stack.enter_context(start_child("forwarder", files=issue("forwarder"), port=port))
        tls_taker.ask("connect", port=forwarder.about["port"])
        for _ in range(run.repeat):
            reference.append(tls_rate(run, tls_taker, digest))
            ours.append(pull_rate(run, taker, giver, digest, 1))
    return [paired("one transfer through a relay", ours, reference, "two TLS hops by asyncio", "0.55")]
