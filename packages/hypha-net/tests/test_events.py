"""Followers of an endpoint's events: each receives its kinds in order, without delaying others."""

from __future__ import annotations

import anyio

from hypha_net.events import QUEUE, Connected, Disconnected, Event, Events
from hypha_proto.ids import PeerId

PEER = PeerId.from_public_key(bytes(32))


async def test_a_follower_receives_events_of_its_kinds_until_the_end() -> None:
    heard: list[Event] = []
    events = Events()
    async with anyio.create_task_group() as tasks:
        with events.follow(Disconnected) as followed:

            async def listen() -> None:
                heard.extend([event async for event in followed])

            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            events.emit(Connected(PEER, "inbound"))
            events.emit(Disconnected(PEER, "first"))
            await anyio.wait_all_tasks_blocked()
            events.emit(Disconnected(PEER, "last"))  # emitted before the end, and received
        events.emit(Disconnected(PEER, "after the end"))
    assert heard == [Disconnected(PEER, "first"), Disconnected(PEER, "last")]


async def test_a_slow_follower_loses_the_oldest_events_and_their_number_is_counted() -> None:
    events = Events()
    with events.follow() as followed:
        for number in range(QUEUE + 3):
            events.emit(Disconnected(PEER, str(number)))
        assert followed.dropped == 3
        assert await anext(followed) == Disconnected(PEER, "3")
