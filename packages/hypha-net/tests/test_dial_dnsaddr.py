"""``/dnsaddr``: addresses from TXT records, resolved at a local name server within bounds, and dialled."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
import trio.testing
from multiaddr import Multiaddr
from pydantic import ValidationError
from support.endpoint_helpers import echo_at_once, next_event
from support.gateways import ECHO, LOOPBACK, check_echo, open_gateway
from support.loopback_ports import free_port
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.dial import dnsaddr
from hypha_net._libp2p.dial.dnsaddr import DnsaddrResolver, ResolvedAddress
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.addresses import split_peer
from hypha_net.errors import AddressError, RefusedError, UnreachableError
from hypha_net.events import DialFinished
from hypha_net.node.config.models import NodeConfig
from hypha_proto.ids import PeerId


def some_peer(number: int) -> PeerId:
    return PeerId.from_public_key(bytes([number]) * 32)


class NameServer:
    """Name server for TXT records over UDP; answers that unknown names do not exist."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        """Contents of the TXT records of ``_dnsaddr.<name>``, by name."""
        self.on_silence: dict[str, Callable[[], None]] = {}
        """Names that get no answer, and what happens when they are asked for."""
        self.asked: Counter[str] = Counter()
        self.place = ("", 0)

    async def serve(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
            await sock.bind(("127.0.0.1", 0))
            self.place = sock.getsockname()
            task_status.started()
            while True:
                question, client = await sock.recvfrom(4096)
                answer = self._answer(dns.message.from_wire(question))
                if answer is not None:
                    await sock.sendto(answer.to_wire(max_size=65535), client)

    def _answer(self, query: dns.message.Message) -> dns.message.Message | None:
        asked = query.question[0]
        name = str(asked.name).removeprefix("_dnsaddr.").rstrip(".")
        assert str(asked.name).startswith("_dnsaddr.")
        self.asked[name] += 1
        if name in self.on_silence:
            self.on_silence[name]()
            return None
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if name not in self.records:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif texts := [f'"{text[:200]}" "{text[200:]}"' for text in self.records[name]]:
            answer.answer.append(dns.rrset.from_text(asked.name, 60, "IN", "TXT", *texts))
        return answer

    def find(self, address: str) -> Any:
        return DnsaddrResolver([self.place]).resolve(address)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    server = NameServer()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        yield server
        nursery.cancel_scope.cancel()


# -------------------------------------------------------------------------------------------------------- addresses


def test_dnsaddr_without_port_is_valid_in_a_configuration() -> None:
    peer = some_peer(1)
    for address in (
        "/dnsaddr/gw.example",
        f"/dnsaddr/gw.example/p2p/{peer}",
        "/dnsaddr/gw.example/tcp/4001",
        f"/dnsaddr/gw.example/tcp/4001/p2p/{peer}",
    ):
        transport, named = split_peer(address)
        assert address.startswith(transport)
        assert named == (peer if "p2p" in address else None)
        config = NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=[address])
        assert config.gateway_addresses == [address]
    for address in ("/dnsaddr/", "/dnsaddr/my_host", "/dnsaddr/gw.example/udp/1", "/dnsaddr/gw.example/p2p/x"):
        with pytest.raises(AddressError, match="dnsaddr"):
            split_peer(address)
        with pytest.raises(ValidationError, match="gateway_addresses"):
            NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=[address])
    with pytest.raises(ValidationError, match="listen_addresses"):
        NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", listen_addresses=["/dnsaddr/gw.example"])


async def test_dnsaddr_is_refused_as_listen_address(authority: Any) -> None:
    with pytest.raises(AddressError, match="listen_addresses /dnsaddr/"):
        async with open_endpoint(authority.identity("node"), EndpointSettings(("/dnsaddr/gw.example",))):
            pass


# ----------------------------------------------------------------------------------------------------------- records


async def test_records_are_followed_and_filtered_by_suffix() -> None:
    one, two = some_peer(1), some_peer(2)
    async with name_server() as server:
        server.records = {
            "all.example": [
                f"dnsaddr=/ip4/192.0.2.1/tcp/4001/p2p/{one}",
                f"dnsaddr=/dns4/two.example/tcp/4002/p2p/{two}",
                f"dnsaddr=/dnsaddr/more.example/p2p/{one}",
                f"dnsaddr=/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{one}",
                "dnsaddr=rubbish",
                "v=spf1 -all",
            ],
            "more.example": [
                f"dnsaddr=/ip6/2001:db8::1/tcp/4001/p2p/{one}",
                f"dnsaddr=/ip4/192.0.2.9/tcp/4001/p2p/{two}",  # matches queries for the other peer only
                "dnsaddr=/ip4/192.0.2.8/tcp/4001",
            ],
        }
        first, named = (
            ResolvedAddress("/ip4/192.0.2.1/tcp/4001", one),
            ResolvedAddress("/dns4/two.example/tcp/4002", two),
        )
        further = ResolvedAddress("/ip6/2001:db8::1/tcp/4001", one)
        for address, expected in (
            ("/dnsaddr/all.example", {first, named, further}),
            (f"/dnsaddr/all.example/p2p/{one}", {first, further}),
            (f"/dnsaddr/all.example/p2p/{two}", {named}),
            ("/dnsaddr/all.example/tcp/4002", {named}),
            (f"/dnsaddr/all.example/tcp/4001/p2p/{one}", {first}),
        ):
            assert set(await server.find(address)) == expected, address
        assert str(Multiaddr("/dnsaddr/all.example")) == "/dnsaddr/all.example"  # as in an identify message


async def test_missing_records_are_explained() -> None:
    async with name_server() as server:
        server.records = {
            "empty.example": [],
            "other.example": ["v=spf1 -all"],
            "quic.example": ["dnsaddr=/ip4/192.0.2.1/udp/1/quic-v1"],
            "one.example": [f"dnsaddr=/ip4/192.0.2.1/tcp/4001/p2p/{some_peer(1)}"],
            "dead.example": ["dnsaddr=/dnsaddr/gone.example"],
        }
        for name in ("gone", "empty", "other"):
            with pytest.raises(UnreachableError, match=rf"no TXT record dnsaddr=.* at _dnsaddr\.{name}\.example"):
                await server.find(f"/dnsaddr/{name}.example")
        with pytest.raises(UnreachableError, match=r"_dnsaddr\.quic\.example leads to a TCP address"):
            await server.find("/dnsaddr/quic.example")
        wanted = some_peer(2)
        with pytest.raises(UnreachableError, match=rf"asked for those that end in /p2p/{wanted}"):
            await server.find(f"/dnsaddr/one.example/p2p/{wanted}")
        with pytest.raises(UnreachableError, match=r"at _dnsaddr\.gone\.example"):
            await server.find("/dnsaddr/dead.example")
        with pytest.raises(UnreachableError, match="TXT records of"):
            await server.find(f"/dnsaddr/{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 60}.example")


def test_queries_are_bounded_in_number_depth_and_time() -> None:
    clock = trio.testing.MockClock()  # time passes when a name gets no answer

    async def main() -> None:
        async with name_server() as server:
            server.records = {
                "loop.example": ["dnsaddr=/dnsaddr/loop.example", "dnsaddr=/ip4/192.0.2.1/tcp/1"],
                "many.example": [f"dnsaddr=/ip4/192.0.2.1/tcp/{port}" for port in range(1, 60)],
                "wide.example": [f"dnsaddr=/dnsaddr/wide{n}.example" for n in range(16)],
                **{f"wide{n}.example": [f"dnsaddr=/dnsaddr/wide{n}-{m}.example" for m in range(16)] for n in range(16)},
                **{f"deep{n}.example": [f"dnsaddr=/dnsaddr/deep{n + 1}.example"] for n in range(10)},
                "late.example": ["dnsaddr=/ip4/192.0.2.1/tcp/1", "dnsaddr=/dnsaddr/silent.example"],
            }
            server.on_silence["silent.example"] = lambda: clock.jump(dnsaddr.TIMEOUT)
            assert await server.find("/dnsaddr/loop.example") == [ResolvedAddress("/ip4/192.0.2.1/tcp/1", None)]
            assert server.asked["loop.example"] == 1
            assert len(await server.find("/dnsaddr/many.example")) == 16
            server.asked.clear()
            with pytest.raises(UnreachableError):
                await server.find("/dnsaddr/wide.example")
            assert server.asked.total() == 16
            server.asked.clear()
            with pytest.raises(UnreachableError, match="more than 4 names"):
                await server.find("/dnsaddr/deep0.example")
            assert list(server.asked) == [f"deep{n}.example" for n in range(4)]
            with pytest.raises(UnreachableError, match=r"silent\.example"):
                await server.find("/dnsaddr/silent.example")
            assert await server.find("/dnsaddr/late.example") == [ResolvedAddress("/ip4/192.0.2.1/tcp/1", None)]

    trio.run(main, clock=clock)


# ----------------------------------------------------------------------------------------------------------- dialling


@asynccontextmanager
async def opened(authority: Any, name: str, server: NameServer, **changes: Any) -> AsyncIterator[Libp2pEndpoint]:
    settings = EndpointSettings(name_servers=(server.place,), **changes)
    async with open_endpoint(authority.identity(name), settings) as node:
        node.handle(ECHO, echo_at_once)
        yield node


async def test_gateway_is_found_by_its_records_and_again_after_they_change(authority: Any) -> None:
    async with name_server() as server:
        identity = authority.identity("gateway", "gateway")
        leaf = {"gateway_addresses": ("/dnsaddr/gw.example",)}
        async with opened(authority, "leaf", server, **leaf) as node:
            with node.events.follow(DialFinished) as dials:
                told = await next_event(dials, DialFinished)
            assert (told.address, told.outcome) == ("/dnsaddr/gw.example", "unreachable")
            assert "no TXT record" in told.reason
            for _ in range(2):
                async with open_endpoint(identity, EndpointSettings((LOOPBACK,), role="gateway")) as gateway:
                    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{gateway.peer_id}"
                    server.records["gw.example"] = [f"dnsaddr={dead}", f"dnsaddr={gateway.addresses[0]}"]
                    await until(lambda: bool(node._gateways.connected()), 20)
                    assert node._gateways.connected() == [gateway.peer_id]
                await until(lambda: not node._gateways.connected())


async def test_named_peer_is_dialled_among_several_behind_a_name(authority: Any) -> None:
    async with name_server() as server:
        listening = {"listen_addresses": (LOOPBACK,)}
        async with (
            opened(authority, "one", server, **listening) as one,
            opened(authority, "two", server, **listening) as two,
            opened(authority, "asking", server) as asking,
        ):
            server.records["all.example"] = [f"dnsaddr={node.addresses[0]}" for node in (one, two)]
            with asking.events.follow(DialFinished) as dials:
                assert await asking.connect(f"/dnsaddr/all.example/p2p/{two.peer_id}") == two.peer_id
                told = await next_event(dials, DialFinished)
            assert told.outcome == "connected"
            assert list(asking.connected_peers()) == [two.peer_id]
            await check_echo(asking, two.peer_id)
            assert await asking.connect("/dnsaddr/all.example") in (one.peer_id, two.peer_id)
            # another peer is at the address of the record
            impostor = f"{one.addresses[0].partition('/p2p/')[0]}/p2p/{some_peer(1)}"
            server.records["wrong.example"] = [f"dnsaddr={impostor}"]
            with pytest.raises(RefusedError, match="answers where"):
                await asking.connect(f"/dnsaddr/wrong.example/p2p/{some_peer(1)}")


@pytest.mark.parametrize("kind", ["ip4/127.0.0.1", "dns4/localhost"])
async def test_exclude_cidr_applies_to_resolved_addresses(authority: Any, kind: str) -> None:
    async with (
        name_server() as server,
        opened(authority, "one", server, listen_addresses=(LOOPBACK,)) as one,
        opened(authority, "careful", server, exclude_cidr=("127.0.0.0/8",)) as careful,
        opened(authority, "careless", server, exclude_cidr=("10.0.0.0/8",)) as careless,
    ):
        port = one.addresses[0].split("/")[4]
        server.records["in.example"] = [f"dnsaddr=/{kind}/tcp/{port}/p2p/{one.peer_id}"]
        for address in ("/dnsaddr/in.example", f"/dnsaddr/in.example/p2p/{one.peer_id}"):
            with pytest.raises(UnreachableError, match="exclude_cidr"):
                await careful.connect(address)
            assert await careless.connect(address) == one.peer_id
            await careless.disconnect(one.peer_id)


async def test_peer_may_advertise_a_dnsaddr(authority: Any) -> None:
    async with name_server() as server:
        port = free_port()
        async with open_gateway(authority) as gateway:
            joined = {"gateway_addresses": (gateway.addresses[0],), "relay_circuit": False}
            own = {
                "listen_addresses": (f"/ip4/127.0.0.1/tcp/{port}",),
                "external_addresses": ("/dnsaddr/me.example",),
            }
            async with (
                opened(authority, "named", server, **own, **joined) as target,
                opened(authority, "asking", server, **joined) as asking,
            ):
                server.records["me.example"] = [f"dnsaddr=/ip4/127.0.0.1/tcp/{port}/p2p/{target.peer_id}"]
                target._swarm.listeners.clear()  # type: ignore[union-attr]  # so that it advertises nothing else
                assert target.addresses == (f"/dnsaddr/me.example/p2p/{target.peer_id}",)
                for node in (target, asking):
                    await node.wait_for_gateway(10)
                await check_echo(asking, target.peer_id)
                assert server.asked["me.example"]
