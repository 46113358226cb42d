"""Two homes behind NAT train together through a gateway: scheduler and a worker in one, all others in the other."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from bounded_waits import wait_until
from local_network import LocalNetwork, processes_of
from namespaces import WAN, Namespaces, needs_namespaces, two_homes

from hypha_local import plan
from hypha_local.plan import NodePlan
from hypha_local.processes import Child, Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), needs_namespaces]

HOME = {"gateway": "wan", "worker-1": "a", "scheduler": "a", "job-1": "a"}
"""Where each program runs; the data node, the other worker and the parameter server live in b."""


@dataclass(frozen=True, slots=True)
class HomedNode(NodePlan):
    """A node that listens on every address of its own namespace, the gateway on the public one."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"/ip4/{WAN if self.role == 'gateway' else '0.0.0.0'}/tcp/{self.port}"


class HomedProcesses(Processes):
    """Programs, each in its namespace."""

    spaces: Namespaces

    def start(self, name: str, command: Sequence[str], *, stdout: Path | None = None) -> Child:
        """See `Processes.start`."""
        return super().start(name, [*self.spaces.words(HOME.get(name, "b")), *command], stdout=stdout)


class HomedNetwork(LocalNetwork):
    """The demo's network over the two homes."""

    def wait_healthy(self, *names: str) -> None:
        """Nobody here can ask nodes in other namespaces: their logs say it."""
        for name in names:
            wait_until(lambda name=name: "ready" in self.log(name), 60, f"{name} is ready")  # type: ignore[misc]


def homed(workers: int) -> list[NodePlan]:
    return [HomedNode(node.name, node.program, node.role, node.port) for node in plan.plan_nodes(workers)]


def test_two_homes_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    with two_homes("masquerade random") as spaces:  # no hole can be punched in these: everything goes through the relay
        monkeypatch.setattr("local_network.plan_nodes", homed)
        monkeypatch.setattr("local_network.Processes", HomedProcesses)
        monkeypatch.setattr(HomedProcesses, "spaces", spaces, raising=False)
        network = HomedNetwork(root, 2)
        try:
            network.up()
            train(network, spaces)
        finally:
            network.down()
    assert processes_of(root) == []


def train(network: LocalNetwork, spaces: Namespaces) -> None:
    job = network.job(rounds=6)
    assert job.wait(300) == 0, job.log
    assert len(job.events("round")) == 6
    assert not job.events("worker_lost")
    [finished] = job.events("finished")
    print(f"\nbytes over the gateway's machine: {spaces.carried()}, seconds: {finished['wall_seconds']}")
    model = network.folders.start_model / "model.safetensors"
    assert spaces.carried() > model.stat().st_size  # updates went from home to home
    for name in ("gateway", *network.trainers):
        assert "Traceback" not in network.log(name)
    gateway = network.processes.child("gateway").process
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(10) == 0
