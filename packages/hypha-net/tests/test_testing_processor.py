"""Processor time of simulated nodes: one delivery after the other, those of different senders in turns."""

from __future__ import annotations

import anyio
import pytest

from hypha_net import rpc
from hypha_net.testing import Faults, MemoryEndpoint, MemoryNetwork, simulate
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId


def times_of_arrival(processing: float, publishers: list[str]) -> list[tuple[str, float]]:
    """Let publishers send at once, in this order; return who was received when, in milliseconds after the delay."""

    async def main() -> list[tuple[str, float]]:
        network = MemoryNetwork(faults=Faults(delay=0.02), processing=processing)
        received = []
        async with network.endpoint("a") as a, network.endpoint("b") as b, network.endpoint("c") as c:
            names = {a.peer_id: "a", b.peer_id: "b"}
            nodes = {"a": a, "b": b}
            async with c.subscribe("topic") as messages:
                for number, name in enumerate(publishers):
                    await nodes[name].publish("topic", bytes([number]))
                async for message in messages:
                    received.append((names[message.source], round(1000 * anyio.current_time() - 20, 3)))
                    if len(received) == len(publishers):
                        return received
        raise AssertionError("unreachable")

    return simulate(main)


def test_deliveries_take_no_time_by_default() -> None:
    assert {when for _, when in times_of_arrival(0.0, ["a", "a", "b"])} == {0.0}


def test_deliveries_are_handled_one_after_the_other() -> None:
    assert [when for _, when in times_of_arrival(0.001, ["a", "a", "a"])] == [1.0, 2.0, 3.0]


def test_a_sender_of_many_messages_delays_another_by_one_turn() -> None:
    arrivals = times_of_arrival(0.001, ["a"] * 10 + ["b"])
    assert next(when for name, when in arrivals if name == "b") <= 3.0
    assert [when for _, when in arrivals] == [float(number) for number in range(1, 12)]


@pytest.mark.virtual_clock
async def test_a_request_and_its_answer_take_one_turn_each_and_are_counted() -> None:
    async def healthy(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    network = MemoryNetwork(processing=0.001)
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        rpc.serve(b, HEALTH_CHECK, healthy)
        began = anyio.current_time()
        await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest())
        seconds, at_a, at_b = anyio.current_time() - began, a.processor.handled, b.processor.handled
    assert seconds == pytest.approx(0.002)
    assert (at_a, at_b) == (1, 1)


def test_a_cancelled_delivery_leaves_its_turn_to_the_next() -> None:
    async def main() -> float:
        network = MemoryNetwork(processing=1.0)
        async with network.endpoint("a") as a, network.endpoint("b") as b, anyio.create_task_group() as tasks:
            tasks.start_soon(b.processor.handle, a.peer_id)
            with anyio.move_on_after(0.5):
                await anyio.sleep(0.1)
                await b.processor.handle(a.peer_id)
            await handle_as(b, a.peer_id)
            return anyio.current_time()

    async def handle_as(node: MemoryEndpoint, sender: PeerId) -> None:
        with anyio.fail_after(5):
            await node.processor.handle(sender)

    assert simulate(main) == pytest.approx(2.0)
