"""Sixty leaves, ten per process, around one or two gateways: every message reaches all, also after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.node_processes import Child, crew
from support.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

PROCESSES, EACH = 6, 10
ALL = PROCESSES * EACH
SOON = 5 * 1.0
"""Five times the second within which a message must reach all."""
AGAIN = 5 * 5.0
"""Five times the five seconds after a gateway's return."""


class Network:
    """Gateways and leaves."""

    def __init__(self, authority: Any, start: Any) -> None:
        self._authority = authority
        self._start = start
        self.gateways: list[Child] = []
        self.addresses: list[str] = []
        self.leaves: list[Child] = []

    async def up(self, gateways: int) -> None:
        """Start all processes, and wait until every gateway knows every leaf."""
        self._files = [self._authority.files(f"gateway-{n}", "gateway") for n in range(gateways)]
        for n in range(gateways):
            self.gateways.append(await self._gateway(n, "/ip4/127.0.0.1/tcp/0"))
            [[address]] = (await self.gateways[n].opened())["addresses"]
            self.addresses.append(address)
        for n in range(PROCESSES):
            names = [self._authority.files(f"leaf-{n}-{k}", "worker") for k in range(EACH)]
            self.leaves.append(await self._start(names, {"gateway_addresses": self.addresses}))
        for child in self.leaves:
            await child.opened()
        await self.all_in_topic()

    async def _gateway(self, n: int, listen: str) -> Child:
        others = self.addresses[:n]
        settings = {"listen_addresses": [listen], "role": "gateway", "gateway_addresses": others}
        return await self._start([self._files[n]], settings)

    async def all_in_topic(self) -> None:
        """Wait until every gateway has every leaf in its topic."""

        def missing() -> list[Any]:
            told = [(gateway.of("state"), ALL) for gateway in self.gateways]
            told += [(child.of("state", leaf=n), len(self.gateways)) for child in self.leaves for n in range(EACH)]
            return [states[-1:] for states, least in told if not states or states[-1]["topic"] < least]

        with anyio.move_on_after(60):
            while missing():
                await anyio.sleep(0.1)
        assert missing() == []

    async def restart(self, n: int) -> float:
        """Start gateway `n` again at its address; return the time at which it listens."""
        self.gateways[n] = await self._gateway(n, self.addresses[n].partition("/p2p/")[0])
        return float((await self.gateways[n].opened())["at"])

    def heard(self, text: str) -> int:
        """Return how many leaves received a message."""
        return sum(child.heard[text] for child in self.leaves)

    async def reaches_all(self, process: int, text: str, within: float) -> float:
        """Publish; return the seconds until the last leaf received it."""
        child = self.leaves[process]
        await child.do(process % EACH, "publish", text=text)
        await until(lambda: self.heard(text) == ALL - 1, within)
        [said] = child.of("published", text=text)
        return max(line["at"] for each in self.leaves for line in each.of("heard", text=text)) - float(said["at"])


@pytest.mark.parametrize("gateways", [1, 2])
async def test_a_message_of_any_node_reaches_all(authority: Any, tmp_path: Path, gateways: int) -> None:
    async with crew(tmp_path / "nodes.log") as start:
        network = Network(authority, start)
        await network.up(gateways)
        took = [await network.reaches_all(n, f"from {n}", SOON) for n in range(PROCESSES)]
        print(f"\n{gateways} gateways: slowest delivery {max(took):.3f} s of {[round(t, 3) for t in took]}")
        await three_publishers_lose_nothing(network)
        await after_a_kill(network, gateways)


async def three_publishers_lose_nothing(network: Network) -> None:
    count = 30
    for n in range(3):
        await network.leaves[n].do(n, "publish", text=f"steady-{n}", count=count, pause=1 / 3)
    wanted = [f"steady-{n}-{k}" for n in range(3) for k in range(count)]
    with anyio.move_on_after(count / 3 + 40):
        await until(lambda: sum(map(network.heard, wanted)) >= len(wanted) * (ALL - 1), count / 3 + 60)
    await anyio.sleep(1)
    assert {text: network.heard(text) for text in wanted if network.heard(text) != ALL - 1} == {}  # and none twice


async def after_a_kill(network: Network, gateways: int) -> None:
    await network.gateways[0].kill()
    if gateways > 1:
        took = await network.reaches_all(1, "one gateway is dead", SOON)
        print(f"one gateway dead: {took:.3f} s")
    back = await network.restart(0)
    said: list[str] = []
    while not any(network.heard(text) == ALL - 1 for text in said):
        assert time.monotonic() - back < AGAIN, [network.heard(text) for text in said]
        said.append(f"again-{len(said)}")
        await network.leaves[2].do(3, "publish", text=said[-1])
        with anyio.move_on_after(0.5):
            await until(lambda: network.heard(said[-1]) == ALL - 1, 5)
    print(f"again {time.monotonic() - back:.1f} s after the gateway's return")
    await network.reaches_all(4, "as before", SOON)
