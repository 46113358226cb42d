"""Requests, gossip and dataset records as typed messages over the network in memory."""

from __future__ import annotations

import uuid

import anyio
import pytest
from support.endpoint_helpers import memory_pair

from hypha_net import dataset_directory, pubsub, rpc
from hypha_net.endpoint import Stream
from hypha_net.errors import RequestError, RequestTimeoutError
from hypha_net.events import GossipDropped
from hypha_proto.datasets import DatasetRecord
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, LeaseRenewal, RenewalFailed, RenewLease
from hypha_proto.offers import OFFER, WORKER_REQUESTS, WorkerRequest, WorkerSpec
from hypha_proto.protocols import API, HEALTH
from hypha_proto.resources import Resources


async def test_methods_share_a_protocol_and_receive_the_peer_id() -> None:
    async with memory_pair() as (a, b):
        asked: list[tuple[PeerId, uuid.UUID]] = []

        async def renew(peer: PeerId, request: RenewLease) -> LeaseRenewal:
            asked.append((peer, request.id))
            return RenewalFailed()

        rpc.serve(b, RENEW_LEASE, renew)
        lease = uuid.UUID(int=7)
        assert isinstance(await rpc.call(a, b.peer_id, RENEW_LEASE, RenewLease(id=lease)), RenewalFailed)
        assert asked == [(a.peer_id, lease)]
        assert OFFER.protocol == API  # the protocol is served, but not this method
        with pytest.raises(RequestError):
            await rpc.call(a, b.peer_id, OFFER, _offer())


def _offer() -> object:
    from hypha_proto.offers import WorkerOffer

    one = uuid.UUID(int=1)
    return WorkerOffer(id=one, request_id=one, price=1.0, resources=Resources(), timeout_ms=500)


async def test_a_failing_handler_is_an_error_for_the_client() -> None:
    async with memory_pair() as (a, b):

        async def fail(_peer: PeerId, _request: HealthRequest) -> Health:
            raise RuntimeError("broken")

        rpc.serve(b, HEALTH_CHECK, fail)
        with pytest.raises(RequestError, match="health"):
            await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest())


async def test_a_silent_peer_times_out() -> None:
    async with memory_pair() as (a, b):

        async def silent(_stream: Stream) -> None:
            await anyio.sleep_forever()

        b.handle(HEALTH, silent)
        with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
            await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest(), timeout=0.05)


@pytest.mark.parametrize("answer", [b"\xa0\xa0", b"\xff", b"\xa1gheal"])
async def test_a_malformed_answer_is_an_error(answer: bytes) -> None:
    async with memory_pair() as (a, b):

        async def answer_wrongly(stream: Stream) -> None:
            await stream.send_all(answer)
            await stream.send_eof()

        b.handle(HEALTH, answer_wrongly)
        with pytest.raises(RequestError, match="malformed"):
            await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest())


async def test_typed_gossip_drops_undecodable_messages_with_an_event() -> None:
    spec = WorkerSpec(resources=Resources(cpu=1.0), executor=())
    sent = WorkerRequest(id=uuid.UUID(int=5), spec=spec, timeout_ms=5000, bid=2.0)
    async with memory_pair() as (a, b), pubsub.subscribe(b, WORKER_REQUESTS) as messages:
        with b.events.follow(GossipDropped) as lost:
            await a.publish(WORKER_REQUESTS.name, b"rubbish")
            await pubsub.publish(a, WORKER_REQUESTS, sent)
            assert await anext(messages) == (a.peer_id, sent)
            assert await anext(aiter(lost)) == GossipDropped(WORKER_REQUESTS.name, "undecodable", a.peer_id)


async def test_datasets_are_found_by_name_with_their_provider() -> None:
    async with memory_pair() as (a, b):
        await dataset_directory.announce_dataset(a, "digits", DatasetRecord(num_slices=4))
        await b.put_record(b"digits", b"not json")
        [found] = await dataset_directory.find_dataset(b, "digits")
        assert (found.provider, found.record.num_slices) == (a.peer_id, 4)
        assert await dataset_directory.find_dataset(b, "unknown") == []
