"""Two networks behind NAT train through a gateway: scheduler and a worker in one, all others in the other."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.local_network import LocalNetwork, processes_of
from support.netns import WAN, Namespaces, needs_namespaces, two_homes
from support.waiting import wait_until

from hypha_local import network_layout
from hypha_local.network_layout import NodePlan
from hypha_local.processes import Child, Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), needs_namespaces]

HOME = {"gateway": "wan", "worker-1": "a", "scheduler": "a", "job-1": "a"}
"""Network namespace of each program; the data node, the other worker and the parameter server run in b."""


@dataclass(frozen=True, slots=True)
class HomedNode(NodePlan):
    """A node that listens on every address of its namespace; the gateway listens on the public address."""

    @property
    def address(self) -> str:
        """Return its listen address."""
        return f"/ip4/{WAN if self.role == 'gateway' else '0.0.0.0'}/tcp/{self.port}"


class HomedProcesses(Processes):
    """Child processes, each in its network namespace."""

    spaces: Namespaces

    def start(self, name: str, command: Sequence[str], *, stdout: Path | None = None) -> Child:
        """See `Processes.start`."""
        return super().start(name, [*self.spaces.words(HOME.get(name, "b")), *command], stdout=stdout)


class HomedNetwork(LocalNetwork):
    """The demo's network across the two NAT networks."""

    def wait_healthy(self, *names: str) -> None:
        """Wait by reading logs, because nodes in other namespaces cannot be probed from here."""
        for name in names:
            wait_until(lambda name=name: "ready" in self.log(name), 60, f"{name} is ready")  # type: ignore[misc]


def homed(workers: int) -> list[NodePlan]:
    return [HomedNode(node.name, node.program, node.role, node.port) for node in network_layout.plan_nodes(workers)]


def test_two_networks_behind_nat_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    with two_homes("masquerade random") as spaces:  # hole punching fails with this NAT, so all traffic is relayed
        monkeypatch.setattr("support.local_network.plan_nodes", homed)
        monkeypatch.setattr("support.local_network.Processes", HomedProcesses)
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
    assert spaces.carried() > model.stat().st_size  # updates were transferred between the two networks
    for name in ("gateway", *network.trainers):
        assert "Traceback" not in network.log(name)
    gateway = network.processes.child("gateway").process
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(10) == 0
