"""The arbiter: prices, batches, ranking, devices, and reasons for rejection."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_proto.offers import AggregateExecutor, TrainExecutor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources, Timestamp
from hypha_worker.bidding.arbiter import Arbiter, OfferPolicy, ReceivedRequest, RequestBatch
from hypha_worker.leasing.capacity import Capabilities, Capacity, Device

TRAIN = TrainExecutor(name="diloco-transformer")
PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(6)]
MACHINE = Resources(cpu=8.0, memory=32.0, storage=100.0)


def request(number: int = 0, bid: float = 100.0, timeout_ms: int | None = None, **amounts: float) -> WorkerRequest:
    return WorkerRequest(
        id=uuid.UUID(int=number),
        spec=WorkerSpec(resources=Resources(**amounts), executor=(TRAIN,)),
        timeout=Timestamp.of(0),
        bid=bid,
        timeout_ms=timeout_ms,
    )


def arbiter(machine: Capacity | None = None, **policy: object) -> Arbiter:
    capacity = machine or Capacity(MACHINE)
    return Arbiter(OfferPolicy(**policy), Capabilities(capacity, frozenset({TRAIN})))  # type: ignore[arg-type]


def received(made: WorkerRequest, peer: int = 0, received_at: float = 0.0) -> ReceivedRequest:
    return ReceivedRequest(PEERS[peer], made, received_at)


@pytest.mark.parametrize(
    ("policy", "bid", "price"),
    [
        ({}, 100.0, 100.0),
        ({}, 99.0, None),
        ({"price": 50.0, "floor": 80.0}, 79.0, None),
        ({"price": 50.0, "floor": 80.0}, 80.0, 80.0),
        ({"strategy": "whole", "price": 150.0, "floor": 120.0}, 119.0, None),
        ({"strategy": "whole", "price": 150.0, "floor": 120.0}, 120.0, 150.0),
        ({"strategy": "whole", "price": 150.0, "floor": 120.0}, 170.0, 170.0),
    ],
)
def test_prices_follow_the_configuration(policy: dict[str, object], bid: float, price: float | None) -> None:
    worker = arbiter(**policy)
    offers = worker.decide([received(request(bid=bid, cpu=1.0))], worker.capabilities.capacity, 0.0)
    assert [offer.price for offer in offers] == ([] if price is None else [price])


def test_flexible_offers_the_request_and_whole_offers_everything() -> None:
    for strategy, offered in (("flexible", Resources(cpu=2.0)), ("whole", MACHINE)):
        worker = arbiter(strategy=strategy)
        [offer] = worker.decide([received(request(cpu=2.0))], Capacity(MACHINE), 0.0)
        assert offer.allocation.resources == offered


def test_whole_offers_nothing_while_a_part_is_leased() -> None:
    worker = arbiter(strategy="whole")
    left = Capacity(MACHINE).without([Capacity(MACHINE).fit(Resources(cpu=1.0))])  # type: ignore[list-item]
    assert worker.decide([received(request(cpu=2.0))], left, 0.0) == []
    assert worker.rejection_reasons(PEERS[0], request(cpu=2.0), left) == (
        "the machine is offered as a whole only, and a part of it is leased",
    )


def test_profit_takes_the_highest_bid_of_a_batch() -> None:
    batch = [received(request(n, bid=bid, cpu=6.0)) for n, bid in enumerate((100.0, 140.0, 120.0))]
    worker = arbiter()
    assert [offer.price for offer in worker.decide(batch, Capacity(MACHINE), 0.1)] == [140.0]


def test_utilization_prefers_the_fullest_use_and_affinity_the_preferred_scheduler() -> None:
    batch = [received(request(0, bid=150.0, cpu=2.0), peer=0), received(request(1, cpu=8.0), peer=1)]
    for policy in ({"evaluation": "utilization"}, {"evaluation": "affinity", "schedulers": (PEERS[1], PEERS[0])}):
        offers = arbiter(**policy).decide(batch, Capacity(MACHINE), 0.1)
        assert [offer.received_request.request.id.int for offer in offers] == [1]


def test_only_listed_schedulers_get_offers() -> None:
    worker = arbiter(schedulers=(PEERS[1],))
    batch = [received(request(0, cpu=1.0), peer=0), received(request(1, cpu=1.0), peer=1)]
    assert [offer.received_request.scheduler for offer in worker.decide(batch, Capacity(MACHINE), 0.0)] == [PEERS[1]]
    assert "offer.schedulers" in worker.rejection_reasons(PEERS[0], batch[0].request, Capacity(MACHINE))[0]


def test_a_request_gets_one_offer_and_none_after_its_deadline() -> None:
    worker, twice = arbiter(), [received(request(1, cpu=1.0)), received(request(1, cpu=1.0), received_at=0.1)]
    assert len(worker.decide(twice, Capacity(MACHINE), 0.2)) == 1
    assert worker.decide(twice, Capacity(MACHINE), 0.2, leased=frozenset({uuid.UUID(int=1)})) == []
    assert worker.decide([received(request(1, timeout_ms=150, cpu=1.0))], Capacity(MACHINE), 0.2) == []
    assert worker.decide([received(request(1, cpu=1.0))], Capacity(MACHINE), 5.0) == []


def test_every_rejection_reason_is_listed() -> None:
    made = WorkerRequest(
        id=uuid.UUID(int=1),
        spec=WorkerSpec(
            resources=Resources(cpu=9.0, gpu=1.0), executor=(TRAIN, AggregateExecutor(name="parameter-server"))
        ),
        timeout=Timestamp.of(0),
        bid=1.0,
    )
    assert arbiter().rejection_reasons(PEERS[0], made, Capacity(MACHINE)) == (
        "the bid of 1 is below 100, the least this worker accepts",
        "executor aggregate/parameter-server is not configured; configured: train/diloco-transformer",
        "gpu: 1 requested, 0 free of 0",
        "cpu: 9 requested, 8 free of 8",
    )


def test_a_lease_gets_whole_devices() -> None:
    machine = Capacity(Resources(cpu=8.0), (Device(0, 24.0), Device(1, 80.0), Device(2, 24.0)))
    assert machine.resources.gpu == 128.0
    small = machine.fit(Resources(gpu=10.0))
    assert small is not None
    assert (small.devices, small.resources.gpu) == ((Device(0, 24.0),), 24.0)
    left = machine.without([small])
    assert left.resources.gpu == 104.0
    both = left.fit(Resources(gpu=100.0))
    assert both is not None
    assert both.devices == (Device(1, 80.0), Device(2, 24.0))
    assert left.without([both]).resources.gpu == 0.0
    assert left.without([both]).fit(Resources(gpu=1.0)) is None
    assert machine.fit(Resources(cpu=1.0)).devices == ()  # type: ignore[union-attr]


def test_a_batch_is_due_after_its_window_or_when_it_is_full() -> None:
    batch = RequestBatch(window=0.2, size=3)
    assert batch.seconds_until_due(0.0) is None
    batch.add(received(request(0), received_at=1.0))
    assert batch.seconds_until_due(1.05) == pytest.approx(0.15)
    assert batch.seconds_until_due(1.3) == 0.0
    for number in range(1, 5):
        batch.add(received(request(number), received_at=1.01))
    assert batch.seconds_until_due(1.02) == 0.0
    assert [ad.request.id.int for ad in batch.drain()] == [0, 1, 2]
    assert batch.seconds_until_due(2.0) is None


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 300), st.floats(0, 10), st.floats(0, 90)), max_size=12),
    st.sampled_from(["profit", "utilization", "affinity"]),
    st.sampled_from(["flexible", "whole"]),
    st.booleans(),
)
def test_offers_of_a_batch_fit_the_machine_and_the_policy(
    wanted: list[tuple[int, float, float, float]], evaluation: str, strategy: str, devices: bool
) -> None:
    owned = (Device(0, 24.0), Device(1, 48.0)) if devices else ()
    machine = Capacity(Resources(cpu=8.0, memory=32.0, gpu=72.0), owned)
    worker = arbiter(machine, evaluation=evaluation, strategy=strategy, price=100.0, floor=60.0)
    batch = [
        received(request(n, bid=bid, cpu=cpu, gpu=gpu), peer=peer) for n, (peer, bid, cpu, gpu) in enumerate(wanted)
    ]
    offers = worker.decide(batch, machine, 0.2)
    taken = [offer.allocation for offer in offers]
    assert sum(a.resources.cpu for a in taken) <= 8.0 + 1e-6
    assert sum(a.resources.gpu for a in taken) <= 72.0 + 1e-6
    held = [device for a in taken for device in a.devices]
    assert len(held) == len(set(held))
    for offer in offers:
        asked = offer.received_request.request
        assert offer.allocation.resources.covers(asked.spec.resources)
        assert offer.price >= max(asked.bid, 60.0)
    assert len({offer.received_request.request.id for offer in offers}) == len(offers)
    left = machine.without(taken)
    refused = [ad for ad in batch if ad.request.id not in {o.received_request.request.id for o in offers}]
    assert all(worker.rejection_reasons(ad.scheduler, ad.request, left) for ad in refused), (
        "a request that fits was rejected"
    )
