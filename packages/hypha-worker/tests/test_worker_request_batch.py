"""The request batch: when it is decided, and how its places are shared; and the requests that are deferred."""

from __future__ import annotations

import uuid
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_proto.offers import REQUEST_BATCH_SIZE, ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_worker.bidding.request_batch import DeferredRequests, ReceivedRequest, RequestBatch

PEERS = [PeerId.from_public_key(n.to_bytes(32, "big")) for n in range(200)]
TRAIN = WorkerSpec(resources=Resources(cpu=1.0), executor=(ExecutorDescriptor("train", "x"),))
SERVER = WorkerSpec(resources=Resources(cpu=1.0), executor=(ExecutorDescriptor("aggregate", "x"),))


def received(
    number: int, peer: int = 0, bid: float = 100.0, received_at: float = 0.0, spec: WorkerSpec = TRAIN
) -> ReceivedRequest:
    request = WorkerRequest(id=uuid.UUID(int=number), spec=spec, timeout_ms=5000, bid=bid)
    return ReceivedRequest(PEERS[peer], request, received_at)


def numbers(batch: RequestBatch) -> list[int]:
    return [each.request.id.int for each in batch.drain()]


def test_a_batch_is_due_after_its_window() -> None:
    batch = RequestBatch(window=0.2)
    assert batch.seconds_until_due(0.0) is None
    batch.add(received(0, received_at=1.0))
    batch.add(received(1, received_at=1.1))
    assert batch.seconds_until_due(1.05) == pytest.approx(0.15)
    assert batch.seconds_until_due(1.3) == 0.0
    assert numbers(batch) == [0, 1]
    assert batch.seconds_until_due(2.0) is None


def test_a_flood_is_not_decided_alone_and_leaves_a_place_to_others() -> None:
    batch = RequestBatch()
    for number in range(5 * REQUEST_BATCH_SIZE):
        batch.add(received(number))
    assert batch.seconds_until_due(0.01) == pytest.approx(0.19)
    batch.add(received(9999, peer=1, bid=1.0))
    found = numbers(batch)
    assert len(found) == REQUEST_BATCH_SIZE
    assert 9999 in found


def test_a_repeated_request_takes_one_place() -> None:
    batch = RequestBatch(size=3)
    for _ in range(5):
        batch.add(received(7))
    batch.add(received(7, peer=1))
    assert numbers(batch) == [7, 7], "one of each scheduler: an id may be copied"


def test_of_more_schedulers_than_places_the_best_bids_stay() -> None:
    batch = RequestBatch(size=3)
    for number, bid in enumerate((1.0, 5.0, 3.0, 9.0, 1.0, 7.0)):
        batch.add(received(number, peer=number, bid=bid))
    assert sorted(numbers(batch)) == [1, 3, 5]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=80), st.integers(7, 12))
def test_places_are_shared_evenly_and_each_schedulers_best_bids_stay(wanted: list[tuple[int, int]], size: int) -> None:
    batch = RequestBatch(size=size)
    offered = [received(number, peer, float(bid)) for number, (peer, bid) in enumerate(wanted)]
    for each in offered:
        batch.add(each)
    kept = batch.drain()
    assert len(kept) == min(size, len(offered))
    places = Counter(each.scheduler for each in kept)
    for scheduler, count in Counter(each.scheduler for each in offered).items():
        bids = sorted((each.request.bid for each in offered if each.scheduler == scheduler), reverse=True)
        assert (
            sorted((each.request.bid for each in kept if each.scheduler == scheduler), reverse=True)
            == bids[: places[scheduler]]
        )
        if places[scheduler] < count:
            assert places[scheduler] >= max(places.values()) - 1


def kept(deferred: DeferredRequests) -> list[int]:
    return sorted(each.request.id.int for each in deferred.pending)


def test_a_repeated_request_replaces_the_older_one() -> None:
    deferred = DeferredRequests()
    for number in range(3):
        deferred.add(received(number, received_at=number / 100))
    assert kept(deferred) == [2]


def test_a_publication_replaces_all_of_the_one_before() -> None:
    deferred = DeferredRequests()
    deferred.add(received(0))
    deferred.add(received(1, received_at=0.05, spec=SERVER))
    deferred.add(received(2, peer=1, spec=SERVER))
    assert kept(deferred) == [0, 1, 2]
    deferred.drop_superseded([received(3, received_at=0.5)])
    assert kept(deferred) == [2]


def test_the_next_deadline_is_that_of_the_oldest_request() -> None:
    deferred = DeferredRequests()
    assert deferred.next_deadline == float("inf")
    deferred.add(received(0, received_at=1.0))
    deferred.add(received(1, received_at=1.1, spec=SERVER))
    assert deferred.next_deadline == 6.0
    deferred.forget(PEERS[0])
    assert deferred.pending == ()


def test_a_flood_of_different_requests_leaves_a_place_to_others() -> None:
    deferred = DeferredRequests()
    for number in range(2 * REQUEST_BATCH_SIZE):
        spec = WorkerSpec(resources=Resources(cpu=number / 1000), executor=TRAIN.executor)
        deferred.add(received(number, spec=spec))
    deferred.add(received(9999, peer=1, received_at=0.1))
    assert len(deferred.pending) == REQUEST_BATCH_SIZE
    assert 9999 in kept(deferred)
