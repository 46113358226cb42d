"""Typed publish/subscribe over the network in memory."""

from __future__ import annotations

import uuid

from support.memory_pair import memory_pair

from hypha_net import pubsub
from hypha_proto.offers import WORKER_REQUESTS, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources


async def test_typed_gossip_drops_undecodable_messages() -> None:
    spec = WorkerSpec(resources=Resources(cpu=1.0), executor=())
    sent = WorkerRequest(id=uuid.UUID(int=5), spec=spec, timeout_ms=5000, bid=2.0)
    async with memory_pair() as (a, b), pubsub.subscribe(b, WORKER_REQUESTS) as messages:
        await a.publish(WORKER_REQUESTS.name, b"rubbish")
        await pubsub.publish(a, WORKER_REQUESTS, sent)
        assert await anext(messages) == (a.peer_id, sent)
