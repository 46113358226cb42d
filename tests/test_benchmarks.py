"""Each benchmark runs at a small size, transfers its data and prints its table; and what simulated ones compute."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.children import start_child
from benchmarks.measures.training import WorkerTime, idle_share, rounds_span, worker_times
from benchmarks.programs.delayed_links import BEHIND, FRONT
from benchmarks.simulation.goodput import goodput, run_job, run_restarting_job
from benchmarks.simulation.uneven_speeds import Costs, Slowdown, utilisation
from hypha_local.network_layout import free_ports

ROOT = Path(__file__).parents[1]
NAMES = (
    "transfer",
    "footprint",
    "relay",
    "requests",
    "connect",
    "connectors",
    "gossip",
    "start",
    "memory",
    "placement",
    "runner",
    "tasks",
    "inference",
    "isolation",
    "bridge",
    "goodput",
    "uneven",
    "faults",
    "outer_step",
    "prepare",
    "training",
    "demo",
)


def run(tmp_path: Path, *arguments: str, timeout: float) -> tuple[str, list[dict[str, Any]]]:
    """Run benchmarks; return their output and their rows."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks", *arguments, "--folder", str(tmp_path), "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    assert [path for path in tmp_path.iterdir() if path != found] == []
    return done.stdout, json.loads(found.read_text())["rows"]


@pytest.mark.nightly
@pytest.mark.timeout(640)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_transfers_its_data(tmp_path: Path, name: str) -> None:
    small = ("--size", "8", "--repeat", "1", "--count", "20", "--leaves", "6", "--minutes", "0.8", "--workers", "20")
    printed, rows = run(tmp_path, name, *small, timeout=600)
    assert printed.startswith(f"\n{name}\n")
    assert rows
    for row in rows:
        assert f"| {row['what']} |" in printed
        assert row["ours"] > 0 or name == "footprint" or row["what"] == "anonymous memory that it takes"
        assert (row["ratio"] is None) == (row["reference"] is None)


def test_an_unknown_benchmark_is_refused_with_the_known_names() -> None:
    command = [sys.executable, "-m", "benchmarks", "transfers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"no benchmark 'transfers'; there are: {', '.join(NAMES)}" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_eight_transfers_of_a_gibibyte_take_less_than_128_mib(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "footprint", "--size", "1024", timeout=800)
    assert len(rows) == 2
    for row in rows:
        assert row["ours"] < 128, row


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_runner_takes_less_than_five_milliseconds_a_report_and_reads_a_long_journal_in_25_seconds(
    tmp_path: Path,
) -> None:
    """Five times what is required and measured on an idle machine."""
    _, rows = run(tmp_path, "runner", "--count", "200", timeout=200)
    found = {row["what"]: row["ours"] for row in rows}
    [report] = [value for what, value in found.items() if what.startswith("report") and "does nothing" in what]
    [request] = [value for what, value in found.items() if what.startswith("request") and "does nothing" in what]
    [read] = [value for what, value in found.items() if what.endswith("read")]
    [restored] = [value for what, value in found.items() if what.endswith("restored")]
    assert max(report, request) < 5
    assert max(read, restored) < 25


def test_a_restarting_job_loses_each_round_that_a_failure_interrupts() -> None:
    whole = run_restarting_job(0, 10, 40.0, 1000, interval=1e9)
    assert (whole.seconds, whole.failures) == (400.0, 0)

    found = run_restarting_job(0, 10, 40.0, 1000, interval=80.0)
    assert found.failures > 0
    assert found.seconds > 400.0 + 30.0 * found.failures


def test_our_job_takes_its_samples_in_spite_of_failures() -> None:
    whole, found = run_job(0, 6), run_job(0, 6, interval=90.0)

    assert found.failures > 0
    assert 0.5 < found.rate / whole.rate <= 1.05


@pytest.mark.nightly
def test_goodput_is_higher_than_with_restarts_if_failures_are_frequent() -> None:
    found = goodput(2, rounds=6, seeds=2)

    assert found.ours > 0.7 > found.restarting


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_of_different_speeds_train_nearly_all_the_time(seed: int) -> None:
    found = utilisation(seed)

    assert found.useful >= 0.95
    assert found.suspected == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_slows_5_times_within_a_round_holds_nobody_up(seed: int) -> None:
    found = utilisation(seed, slowdown=Slowdown())

    assert found.useful >= 0.95
    assert found.suspected == 0


def test_with_the_same_steps_for_each_worker_the_slowest_decides() -> None:
    assert utilisation(0, fixed=True).useful < 0.6
    assert utilisation(0, slowdown=Slowdown(), fixed=True).useful < 0.6


def test_reports_of_several_batches_on_a_slow_link_change_little() -> None:
    near = utilisation(0, costs=Costs(batches=(0.02, 0.02, 0.04, 0.08), link=0.001))
    far = utilisation(0, costs=Costs(batches=(0.02, 0.02, 0.04, 0.08), link=0.1))

    assert far.suspected == 0
    assert far.seconds < 1.15 * near.seconds


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
