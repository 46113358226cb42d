"""Nodes behind two NATs, in network namespaces: they connect through a gateway, and recover from a partition."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.netns import WAN, Namespaces, needs_namespaces, two_homes
from support.node_processes import Child, crew
from support.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240), needs_namespaces]

HEALED = 5 * 10.0
"""Five times the ten seconds after a partition within which the two must communicate again."""


class Homes:
    """A gateway, and a node behind each NAT."""

    def __init__(self, gateway: Child, nodes: dict[str, Child], ids: dict[str, str]) -> None:
        self.gateway = gateway
        self.nodes = nodes
        self.ids = ids

    async def talk(self, source: str, target: str, text: str, within: float) -> None:
        """Send a message from one node to the other by gossip, and open a stream."""
        await self.nodes[source].do(0, "publish", text=text)
        await until(lambda: self.nodes[target].heard[text] == 1, within)

    async def reach(self, source: str, target: str) -> dict[str, Any]:
        """Open a stream to the other node; return the outcome."""
        before = len(self.nodes[source].of("reached"))
        await self.nodes[source].do(0, "reach", peer=self.ids[target])
        await until(lambda: len(self.nodes[source].of("reached")) > before, 30)
        return self.nodes[source].of("reached")[-1]


async def start_nodes(authority: Any, start: Any, spaces: Namespaces) -> Homes:
    files = authority.files("gateway", "gateway")
    settings = {"listen_addresses": [f"/ip4/{WAN}/tcp/4001"], "role": "gateway"}
    gateway = await start([files], settings, spaces.words("wan"))
    [[address]] = (await gateway.opened())["addresses"]
    nodes, ids = {}, {}
    for home in ("a", "b"):
        settings = {"listen_addresses": ["/ip4/0.0.0.0/tcp/4100"], "gateway_addresses": [address]}
        nodes[home] = await start([authority.files(home, "worker")], settings, spaces.words(home))
        [ids[home]] = (await nodes[home].opened())["ids"]
    await until(lambda: bool(gateway.of("state")) and gateway.of("state")[-1]["topic"] == 2, 30)
    return Homes(gateway, nodes, ids)


async def test_nodes_behind_two_nats_communicate_through_the_gateway_and_recover_from_a_partition(
    authority: Any, tmp_path: Path
) -> None:
    with two_homes() as spaces:
        async with crew(tmp_path / "nodes.log") as start:
            homes = await start_nodes(authority, start, spaces)
            check_nodes_cannot_be_dialled(spaces)
            for source, target in (("a", "b"), ("b", "a")):
                reached = await homes.reach(source, target)
                assert reached["answer"] == homes.ids[source], reached
                await homes.talk(source, target, f"{source} to {target}", 5)
            await anyio.to_thread.run_sync(spaces.cut, "a")
            await anyio.sleep(30)
            assert (await homes.reach("b", "a"))["error"]
            await anyio.to_thread.run_sync(spaces.mend, "a")
            mended = time.monotonic()
            while "answer" not in (reached := await homes.reach("b", "a")):
                assert time.monotonic() - mended < HEALED, reached
            print(f"\na stream again {time.monotonic() - mended:.1f} s after the cut")
            await communicates_again(homes, mended)


@pytest.mark.parametrize(
    ("masquerade", "outcome"),
    [("masquerade", "direct"), pytest.param("masquerade random", "failed", marks=pytest.mark.gate)],
)
async def test_hole_punching_succeeds_if_the_nat_preserves_ports_and_otherwise_the_relay_is_used(
    authority: Any, tmp_path: Path, masquerade: str, outcome: str
) -> None:
    with two_homes(masquerade) as spaces:
        async with crew(tmp_path / "nodes.log") as start:
            homes = await start_nodes(authority, start, spaces)
            check_nodes_cannot_be_dialled(spaces)
            reached = await homes.reach("a", "b")
            assert reached["answer"] == homes.ids["a"], reached
            punched = homes.nodes["b"]
            await until(lambda: bool(punched.of("punched")), 60)
            print(f"\n{masquerade}: {punched.of('punched')[0]}")
            assert punched.of("punched")[0]["outcome"] == outcome
            reached = await homes.reach("a", "b")
            assert reached["answer"] == homes.ids["a"]
            assert reached["direct"] is (outcome == "direct")
            if outcome == "direct":
                await circuit_is_closed(homes)
            else:
                assert not homes.gateway.of("circuit")


async def circuit_is_closed(homes: Homes) -> None:
    """Wait until the unused circuit is closed; the nodes' messages no longer pass the gateway."""
    gone = await until(lambda: bool(homes.gateway.of("circuit")), 30)
    print(f"the circuit ended after {gone:.1f} s more: {homes.gateway.of('circuit')}")
    assert [each["outcome"] for each in homes.gateway.of("circuit")] == ["done"]
    for source, target in (("a", "b"), ("b", "a")):
        reached = await homes.reach(source, target)
        assert reached["answer"] == homes.ids[source], reached
        assert reached["direct"]
        await homes.talk(source, target, f"{source} to {target} without a circuit", 5)


async def communicates_again(homes: Homes, mended: float) -> None:
    for attempt in range(200):
        await homes.nodes["a"].do(0, "publish", text=f"again-{attempt}")
        await anyio.sleep(0.3)
        if homes.nodes["b"].heard[f"again-{attempt}"]:
            print(f"gossip again {time.monotonic() - mended:.1f} s after the cut")
            return
        assert time.monotonic() - mended < HEALED


def check_nodes_cannot_be_dialled(spaces: Namespaces) -> None:
    """Check the precondition of the test: neither node can be dialled from outside."""
    code = "import json, socket, sys\nfor host in json.loads(sys.argv[1]):\n"
    code += "    try: socket.create_connection((host, 4100), 1)\n    except OSError: continue\n    sys.exit(1)"
    hosts = json.dumps(["10.77.0.2", "10.77.0.3", "192.168.1.2", "192.168.2.2"])
    done = subprocess.run([*spaces.words("wan"), sys.executable, "-c", code, hosts], check=False, timeout=20)
    assert done.returncode == 0
