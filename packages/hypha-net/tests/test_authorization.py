"""Authorization by role: messages are accepted from allowed roles and, unless required, from nodes without one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any
from uuid import UUID

import pytest
from support.endpoint_helpers import next_event
from support.gateways import LOOPBACK, open_gateway
from support.waiting import until

import hypha_proto
from hypha_net import EndpointSettings, open_endpoint, rpc
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import RequestError, StreamResetError, UnreachableError
from hypha_net.events import GossipDropped, PeerRejected
from hypha_net.testing import MemoryNetwork
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, LeaseRenewal, RenewalFailed, RenewLease
from hypha_proto.protocols import (
    ALLOWED_SENDERS,
    CIRCUIT_OFFER,
    DATASET_RECORD,
    PULL,
    PUSH,
    TASKS,
    WORKER_REQUESTS_TOPIC,
    RpcMethod,
    Topic,
)

ANYBODY = {HEALTH_CHECK.name}


@asynccontextmanager
async def opened(authority: Any, *roles: str | None, **changes: Any) -> AsyncIterator[list[Endpoint]]:
    """Open a gateway and connected nodes of these roles, all with `changes` to their settings."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(open_gateway(authority, **changes))
        nodes: list[Endpoint] = [gateway]
        settings = EndpointSettings((LOOPBACK,), gateway_addresses=(gateway.addresses[0],), **changes)
        for index, role in enumerate(roles):
            identity = authority.identity(f"n{index}", role)
            node = await stack.enter_async_context(open_endpoint(identity, settings))
            await node.wait_for_gateway(10)
            nodes.append(node)
        yield nodes


def test_the_role_table_contains_every_message() -> None:
    named: set[str] = {DATASET_RECORD}
    for module in pkgutil.iter_modules(hypha_proto.__path__):
        for value in vars(importlib.import_module(f"hypha_proto.{module.name}")).values():
            if isinstance(value, RpcMethod | Topic):
                named.add(value.name)
    streams = {CIRCUIT_OFFER, PULL, PUSH, TASKS}
    assert named | streams == ALLOWED_SENDERS.keys() | ANYBODY


