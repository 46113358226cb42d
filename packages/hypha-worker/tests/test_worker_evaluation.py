"""Evaluations: what each prefers."""

from __future__ import annotations

import uuid

import pytest

from hypha_proto.ids import PeerId
from hypha_proto.offers import ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.policy import OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.leasing.capacity import Capabilities, Capacity

NAMES = ("common", "rare")
PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(4)]
MACHINE = Capacity(Resources(cpu=8.0, memory=8.0))


def received(
    number: int, peer: int = 0, bid: float = 100.0, cpu: float = 5.0, executor: str = "common"
) -> ReceivedRequest:
    spec = WorkerSpec(resources=Resources(cpu=cpu), executor=(ExecutorDescriptor("train", executor),))
    request = WorkerRequest(id=uuid.UUID(int=number), spec=spec, timeout_ms=5000, bid=bid)
    return ReceivedRequest(PEERS[peer], request, 0.0)


def chosen(batch: list[ReceivedRequest], **policy: object) -> list[int]:
    """Return the numbers of the requests that get an offer, in order."""
    capabilities = Capabilities(MACHINE, frozenset(ExecutorDescriptor("train", name) for name in NAMES))
    arbiter = Arbiter(OfferPolicy(**policy), capabilities)  # type: ignore[arg-type]
    return [offer.received_request.request.id.int for offer in arbiter.decide(batch, MACHINE, 0.1)]


def test_profit_prefers_the_highest_price() -> None:
    assert chosen([received(0), received(1, bid=140.0), received(2, bid=120.0)]) == [1]


def test_utilization_prefers_the_fullest_use() -> None:
    assert chosen([received(0, bid=140.0, cpu=3.0), received(1, cpu=8.0)], evaluation="utilization") == [1]


def test_affinity_prefers_peers_and_executors_in_the_order_of_the_list() -> None:
    batch = [received(0, bid=150.0), received(1, peer=1), received(2, peer=2, executor="rare")]
    assert chosen(batch, evaluation="affinity", prefer=(PEERS[1], "rare")) == [1]
    assert chosen(batch, evaluation="affinity", prefer=("rare", PEERS[1])) == [2]
    assert chosen(batch, evaluation="affinity") == [0]


def test_affinity_excludes_nobody() -> None:
    assert chosen([received(0, peer=3)], evaluation="affinity", prefer=(PEERS[1], "rare")) == [0]


@pytest.mark.parametrize("name", ["profit", "utilization"])
def test_preference_decides_between_equal_prices(name: str) -> None:
    batch = [received(0), received(1, peer=1)]
    assert chosen(batch, evaluation=name) == [0]
    assert chosen(batch, evaluation=name, prefer=(PEERS[1],)) == [1]
