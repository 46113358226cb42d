"""Two networks behind NAT train through a gateway: scheduler and a worker in one, all others in the other."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.homed_network import HomedNetwork, homed_network
from support.netns import needs_namespaces

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(500), needs_namespaces]

HOMES = {"data": "b", "worker-2": "b", "parameter-server": "b"}
"""Programs in the second home; the scheduler and the other worker are in the first."""


def test_two_networks_behind_nat_train_together(tmp_path: Path) -> None:
    with homed_network(tmp_path / "run", 2, HOMES) as network:
        network.up()
        train(network)


def train(network: HomedNetwork) -> None:
    job = network.job(rounds=6)
    assert job.wait(300) == 0, job.log
    assert len(job.events("round")) == 6
    assert not job.events("worker_lost")
    [finished] = job.events("finished")
    print(f"\nbytes over the gateway's machine: {network.spaces.carried()}, seconds: {finished['wall_seconds']}")
    model = network.folders.start_model / "model.safetensors"
    assert network.spaces.carried() > model.stat().st_size  # updates were transferred between the two networks
    for name in ("gateway", *network.trainers):
        assert "Traceback" not in network.log(name)
    gateway = network.processes.child("gateway").process
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(60) == 0
