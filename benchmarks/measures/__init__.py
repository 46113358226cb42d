"""What is measured, by name. Each takes a `Setting` and gives rows; see README.md for what each compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.measures import connect, footprint, gossip, memory, relay, requests, start, transfer
from benchmarks.setting import Setting
from benchmarks.tables import Row

MEASURES: Mapping[str, Callable[[Setting], list[Row]]] = {
    "transfer": transfer.measure,
    "footprint": footprint.measure,
    "relay": relay.measure,
    "requests": requests.measure,
    "connect": connect.measure,
    "gossip": gossip.measure,
    "start": start.measure,
    "memory": memory.measure,
}
