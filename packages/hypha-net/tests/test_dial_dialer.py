"""The dialer: IPv6, names, dead addresses, backoff, simultaneous dials, and dial events."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from support.endpoint_helpers import echo_at_once, next_event
from support.gateways import ECHO, LOOPBACK, check_echo
from support.loopback_ports import free_port
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.dial import dialer
from hypha_net._libp2p.dial.happy_eyeballs import run_staggered
from hypha_net._libp2p.dial.tcp import dial_tcp
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.addresses import is_excluded_host, split_peer
from hypha_net.backoff import JITTER, MAX_KEPT, Backoff
from hypha_net.errors import NetError, NotRunningError, UnreachableError
from hypha_net.events import Connected, DialFinished, Disconnected
from hypha_proto.ids import PeerId


class FakeResolver(trio.abc.HostnameResolver):
    """Resolves one name, ``node.test``."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, *others: Any) -> Any:
        """Return the addresses of a family."""
        assert host == b"node.test"
        kinds = {each: socket.AF_INET6 if ":" in each else socket.AF_INET for each in self.hosts}
        return [(kind, socket.SOCK_STREAM, 6, "", (each, port)) for each, kind in kinds.items() if family in (kind, 0)]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        """Fail a reverse look-up, like a resolver that finds no name."""
        raise socket.gaierror(socket.EAI_NONAME, f"{sockaddr} has no name here")


@asynccontextmanager
async def opened(authority: Any, name: str, *listen: str, **changes: Any) -> AsyncIterator[Libp2pEndpoint]:
    settings = EndpointSettings(listen, **changes)
    async with open_endpoint(authority.identity(name), settings) as node:
        node.handle(ECHO, echo_at_once)
        yield node


# ------------------------------------------------------------------------------------------------------ IPv6 and names


@pytest.mark.parametrize("listen", ["/ip6/::1/tcp/0", "/ip6/::/tcp/0"])
async def test_node_is_reachable_over_ipv6(authority: Any, listen: str) -> None:
    async with opened(authority, "gateway", listen, role="gateway") as one:
        assert all(address.startswith("/ip6/") and "/ip6/::/" not in address for address in one.addresses)
        port = one.addresses[0].split("/")[4]
        own = f"/ip6/::1/tcp/{port}"
        async with opened(authority, "two", LOOPBACK, gateway_addresses=(own,)) as two:
            await two.wait_for_gateway(10)
            await check_echo(two, one.peer_id)
            await until(lambda: "p2p-circuit" in two.addresses[-1])
            assert two.addresses[-1].startswith("/ip6/")
        trio.socket.set_custom_hostname_resolver(FakeResolver("::1", "127.0.0.1"))
        async with opened(authority, "three") as three:
            assert await three.connect(f"/dns6/node.test/tcp/{port}/p2p/{one.peer_id}") == one.peer_id


async def test_both_address_families_on_one_port(authority: Any) -> None:
    port = free_port()
    listen = (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}")
    async with opened(authority, "gateway", *listen, role="gateway") as one:
        trio.socket.set_custom_hostname_resolver(FakeResolver("::1", "127.0.0.1"))
        for place in ("ip4/127.0.0.1", "ip6/::1", "dns4/node.test", "dns6/node.test", "dns/node.test"):
            async with opened(authority, "two") as two:
                assert await two.connect(f"/{place}/tcp/{port}") == one.peer_id
                await check_echo(two, one.peer_id)
        with pytest.raises(NetError, match=f"/ip6/::1/tcp/{port}"):
            async with opened(authority, "late", f"/ip6/::1/tcp/{port}"):
                pass


@pytest.mark.parametrize("first", ["127.0.0.2", "::1"], ids=["refuses", "other family"])
async def test_all_addresses_of_a_name_are_tried(authority: Any, first: str) -> None:
    trio.socket.set_custom_hostname_resolver(FakeResolver(first, "127.0.0.1"))
    async with opened(authority, "gateway", LOOPBACK, role="gateway") as one, opened(authority, "two") as two:
        port = one.addresses[0].split("/")[4]
        assert await two.connect(f"/dns/node.test/tcp/{port}") == one.peer_id


