"""Resident memory of an idle node, and of a gateway before and after nodes join it."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.children import start_child
from benchmarks.measures.gossip import TIMEOUT, network
from benchmarks.run import MIB, BenchmarkRun
from benchmarks.tables import Row

PEERS_OF_LEAVES = 10 / 3
"""200 peers where the gossip benchmark has 60 nodes."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure the gateway without and with the peers."""
    issue, peers = run.organisation.node, round(run.leaves * PEERS_OF_LEAVES)
    with ExitStack() as stack:
        alone = stack.enter_context(start_child("node", files=issue("alone", "gateway"), role="gateway"))
        node = stack.enter_context(start_child("node", files=issue("idle"), gateway=alone.about["address"]))
        gateway, _ = network(stack, run, peers, topic=False)
        until = time.monotonic() + TIMEOUT
        while gateway.ask("peers") < peers and time.monotonic() < until:
            time.sleep(0.2)
        connected = gateway.ask("peers")
        if connected < peers:
            raise TimeoutError(f"{connected} of {peers} peers are connected after {TIMEOUT:g} s")
        time.sleep(2)
        idle, before, after = (child.memory() / MIB for child in (node, alone, gateway))
    return [
        Row("memory of an idle node", "MiB", idle),
        Row(f"memory of a gateway with {peers} peers", "MiB", after, before, "with one peer", after / before),
        Row("for each peer more", "MiB", (after - before) / max(1, peers - 1)),
    ]
