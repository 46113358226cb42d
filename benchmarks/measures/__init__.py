"""Benchmarks by name. Each takes a `BenchmarkRun` and returns rows; README.md says what each is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.measures import (
    connect,
    footprint,
    gossip,
    inference,
    isolation,
    memory,
    placement,
    relay,
    requests,
    runner,
    start,
    tasks,
    transfer,
)
from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row

MEASURES: Mapping[str, Callable[[BenchmarkRun], list[Row]]] = {
    "transfer": transfer.measure,
    "footprint": footprint.measure,
    "relay": relay.measure,
    "requests": requests.measure,
    "connect": connect.measure,
    "gossip": gossip.measure,
    "start": start.measure,
    "memory": memory.measure,
    "placement": placement.measure,
    "runner": runner.measure,
    "tasks": tasks.measure,
    "inference": inference.measure,
    "isolation": isolation.measure,
}