@pytest.mark.parametrize(
    ("hosts", "has_ended"),
    [(["127.0.0.2"], True), (["127.0.0.2", "127.0.0.3"], True), (["127.0.0.2", "255.255.255.255"], False)],
)
async def test_node_has_ended_only_if_all_addresses_of_its_name_refuse(
    authority: Any, hosts: list[str], has_ended: bool
) -> None:
    trio.socket.set_custom_hostname_resolver(FakeResolver(*hosts))
    async with opened(authority, "gateway", LOOPBACK, role="gateway") as one, opened(authority, "two") as two:
        with pytest.raises(UnreachableError) as caught:
            await two.connect(f"/dns/node.test/tcp/{one.addresses[0].split('/')[4]}")
        assert isinstance(caught.value, NotRunningError) == has_ended


def test_exclusion_covers_every_notation_of_an_address() -> None:
    private = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]
    for host in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "fd00::1%eth0"):
        assert is_excluded_host(host, private), host
    for host in ("11.1.2.3", "::ffff:11.1.2.3", "2001:db8::1"):
        assert not is_excluded_host(host, private), host


async def test_advertised_name_does_not_lead_to_excluded_addresses(authority: Any) -> None:
    async with opened(authority, "gateway", LOOPBACK, role="gateway") as hub:
        port = free_port()
        joined = {"gateway_addresses": (hub.addresses[0],), "relay_circuit": False}
        named = f"/dns4/localhost/tcp/{port}"
        listen = f"/ip4/127.0.0.1/tcp/{port}"
        async with (
            opened(authority, "named", listen, external_addresses=(named,), **joined) as target,
            opened(authority, "careful", exclude_cidr=("127.0.0.0/8",), **joined) as careful,
            opened(authority, "careless", exclude_cidr=("10.0.0.0/8",), **joined) as careless,
        ):
            for node in (target, careful, careless):
                await node.wait_for_gateway(10)
            await check_echo(careless, target.peer_id)
            with pytest.raises(UnreachableError, match=r"localhost of a peer leads to .*exclude_cidr"):
                await careful.open_stream(target.peer_id, [ECHO], timeout=5)


# ------------------------------------------------------------------------------------------ dead addresses, backoff


async def test_dead_addresses_do_not_prevent_a_connection(authority: Any) -> None:
    async with opened(authority, "gateway", LOOPBACK, role="gateway") as hub:
        # one refuses connections, the other accepts them and never answers
        silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
        dead = (f"/ip4/127.0.0.1/tcp/{free_port()}", f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}")
        joined = {"gateway_addresses": (hub.addresses[0],)}
        async with (
            opened(authority, "target", LOOPBACK, external_addresses=dead, relay_circuit=False, **joined) as target,
            opened(authority, "asking", LOOPBACK, **joined) as asking,
        ):
            for node in (target, asking):
                await node.wait_for_gateway(10)
            assert target.addresses[0].startswith(dead[0])
            await check_echo(asking, target.peer_id)
            assert asking.is_direct(target.peer_id)
        await silent[0].aclose()


@pytest.mark.virtual_clock
async def test_attempts_are_staggered_and_failures_start_the_next_at_once(authority: Any) -> None:
    started: list[float] = []

    async def attempt(duration: float) -> None:
        started.append(anyio.current_time())
        await anyio.sleep(duration)

    start = anyio.current_time()
    await run_staggered([partial(attempt, duration) for duration in (9.0, 0.0, 9.0, 0.01)], 0.25)
    assert [round(at - start, 2) for at in started] == [0.0, 0.25, 0.25, 0.5]


@pytest.mark.virtual_clock
async def test_unreachable_peer_is_retried_with_backoff(authority: Any) -> None:
    async with opened(authority, "one", LOOPBACK) as one, opened(authority, "two", LOOPBACK) as two:
        with one.events.follow(DialFinished) as events:
            began = anyio.current_time()
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    while True:
                        with suppress(UnreachableError):
                            await one.open_stream(two.peer_id, [ECHO])

                tasks.start_soon(ask)
                for _ in range(4):
                    await anext(events)
                tasks.cancel_scope.cancel()
        assert anyio.current_time() - began >= JITTER[0] * sum(dialer.PEER_PAUSES[:3])


