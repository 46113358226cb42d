"""Hole punching: excluded addresses are not dialled, and a peer cannot make a node dial many addresses."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import pytest
from multiaddr import Multiaddr
from support.loopback_ports import free_port
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.relay import dcutr
from hypha_net._libp2p.relay.dcutr import CONNECT, PROTOCOL, SYNC, HolePunch, HolePuncher
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.errors import StreamResetError, TransferError
from hypha_net.events import Events, HolePunched
from hypha_net.testing import MemoryNetwork

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@pytest.mark.parametrize(("excluded", "outcome"), [("127.0.0.0/8", "failed"), ("10.0.0.0/8", "direct")])
async def test_hole_punching_to_a_host_name_respects_exclude_cidr(
    authority: Any, monkeypatch: pytest.MonkeyPatch, excluded: str, outcome: str
) -> None:
    monkeypatch.setattr(dcutr, "PUNCH_TIMEOUT", 0.3)
    port = free_port()
    settings = EndpointSettings((LOOPBACK,), role="gateway")
    async with open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway:
        joined = (gateway.addresses[0],)
        named = EndpointSettings(
            (f"/ip4/127.0.0.1/tcp/{port}",), (f"/dns4/localhost/tcp/{port}",), gateway_addresses=joined
        )
        asked_out = EndpointSettings(gateway_addresses=joined, exclude_cidr=(excluded,))
        async with (
            open_endpoint(authority.identity("named"), named) as target,
            open_endpoint(authority.identity("careful"), asked_out) as careful,
        ):
            for node in (target, careful):
                await until(lambda node=node: any("p2p-circuit" in each for each in node.addresses))  # type: ignore[misc]
            with careful.events.follow(HolePunched) as punched:
                await target.connect(careful.addresses[0])
                told = await anext(aiter(punched))
            assert isinstance(told, HolePunched)
            assert (told.peer, told.outcome) == (target.peer_id, outcome)
            assert careful.is_direct(target.peer_id) is (outcome == "direct")


class Alone:
    """An endpoint without connections."""

    def is_direct(self, _peer: Any) -> bool:
        return False


@pytest.mark.virtual_clock
async def test_a_peer_can_make_a_node_dial_only_a_few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time, a few addresses each, with growing pauses: third parties cannot be flooded."""
    knocks = 0
    meet = dcutr.trio.socket.socket

    def counted(*args: Any) -> Any:
        nonlocal knocks
        knocks += 1
        return meet(*args)

    monkeypatch.setattr(dcutr.trio.socket, "socket", counted)
    monkeypatch.setattr(dcutr, "PUNCH_TIMEOUT", 1.0)

    async def none(*_args: Any) -> None:
        raise AssertionError("nobody answers")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        victim = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"
        network = MemoryNetwork()
        async with network.endpoint("node") as node, network.endpoint("peer") as peer:
            puncher = HolePuncher(
                Alone(),  # type: ignore[arg-type]
                Events(),
                candidates=lambda: (f"/ip4/127.0.0.1/tcp/{free_port()}",),
                known=lambda _peer: (),
                dialable=lambda addresses: [str(Multiaddr(address)) for address in addresses],
                dial_known=none,
                upgrade=none,
            )
            node.handle(PROTOCOL, puncher.serve)

            async def ask() -> bool:
                """Return whether the request was served, as far as the peer can see."""
                stream = await peer.open_stream(node.peer_id, [PROTOCOL])
                try:
                    await write_message(stream, HolePunch(type=CONNECT, addresses=[Multiaddr(victim).to_bytes()]))
                    if await read_message(stream, HolePunch) is None:
                        return False
                    await write_message(stream, HolePunch(type=SYNC))
                    await stream.receive_some()
                except (StreamResetError, TransferError):
                    return False
                return True

            async with anyio.create_task_group() as tasks:
                answers: list[bool] = []

                async def note() -> None:
                    answers.append(await ask())

                for _ in range(10):
                    tasks.start_soon(note)
            assert sorted(answers) == [False] * 9 + [True]
            assert 3 <= knocks <= 12
            assert await ask()
