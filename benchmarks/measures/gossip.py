"""From one node's publish until the others have it, all of them behind one gateway, ten to a process."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.children import Child, started
from benchmarks.setting import TOPIC, Setting
from benchmarks.tables import Row, quantile

IN_PROCESS = 10
PATIENCE = 60.0


def measure(setting: Setting) -> list[Row]:
    """A message at a time; every arrival counts, and a message that somebody misses is an error."""
    with ExitStack() as stack:
        groups = network(stack, setting, setting.leaves, topic=True)[1]
        _wait_for(groups)
        times: list[float] = []
        expected = setting.leaves - 1
        for index in range(max(3, setting.count // 20)):
            groups[index % len(groups)].ask("speak")
            times += _arrivals(groups, expected)
    what = f"gossip to {setting.leaves} nodes"
    return [
        Row(f"{what}, p50", "ms", quantile(times, 0.5) * 1000),
        Row(f"{what}, p95", "ms", quantile(times, 0.95) * 1000, bound="≤ 300 ms"),
    ]


def network(stack: ExitStack, setting: Setting, leaves: int, *, topic: bool) -> tuple[Child, list[Child]]:
    """A gateway, and processes with up to ten nodes each."""
    issue = setting.organisation.node
    gateway = stack.enter_context(started("node", files=issue("gateway", "gateway"), role="gateway"))
    if topic:
        gateway.ask("hear", topic=TOPIC)
    files = [issue(f"n{index}") for index in range(leaves)]
    return gateway, [
        stack.enter_context(
            started("leaves", nodes=files[begin : begin + IN_PROCESS], gateway=gateway.about["address"], topic=topic)
        )
        for begin in range(0, leaves, IN_PROCESS)
    ]


def _wait_for(groups: list[Child]) -> None:
    until = time.monotonic() + PATIENCE
    while not all(group.ask("ready") for group in groups):
        if time.monotonic() > until:
            raise TimeoutError(f"the topic has not formed within {PATIENCE:g} s")
        time.sleep(0.1)
    time.sleep(2)  # the meshes form at the next heartbeats


def _arrivals(groups: list[Child], expected: int) -> list[float]:
    times: list[float] = []
    until = time.monotonic() + PATIENCE
    while len(times) < expected:
        if time.monotonic() > until:
            raise TimeoutError(f"{len(times)} of {expected} nodes have the message after {PATIENCE:g} s")
        time.sleep(0.3)
        for group in groups:
            times += group.ask("heard")
    return times