async def test_peer_that_has_ended_is_told_from_one_that_cannot_be_reached(authority: Any) -> None:
    async with opened(authority, "gateway", LOOPBACK, role="gateway") as hub:
        joined = {"gateway_addresses": (hub.addresses[0],)}
        async with opened(authority, "one", LOOPBACK, **joined) as one:
            await one.wait_for_gateway(10)
            async with opened(authority, "two", LOOPBACK, **joined) as two:
                await two.wait_for_gateway(10)
                await check_echo(one, two.peer_id)
            with pytest.raises(NotRunningError, match="NO_RESERVATION"):
                await one.open_stream(two.peer_id, [ECHO])
            async with opened(authority, "three", **joined) as without_address:
                await without_address.wait_for_gateway(10)
            with pytest.raises(UnreachableError) as caught:
                await one.open_stream(without_address.peer_id, [ECHO])
            assert not isinstance(caught.value, NotRunningError)


async def test_inbound_connection_ends_backoff(authority: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "PEER_PAUSES", (3600.0,))
    async with opened(authority, "one", LOOPBACK) as one, opened(authority, "two", LOOPBACK) as two:
        with pytest.raises(UnreachableError):
            await one.open_stream(two.peer_id, [ECHO])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(check_echo, one, two.peer_id)
            await anyio.wait_all_tasks_blocked()
            await two.connect(one.addresses[0])


async def test_inbound_connection_ends_pending_attempts(authority: Any) -> None:
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nowhere = f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}"
    async with opened(authority, "gateway", LOOPBACK, role="gateway") as hub:
        joined = {"gateway_addresses": (hub.addresses[0],), "relay_circuit": False}
        async with (
            opened(authority, "one", LOOPBACK, **joined) as one,
            opened(authority, "two", external_addresses=(nowhere,), **joined) as two,
        ):
            for node in (one, two):
                await node.wait_for_gateway(10)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(check_echo, one, two.peer_id)
                stream = await silent[0].accept()
                await two.connect(one.addresses[0])
            await stream.aclose()
    await silent[0].aclose()


async def test_given_address_is_dialled_although_a_search_for_its_peer_fails(authority: Any) -> None:
    async def search(node: Libp2pEndpoint, peer: PeerId) -> None:
        with suppress(UnreachableError):
            await node.open_stream(peer, [ECHO])

    async with (
        opened(authority, "one", LOOPBACK) as one,
        opened(authority, "two") as two,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(3):
            tasks.start_soon(search, two, one.peer_id)
            await anyio.lowlevel.checkpoint()
        assert await two.connect(one.addresses[0]) == one.peer_id


def test_backoff_counts_and_forgets_failures() -> None:
    now = 0.0
    backoff: Backoff[str] = Backoff((1.0, 2.0, 4.0), lambda: now)
    for pause in (1.0, 2.0, 4.0, 4.0):
        backoff.record_failure("a")
        assert 0.6 * pause <= backoff.remaining("a") <= 1.4 * pause
        now += 6
        assert backoff.remaining("a") == 0
    assert backoff.last_failure_at("a") == now - 6
    assert backoff.last_failure_at("b") == backoff.remaining("b") == 0
    backoff.record_success("a")
    backoff.record_failure("a")
    assert backoff.remaining("a") <= 1.4
    now += 61
    assert backoff.last_failure_at("a") == 0
    for number in range(2 * MAX_KEPT):
        backoff.record_failure(str(number))
    assert len(backoff) == MAX_KEPT


# ------------------------------------------------------------------------------------------------ simultaneous dials


async def test_simultaneous_dials_lose_no_stream(authority: Any) -> None:
    async with opened(authority, "one", LOOPBACK) as one, opened(authority, "two", LOOPBACK) as two:
        for _ in range(8):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.connect, two.addresses[0])
                tasks.start_soon(two.connect, one.addresses[0])
            async with anyio.create_task_group() as tasks:
                for node, peer in ((one, two), (two, one)):
                    for _ in range(5):
                        tasks.start_soon(check_echo, node, peer.peer_id)
            for node, peer in ((one, two), (two, one)):
                assert 1 <= len(node._dialer.connections(peer.peer_id)) <= 2
                assert list(node.connected_peers()) == [peer.peer_id]
            await one.disconnect(two.peer_id)
            await until(lambda: not one.connected_peers() and not two.connected_peers())


