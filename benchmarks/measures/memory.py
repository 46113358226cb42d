"""Resident memory of an idle node, and of a gateway as nodes join it."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.children import started
from benchmarks.measures.gossip import PATIENCE, network
from benchmarks.setting import MIB, Setting
from benchmarks.tables import Row

PEERS_OF_LEAVES = 10 / 3
"""200 peers where gossip has 60."""


def measure(setting: Setting) -> list[Row]:
    """The gateway before and after."""
    issue, peers = setting.organisation.node, round(setting.leaves * PEERS_OF_LEAVES)
    with ExitStack() as stack:
        alone = stack.enter_context(started("node", files=issue("alone", "gateway"), role="gateway"))
        node = stack.enter_context(started("node", files=issue("idle"), gateway=alone.about["address"]))
        gateway, _ = network(stack, setting, peers, topic=False)
        until = time.monotonic() + PATIENCE
        while gateway.ask("peers") < peers and time.monotonic() < until:
            time.sleep(0.2)
        connected = gateway.ask("peers")
        if connected < peers:
            raise TimeoutError(f"{connected} of {peers} peers are connected after {PATIENCE:g} s")
        time.sleep(2)
        idle, before, after = (child.memory() / MIB for child in (node, alone, gateway))
    return [
        Row("memory of an idle node", "MiB", idle),
        Row(f"memory of a gateway with {peers} peers", "MiB", after, before, "with one peer", after / before),
        Row("for each peer more", "MiB", (after - before) / max(1, peers - 1)),
    ]
