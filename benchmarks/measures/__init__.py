"""Benchmarks by name. Each takes a `BenchmarkRun` and returns rows; README.md says what each is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.measures import (
    bridge,
    connect,
    connectors,
    demo,
    faults,
    footprint,
    goodput,
    gossip,
    inference,
    isolation,
    memory,
    outer_step,
    placement,
    prepare,
    relay,
    requests,
    runner,
    start,
    tasks,
    training,
    transfer,
    uneven,
)
from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row

MEASURES: Mapping[str, Callable[[BenchmarkRun], list[Row]]] = {
    "transfer": transfer.measure,
    "footprint": footprint.measure,
    "relay": relay.measure,
    "requests": requests.measure,
    "connect": connect.measure,
    "connectors": connectors.measure,
    "gossip": gossip.measure,
    "start": start.measure,
    "memory": memory.measure,
    "placement": placement.measure,
    "runner": runner.measure,
    "tasks": tasks.measure,
    "inference": inference.measure,
    "isolation": isolation.measure,
    "bridge": bridge.measure,
    "goodput": goodput.measure,
    "uneven": uneven.measure,
    "faults": faults.measure,
    "outer_step": outer_step.measure,
    "prepare": prepare.measure,
    "training": training.measure,
    "demo": demo.measure,
}