async def test_concurrent_requests_for_a_peer_share_one_dial(authority: Any) -> None:
    async with opened(authority, "one", LOOPBACK) as one, opened(authority, "two") as two:
        with two.events.follow(DialFinished, Connected, Disconnected) as events:
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(two.connect, one.addresses[0])
                await anyio.wait_all_tasks_blocked()  # without the address, only a running attempt can connect
                tasks.start_soon(two.connect_peer, one.peer_id)
            await two.disconnect(one.peer_id)
            told = [type(await anext(events)) for _ in range(3)]
        assert set(told[:2]) == {DialFinished, Connected}
        assert told[2] == Disconnected


async def test_py_libp2p_does_not_dial_on_its_own(authority: Any) -> None:
    async with opened(authority, "one", LOOPBACK) as one, opened(authority, "two", LOOPBACK) as two:
        await one.connect(two.addresses[0])
        await until(lambda: bool(one.connected_peers()[two.peer_id].addresses))
        await one.disconnect(two.peer_id)
        await until(lambda: not one.connected_peers() and not two.connected_peers())
        with one.events.follow(Connected) as events:
            with pytest.raises(SwarmException, match="is not connected"):
                await one._host.new_stream(ID(two.peer_id.raw), [TProtocol(ECHO)])
            await two.connect(one.addresses[0])
            assert await anext(events) == Connected(two.peer_id, "inbound")  # none of its own before


# ----------------------------------------------------------------------------------------------------- events


async def dial_event(node: Libp2pEndpoint, attempt: Callable[[], Awaitable[object]]) -> DialFinished:
    with node.events.follow(DialFinished) as events:
        with suppress(NetError):
            await attempt()
        return cast(DialFinished, await anext(events))


async def test_dial_events_report_outcome_and_duration(authority: Any, foreign_authority: Any) -> None:
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nobody = f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}"
    accepted: list[float] = []

    async def accept() -> None:
        async with await silent[0].accept():
            accepted.append(anyio.current_time())
            await anyio.sleep_forever()

    async with (
        opened(authority, "gateway", LOOPBACK, role="gateway") as hub,
        opened(foreign_authority, "foreign", LOOPBACK) as foreign,
        opened(authority, "hidden", gateway_addresses=(hub.addresses[0],)) as hidden,
        opened(authority, "leaf", gateway_addresses=(hub.addresses[0],)) as leaf,
        anyio.create_task_group() as group,
    ):
        group.start_soon(accept)
        await leaf.wait_for_gateway(10)
        await until(lambda: bool(hidden.addresses))
        gone = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{hub.peer_id.from_public_key(bytes(32))}"
        for address, outcome in (
            (foreign.addresses[0], "refused"),
            (gone, "unreachable"),
            (nobody, "timeout"),
        ):
            began = anyio.current_time()
            told = await dial_event(leaf, partial(leaf.connect, address, timeout=0.5 if address == nobody else 10))
            assert (told.address, told.outcome, told.relayed) == (address, outcome, False)
            assert 0 < told.seconds <= anyio.current_time() - began
            assert told.reason or outcome == "timeout"
        # the last dial began before its connection was accepted and ended after its 0.5 seconds
        assert told.seconds >= began + 0.5 - accepted[0]
        told = await dial_event(leaf, partial(leaf.open_stream, hidden.peer_id, [ECHO]))
        assert (told.address, told.outcome, told.relayed) == (str(hidden.peer_id), "connected", True)
        with leaf.events.follow(Disconnected) as events:
            await leaf.disconnect(hidden.peer_id)
            ended = await next_event(events, Disconnected)
        assert ended.peer == hidden.peer_id
        group.cancel_scope.cancel()
    await silent[0].aclose()


async def test_connection_made_during_shutdown_fails_without_error_logs(
    authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(authority, "one", LOOPBACK) as one:
        async with opened(authority, "two") as two:
            swarm = two._swarm
        transport, _ = split_peer(one.addresses[0])
        # a dial that began before the shutdown
        with pytest.raises(UnreachableError, match="this node is shutting down"):
            await dial_tcp(swarm, Multiaddr(transport), one.peer_id)
    own = [record for record in caplog.records if record.name.startswith("hypha_net")]
    assert not [record for record in own if record.levelno >= logging.ERROR]
