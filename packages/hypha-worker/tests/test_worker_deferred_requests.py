"""Deferred requests: which are dropped for newer ones, and how many are kept."""

from __future__ import annotations

import uuid

from hypha_proto.ids import PeerId
from hypha_proto.offers import REQUEST_BATCH_SIZE, ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_worker.bidding.request_batch import DeferredRequests, ReceivedRequest

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(2)]
TRAIN = WorkerSpec(resources=Resources(cpu=1.0), executor=(ExecutorDescriptor("train", "x"),))
SERVER = WorkerSpec(resources=Resources(cpu=1.0), executor=(ExecutorDescriptor("aggregate", "x"),))


def received(number: int, received_at: float, spec: WorkerSpec = TRAIN, peer: int = 0) -> ReceivedRequest:
    request = WorkerRequest(id=uuid.UUID(int=number), spec=spec, bid=1.0, timeout_ms=5000)
    return ReceivedRequest(PEERS[peer], request, received_at)


def kept(deferred: DeferredRequests) -> list[int]:
    return sorted(each.request.id.int for each in deferred.pending)


def test_a_repeated_request_replaces_the_older_one() -> None:
    deferred = DeferredRequests()
    for number in range(3):
        deferred.add(received(number, number / 100))
    assert kept(deferred) == [2]


def test_a_publication_replaces_all_of_the_one_before() -> None:
    deferred = DeferredRequests()
    deferred.add(received(0, 0.0))
    deferred.add(received(1, 0.05, SERVER))
    deferred.add(received(2, 0.0, SERVER, peer=1))
    assert kept(deferred) == [0, 1, 2]
    deferred.drop_superseded([received(3, 0.5)])
    assert kept(deferred) == [2]


def test_the_next_deadline_is_that_of_the_oldest_request() -> None:
    deferred = DeferredRequests()
    assert deferred.next_deadline == float("inf")
    deferred.add(received(0, 1.0))
    deferred.add(received(1, 1.1, SERVER))
    assert deferred.next_deadline == 6.0
    deferred.forget(PEERS[0])
    assert deferred.pending == ()


def test_a_flood_of_different_requests_leaves_a_place_to_others() -> None:
    deferred = DeferredRequests()
    for number in range(2 * REQUEST_BATCH_SIZE):
        deferred.add(received(number, 0.0, WorkerSpec(resources=Resources(cpu=number / 1000), executor=TRAIN.executor)))
    deferred.add(received(9999, 0.1, peer=1))
    assert len(deferred.pending) == REQUEST_BATCH_SIZE
    assert 9999 in kept(deferred)
