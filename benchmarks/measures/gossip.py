"""Time from one node's publish until each other node has the message, behind one gateway, ten nodes per process."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.children import Child, start_child
from benchmarks.run import TOPIC, BenchmarkRun
from benchmarks.tables import Row, quantile

NODES_PER_PROCESS = 10
TIMEOUT = 60.0


def measure(run: BenchmarkRun) -> list[Row]:
    """Publish one message at a time and measure every delivery; a lost message is an error."""
    with ExitStack() as stack:
        groups = network(stack, run, run.leaves, topic=True)[1]
        _wait_for(groups)
        times: list[float] = []
        expected = run.leaves - 1
        for index in range(max(3, run.count // 20)):
            groups[index % len(groups)].ask("publish")
            times += _delivery_times(groups, expected)
    what = f"gossip to {run.leaves} nodes"
    return [
        Row(f"{what}, p50", "ms", quantile(times, 0.5) * 1000),
        Row(f"{what}, p95", "ms", quantile(times, 0.95) * 1000, bound="≤ 300 ms"),
    ]


def network(stack: ExitStack, run: BenchmarkRun, leaves: int, *, topic: bool) -> tuple[Child, list[Child]]:
    """Start a gateway, and processes with up to ten nodes each."""
    issue = run.organisation.node
    gateway = stack.enter_context(start_child("node", files=issue("gateway", "gateway"), role="gateway"))
    if topic:
        gateway.ask("subscribe", topic=TOPIC)
    files = [issue(f"n{index}") for index in range(leaves)]
    return gateway, [
        stack.enter_context(
            start_child(
                "leaves", nodes=files[begin : begin + NODES_PER_PROCESS], gateway=gateway.about["address"], topic=topic
            )
        )
        for begin in range(0, leaves, NODES_PER_PROCESS)
    ]


def _wait_for(groups: list[Child]) -> None:
    until = time.monotonic() + TIMEOUT
    while not all(group.ask("ready") for group in groups):
        if time.monotonic() > until:
            raise TimeoutError(f"the topic has not formed within {TIMEOUT:g} s")
        time.sleep(0.1)
    time.sleep(2)  # the meshes form at the next heartbeats


def _delivery_times(groups: list[Child], expected: int) -> list[float]:
    times: list[float] = []
    until = time.monotonic() + TIMEOUT
    while len(times) < expected:
        if time.monotonic() > until:
            raise TimeoutError(f"{len(times)} of {expected} nodes have the message after {TIMEOUT:g} s")
        time.sleep(0.3)
        for group in groups:
            times += group.ask("take_delivery_times")
    return times
