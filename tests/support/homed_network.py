"""A network of real processes in two homes behind NAT, with the gateway between them (`support.netns`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hypha_local import network_layout
from hypha_local.network_layout import NodePlan
from hypha_local.processes import LocalProcess, Processes
from support.local_network import LocalNetwork, processes_of
from support.netns import WAN, Namespaces, two_homes
from support.waiting import wait_until


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
    homes: Mapping[str, str]

    def start(self, name: str, command: Sequence[str], *, stdout: Path | None = None) -> LocalProcess:
        """See `Processes.start`."""
        return super().start(name, [*self.spaces.words(self.homes.get(name, "a")), *command], stdout=stdout)


class HomedNetwork(LocalNetwork):
    """The demo's network across two homes."""

    spaces: Namespaces

    def wait_healthy(self, *names: str) -> None:
        """Wait by reading logs, because nodes in other namespaces cannot be probed from here."""
        for name in names:
            wait_until(lambda name=name: "ready" in self.log(name), 60, f"{name} is ready")  # type: ignore[misc]


def _plan(workers: int) -> list[NodePlan]:
    return [HomedNode(node.name, node.program, node.role, node.port) for node in network_layout.plan_nodes(workers)]


@contextmanager
def homed_network(root: Path, workers: int, homes: Mapping[str, str]) -> Iterator[HomedNetwork]:
    """Plan a network, which `HomedNetwork.up` starts; at the end none of its processes is left.

    Hole punching fails with its NAT, so all traffic between the homes is relayed.

    Args:
        root: where its files are.
        workers: number of training workers.
        homes: where a program runs, ``a``, ``b`` or ``wan``, by its name; the others run in a, the gateway in the wan.
    """
    with two_homes("masquerade random") as spaces, pytest.MonkeyPatch.context() as patched:
        patched.setattr("support.local_network.plan_nodes", _plan)
        patched.setattr("support.local_network.Processes", HomedProcesses)
        patched.setattr(HomedProcesses, "spaces", spaces, raising=False)
        patched.setattr(HomedProcesses, "homes", {"gateway": "wan", **homes}, raising=False)
        network = HomedNetwork(root, workers)
        network.spaces = spaces
        try:
            yield network
        finally:
            network.down()
    assert processes_of(root) == []