async def ask_for_renewal(asking: Endpoint, asked: Endpoint) -> None:
    async def renew(_peer: PeerId, _request: RenewLease) -> LeaseRenewal:
        return RenewalFailed()

    async def answer(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    rpc.serve(asked, RENEW_LEASE, renew)
    rpc.serve(asked, HEALTH_CHECK, answer)
    assert (await rpc.call(asking, asked.peer_id, HEALTH_CHECK, HealthRequest())).healthy
    await rpc.call(asking, asked.peer_id, RENEW_LEASE, RenewLease(id=UUID(int=1)))


@pytest.mark.parametrize(
    ("role", "required", "taken"),
    [
        ("scheduler", False, True),
        ("scheduler", True, True),
        ("worker", False, False),
        ("data", True, False),
        ("gateway", False, False),
        (None, False, True),
        (None, True, False),
    ],
)
async def test_a_request_is_accepted_only_from_its_role(
    authority: Any, role: str | None, required: bool, taken: bool
) -> None:
    async with opened(authority, role, "worker", require_roles=required) as (_, asking, worker):
        with worker.events.follow(PeerRejected) as events:
            if taken:
                await ask_for_renewal(asking, worker)
                return
            with pytest.raises((RequestError, UnreachableError)):
                await ask_for_renewal(asking, worker)
            refused = await next_event(events, PeerRejected)
        assert (refused.peer, refused.reason) == (asking.peer_id, "role")
        assert "RenewLease may be sent by a scheduler only" in refused.detail
        assert (role or "no role") in refused.detail


@pytest.mark.parametrize(("role", "taken"), [("scheduler", True), ("worker", False), (None, True)])
async def test_memory_endpoints_check_roles(role: str | None, taken: bool) -> None:
    network = MemoryNetwork()
    async with network.endpoint("asking") as asking, network.endpoint("asked") as asked:
        asking.role = role
        if taken:
            await ask_for_renewal(asking, asked)
        else:
            with pytest.raises(RequestError):
                await ask_for_renewal(asking, asked)


@pytest.mark.parametrize(("role", "taken"), [("worker", True), ("scheduler", True), ("data", False), (None, True)])
async def test_a_push_is_accepted_from_roles_that_train(authority: Any, role: str | None, taken: bool) -> None:
    async with opened(authority, role, "worker") as (_, sending, worker):

        async def take(stream: Stream) -> None:
            await stream.send_all(await stream.receive_some())

        worker.handle(PUSH, take)

        async def push() -> None:
            stream = await sending.open_stream(worker.peer_id, [PUSH])
            await stream.send_all(b"file")
            assert await stream.receive_some() == b"file"

        if taken:
            await push()
            return
        with pytest.raises((StreamResetError, UnreachableError)):
            await push()


@pytest.mark.parametrize(("role", "taken"), [("gateway", True), ("worker", False), (None, True)])
async def test_a_circuit_is_accepted_only_from_a_gateway(authority: Any, role: str | None, taken: bool) -> None:
    async with opened(authority, role, "worker") as (_, relay, worker):

        async def take(stream: Stream) -> None:
            await stream.send_all(b"taken")

        worker.handle(CIRCUIT_OFFER, take)
        with pytest.raises((StreamResetError, UnreachableError)) if not taken else nullcontext():
            stream = await relay.open_stream(worker.peer_id, [CIRCUIT_OFFER])
            assert await stream.receive_some() == b"taken"


async def test_a_gateway_forwards_advertisements_of_schedulers_only(authority: Any) -> None:
    async with (
        opened(authority, "worker", "scheduler", "worker") as (gateway, rogue, scheduler, worker),
        gateway.subscribe(WORKER_REQUESTS_TOPIC),
        worker.subscribe(WORKER_REQUESTS_TOPIC) as heard,
    ):
        for node in (rogue, scheduler):
            await until(lambda node=node: bool(node.topic_peers(WORKER_REQUESTS_TOPIC)))  # type: ignore[misc]
        await until(lambda: worker.peer_id in gateway.topic_peers(WORKER_REQUESTS_TOPIC))
        with gateway.events.follow(GossipDropped) as lost:
            await rogue.publish(WORKER_REQUESTS_TOPIC, b"bid for me")
            dropped = await next_event(lost, GossipDropped)
        assert (dropped.reason, dropped.source) == ("role", rogue.peer_id)
        await scheduler.publish(WORKER_REQUESTS_TOPIC, b"real")
        message = await anext(heard)
        assert (message.source, message.data) == (scheduler.peer_id, b"real")


async def test_gossip_is_forwarded_by_the_gateway_where_roles_are_required(authority: Any) -> None:
    async with (
        opened(authority, "scheduler", "worker", require_roles=True) as (gateway, scheduler, worker),
        gateway.subscribe(WORKER_REQUESTS_TOPIC),
        worker.subscribe(WORKER_REQUESTS_TOPIC) as heard,
    ):
        await until(lambda: gateway.peer_id in scheduler.topic_peers(WORKER_REQUESTS_TOPIC))
        await until(lambda: worker.peer_id in gateway.topic_peers(WORKER_REQUESTS_TOPIC))
        assert scheduler.peer_id not in worker.connected_peers()
        await scheduler.publish(WORKER_REQUESTS_TOPIC, b"real")
        assert (await anext(heard)).data == b"real"


@pytest.mark.parametrize(("role", "kept"), [("data", True), ("worker", False), (None, True)])
async def test_datasets_are_accepted_only_from_data_nodes(authority: Any, role: str | None, kept: bool) -> None:
    async with opened(authority, role, "scheduler") as (_, publisher, asking):
        await publisher.put_record(b"digits", b"{}")
        found = await asking.find_records(b"digits")
        assert [record.publisher for record in found] == ([publisher.peer_id] if kept else [])


async def test_any_role_gets_a_relay_reservation(authority: Any) -> None:
    async with opened(authority, "worker", "data", "scheduler", require_roles=True) as nodes:
        for node in nodes[1:]:
            await until(lambda node=node: "p2p-circuit" in node.addresses[-1])  # type: ignore[misc]


async def test_a_gateway_address_of_another_role_is_logged(authority: Any, caplog: Any) -> None:
    async with opened(authority, "worker") as (gateway, worker):
        settings = EndpointSettings(gateway_addresses=(worker.addresses[0], gateway.addresses[0]))
        async with open_endpoint(authority.identity("asking"), settings):
            await until(lambda: "has the role worker; list gateways only" in caplog.text)
    assert caplog.text.count("list gateways only") == 1
