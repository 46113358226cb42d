"""Subscribers of a topic that come and go: the node stays in the topic while it has one."""

from __future__ import annotations

from typing import Any

import anyio
from support.waiting import until

from hypha_net import EndpointSettings, instrumentation, open_endpoint
from hypha_net.endpoint import Stream

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


async def test_a_subscription_during_the_last_ones_end_is_announced_to_peers(authority: Any) -> None:
    settings = EndpointSettings((LOOPBACK,), role="gateway")
    async with (
        open_endpoint(authority.identity("gateway"), settings) as gateway,
        open_endpoint(authority.identity("node"), EndpointSettings()) as node,
    ):
        await node.connect(gateway.addresses[0])
        async with gateway.subscribe("here"):
            await until(lambda: gateway.peer_id in node.topic_peers("here"))

        async def leave(topic: str) -> None:
            async with node.subscribe(topic):
                pass

        async def stay(topic: str) -> None:
            async with node.subscribe(topic):
                await anyio.sleep_forever()

        topics = [f"topic {number}" for number in range(20)]
        async with anyio.create_task_group() as tasks:  # the order in which tasks run is random
            for topic in topics:
                tasks.start_soon(leave, topic)
                tasks.start_soon(stay, topic)
            await anyio.wait_all_tasks_blocked()
            async with node.subscribe("last"):  # announced after all others
                await until(lambda: node.peer_id in gateway.topic_peers("last"))
                assert all(node.peer_id in gateway.topic_peers(topic) for topic in topics)
            tasks.cancel_scope.cancel()
        await until(lambda: not any(map(gateway.topic_peers, topics)))


async def test_a_peers_request_is_not_part_of_the_trace_of_the_dial(authority: Any) -> None:
    served: list[str | None] = []

    async def handle(_stream: Stream) -> None:
        with instrumentation.serving("test", object()):
            served.append(instrumentation.current_traceparent())

    settings = EndpointSettings((LOOPBACK,), role="gateway")
    async with (
        open_endpoint(authority.identity("gateway"), settings) as gateway,
        open_endpoint(authority.identity("node"), EndpointSettings()) as node,
    ):
        node.handle("/test/1", handle)
        with instrumentation.attached(TRACE):
            await node.connect(gateway.addresses[0])
        stream = await gateway.open_stream(node.peer_id, ["/test/1"])
        await until(lambda: bool(served))
        await stream.aclose()
    assert served == [None]
