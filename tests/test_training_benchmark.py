"""What the benchmark of training computes from a job's events and its delayed links."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.children import start_child
from benchmarks.measures.training import WorkerTime, idle_share, rounds_span, worker_times
from benchmarks.programs.delayed_links import BEHIND, FRONT
from hypha_local.network_layout import free_ports

pytestmark = pytest.mark.timeout(60)
DELAY = 0.2


def metrics(worker: str, number: int, **values: float) -> list[dict[str, Any]]:
    """Events of what a worker reports of a round."""
    return [
        {"event": "metric", "time": 0.0, "worker": worker, "round": number, "name": name, "value": value}
        for name, value in values.items()
    ]


def events() -> list[dict[str, Any]]:
    """Events of a job of three rounds, of which the first begins with the start of the executors."""
    found: list[dict[str, Any]] = []
    for number, end in ((1, 100.0), (2, 110.0), (3, 120.0)):
        warm_up = 50.0 if number == 1 else 0.0
        found += metrics(
            "fast", number, samples=300, compute_seconds=8 + warm_up, data_wait_seconds=0.5, report_wait_seconds=0.5
        )
        found += metrics(
            "slow", number, samples=100, compute_seconds=6 + warm_up, data_wait_seconds=2, report_wait_seconds=0, loss=1
        )
        found.append({"event": "round", "time": end, "round": number, "samples": 400})
    return found


def test_times_are_summed_from_the_second_round_on() -> None:
    times = worker_times(events())
    assert times == {"fast": WorkerTime(600, 16, 1, 1), "slow": WorkerTime(200, 12, 4, 0)}
    assert (times["fast"].trained, times["fast"].waited) == (18, 2)


def test_the_span_of_the_rounds_does_not_contain_the_start() -> None:
    assert rounds_span(events()) == (20.0, 800)


def test_workers_are_idle_while_they_do_not_compute() -> None:
    assert idle_share(events()) == pytest.approx(1 - (16 + 12) / (2 * 20))


def echo(listener: socket.socket) -> None:
    """Send back what one connection sends, until it ends."""
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def test_delayed_links_carry_every_byte_in_order_and_late() -> None:
    [port] = free_ports(1)
    sent = np.random.default_rng(0).bytes(300_000)
    with (
        socket.create_server((BEHIND, port)) as listener,
        start_child("delayed_links", delay=DELAY, ports=[port]) as links,
    ):
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with socket.create_connection((FRONT, port), timeout=30) as connection:
            began = time.monotonic()
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            first = connection.recv(1 << 16)
            waited = time.monotonic() - began
            received = first + b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert links.ask("carried") == 2 * len(sent)
    assert received == sent
    assert waited >= 2 * DELAY
