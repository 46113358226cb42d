"""The arbiter: prices, preferences, quotas, devices, fairness, reasons for rejection; and its request batches."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_proto.leases import REJECTION_CODES, Rejection
from hypha_proto.offers import REQUEST_BATCH_SIZE, ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.policy import OfferSection
from hypha_worker.bidding.request_batch import DeferredRequests, ReceivedRequest, RequestBatch
from hypha_worker.leasing.capacity import Allocation, Capabilities, Capacity, GpuCapacity
from hypha_worker.leasing.terms import LeaseUsage, Quota

TRAIN = ExecutorDescriptor("train", "diloco-transformer")
PEERS = [PeerId.from_public_key(n.to_bytes(32, "big")) for n in range(200)]
MACHINE = Resources(cpu=8.0, memory=32.0, storage=100.0)


def request(
    number: int = 0, bid: float = 100.0, timeout_ms: int = 5000, executor: ExecutorDescriptor = TRAIN, **amounts: float
) -> WorkerRequest:
    return WorkerRequest(
        id=uuid.UUID(int=number),
        spec=WorkerSpec(resources=Resources(**amounts), executor=(executor,)),
        bid=bid,
        timeout_ms=timeout_ms,
    )


def arbiter(machine: Capacity | None = None, **policy: object) -> Arbiter:
    capacity = machine or Capacity(MACHINE)
    return Arbiter(OfferSection(**policy), Capabilities(capacity, frozenset({TRAIN})))  # type: ignore[arg-type]


def texts(worker: Arbiter, made: WorkerRequest, free: Capacity) -> list[str]:
    return [reason.text for reason in worker.rejection_reasons(PEERS[0], made, free)]


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
    assert texts(worker, request(cpu=2.0), left) == [
        "the machine is offered as a whole only, and a part of it is leased"
    ]


def test_only_listed_schedulers_get_offers() -> None:
    worker = arbiter(schedulers=[str(PEERS[1])])
    batch = [received(request(0, cpu=1.0), peer=0), received(request(1, cpu=1.0), peer=1)]
    assert [offer.received_request.scheduler for offer in worker.decide(batch, Capacity(MACHINE), 0.0)] == [PEERS[1]]
    [reason] = worker.rejection_reasons(PEERS[0], batch[0].request, Capacity(MACHINE))
    assert "offer.schedulers" in reason.text
    assert reason.code == "not-allowed"


def test_a_request_gets_one_offer_and_none_after_its_deadline() -> None:
    worker, twice = arbiter(), [received(request(1, cpu=1.0)), received(request(1, cpu=1.0), received_at=0.1)]
    assert len(worker.decide(twice, Capacity(MACHINE), 0.2)) == 1
    assert worker.decide(twice, Capacity(MACHINE), 0.2, leased={(PEERS[0], uuid.UUID(int=1))}) == []
    assert worker.decide([received(request(1, timeout_ms=150, cpu=1.0))], Capacity(MACHINE), 0.2) == []
    assert worker.decide([received(request(1, cpu=1.0))], Capacity(MACHINE), 5.0) == []


def test_a_copied_request_id_takes_nothing_from_the_scheduler_that_made_it() -> None:
    batch = [received(request(1, cpu=1.0)), received(request(1, bid=200.0, cpu=1.0), peer=1)]
    offers = arbiter().decide(batch, Capacity(MACHINE), 0.1, leased={(PEERS[2], uuid.UUID(int=1))})
    assert {offer.received_request.scheduler for offer in offers} == {PEERS[0], PEERS[1]}


def test_every_rejection_reason_is_listed_in_words_and_as_a_code() -> None:
    made = WorkerRequest(
        id=uuid.UUID(int=1),
        spec=WorkerSpec(
            resources=Resources(cpu=9.0, gpu=1.0, memory=20.0),
            executor=(TRAIN, ExecutorDescriptor("aggregate", "parameter-server")),
        ),
        timeout_ms=5000,
        bid=1.0,
    )
    worker = arbiter(max_offers=2, max_jobs=1)
    left = Capacity(MACHINE).without([Allocation(Resources(memory=20.0))])
    reasons = worker.rejection_reasons(PEERS[0], made, left, LeaseUsage(offers=2, jobs=1))
    assert reasons == (
        Rejection(
            code="price", text="the bid of 1 is below 100, the least this worker accepts", required=100.0, available=1.0
        ),
        Rejection(
            code="quota",
            text="this scheduler has 2, and offer.max_offers of this worker is 2",
            required=3.0,
            available=2.0,
        ),
        Rejection(
            code="quota",
            text="this scheduler has 1, and offer.max_jobs of this worker is 1",
            required=2.0,
            available=1.0,
        ),
        Rejection(
            code="executor",
            text="executor aggregate/parameter-server is not configured; configured: train/diloco-transformer",
        ),
        Rejection(code="gpu", text="gpu: 1 requested, this worker has 0", required=1.0, available=0.0),
        Rejection(code="cpu", text="cpu: 9 requested, this worker has 8", required=9.0, available=8.0),
        Rejection(code="busy", text="memory: this worker has enough, but too much of it is leased"),
    )
    assert {reason.code for reason in reasons} <= set(REJECTION_CODES)


def test_a_busy_worker_does_not_say_how_much_others_hold() -> None:
    worker, wanted = arbiter(), request(cpu=6.0, memory=30.0)
    answers = [
        worker.rejection_reasons(PEERS[0], wanted, Capacity(MACHINE).without([Allocation(held)]))
        for held in (Resources(cpu=3.0, memory=3.0), Resources(cpu=8.0, memory=32.0))
    ]
    assert answers[0] == answers[1]
    assert [reason.code for reason in answers[0]] == ["busy"]


def test_a_request_for_thousands_of_executors_gets_a_short_answer() -> None:
    spec = WorkerSpec(resources=Resources(), executor=tuple(ExecutorDescriptor("train", f"n{n}") for n in range(5000)))
    made = WorkerRequest(id=uuid.UUID(int=1), spec=spec, timeout_ms=5000, bid=100.0)
    assert len(arbiter().rejection_reasons(PEERS[0], made, Capacity(MACHINE))) == 8


@pytest.mark.parametrize(
    ("quota", "usage", "offers"),
    [
        (Quota(), LeaseUsage(offers=50, leases=50, jobs=50), 4),
        (Quota(max_offers=3), LeaseUsage(offers=1, leases=9), 2),
        (Quota(max_leases=3), LeaseUsage(offers=1, leases=1), 1),
        (Quota(max_leases=3), LeaseUsage(leases=3), 0),
        (Quota(max_jobs=2), LeaseUsage(leases=2, jobs=1), 4),
        (Quota(max_jobs=2), LeaseUsage(leases=2, jobs=2), 0),
    ],
)
def test_quotas_bound_what_one_scheduler_is_offered(quota: Quota, usage: LeaseUsage, offers: int) -> None:
    batch = [received(request(n, cpu=2.0)) for n in range(6)]
    worker = arbiter(**asdict(quota))
    assert len(worker.decide(batch, Capacity(MACHINE), 0.1, usage={PEERS[0]: usage})) == offers
    assert len(worker.decide(batch, Capacity(MACHINE), 0.1, usage={PEERS[1]: usage})) == min(
        4, quota.max_offers or 4, quota.max_leases or 4
    ), "another scheduler's usage does not count"


def test_a_job_gets_defaults_for_what_it_asked_none_of() -> None:
    defaults = Resources(storage=10.0, cpu=1.0, memory=4.0)
    machine = Capacity(Resources(cpu=2.0, memory=8.0, storage=15.0))
    worker = Arbiter(OfferSection(), Capabilities(machine, frozenset({TRAIN}), defaults))

    def allocate(free: Capacity, **asked: float) -> list[Resources]:
        offers = worker.decide([received(request(**asked))], free, 0.0)  # type: ignore[arg-type]
        return [offer.allocation.resources for offer in offers]

    assert allocate(machine) == [Resources(cpu=1.0, memory=4.0, storage=10.0)]
    assert allocate(machine, storage=3.0, cpu=2.0) == [Resources(cpu=2.0, memory=4.0, storage=3.0)]
    left = machine.without([Allocation(Resources(storage=10.0))])
    assert allocate(left) == [Resources(cpu=1.0, memory=4.0, storage=5.0)]
    none = machine.without([Allocation(Resources(storage=15.0))])
    assert allocate(none) == []
    [reason] = worker.rejection_reasons(PEERS[0], request(), none)
    assert reason.code == "busy"
    assert reason.text == "storage: all of it is leased, and a job that asks for none gets a part here"


def test_a_machine_that_lists_no_storage_reserves_none_by_default() -> None:
    machine = Capacity(Resources(cpu=2.0))
    worker = Arbiter(OfferSection(), Capabilities(machine, frozenset({TRAIN}), Resources(storage=10.0)))
    [offer] = worker.decide([received(request(cpu=1.0))], machine, 0.0)
    assert offer.allocation.resources == Resources(cpu=1.0)


TWO_CARDS = Capacity(Resources(cpu=2.0), (GpuCapacity(0, 24.0), GpuCapacity(1, 24.0)))


def test_a_requirement_for_one_gpu_is_never_two_smaller_ones() -> None:
    worker, made = arbiter(TWO_CARDS), request(cpu=1.0, gpu=40.0)
    assert worker.decide([received(made)], TWO_CARDS, 0.0) == []
    [reason] = worker.rejection_reasons(PEERS[0], made, TWO_CARDS)
    assert (reason.code, reason.required, reason.available) == ("gpu", 40.0, 24.0)
    assert "the largest GPU of this worker has 24" in reason.text
    assert "sharded = true" in reason.text
    assert "train/diloco-transformer" in reason.text


def test_an_executor_that_spreads_models_gets_several_gpus() -> None:
    capabilities = Capabilities(TWO_CARDS, frozenset({TRAIN}), sharded=frozenset({TRAIN}))
    [offer] = Arbiter(OfferSection(), capabilities).decide([received(request(cpu=1.0, gpu=40.0))], TWO_CARDS, 0.0)
    assert offer.allocation.devices == (GpuCapacity(0, 24.0), GpuCapacity(1, 24.0))


def test_an_executor_without_the_key_in_a_request_with_several_gets_one_gpu() -> None:
    other = ExecutorDescriptor("train", "other")
    worker = Arbiter(OfferSection(), Capabilities(TWO_CARDS, frozenset({TRAIN, other}), sharded=frozenset({other})))
    spec = WorkerSpec(resources=Resources(gpu=40.0), executor=(TRAIN, other))
    made = WorkerRequest(id=uuid.UUID(int=1), spec=spec, timeout_ms=5000, bid=100.0)
    [reason] = worker.rejection_reasons(PEERS[0], made, TWO_CARDS)
    assert reason.code == "gpu"


def test_a_larger_gpu_that_is_leased_makes_the_worker_busy() -> None:
    machine = Capacity(Resources(cpu=2.0), (GpuCapacity(0, 24.0), GpuCapacity(1, 24.0), GpuCapacity(2, 48.0)))
    left = machine.without([Allocation(Resources(gpu=48.0), (GpuCapacity(2, 48.0),))])
    [reason] = arbiter(machine).rejection_reasons(PEERS[0], request(gpu=40.0), left)
    assert reason.code == "busy"


@pytest.mark.parametrize(("default", "given"), [(8.0, 24.0), (40.0, 24.0)])
def test_a_default_of_gpu_memory_is_at_most_one_gpu(default: float, given: float) -> None:
    worker = Arbiter(OfferSection(), Capabilities(TWO_CARDS, frozenset({TRAIN}), Resources(gpu=default)))
    [offer] = worker.decide([received(request(cpu=1.0))], TWO_CARDS, 0.0)
    assert (offer.allocation.resources.gpu, offer.allocation.devices) == (given, (GpuCapacity(0, 24.0),))


def test_gpus_that_are_not_known_one_by_one_go_to_one_lease_at_a_time() -> None:
    machine = Capacity(Resources(cpu=4.0, gpu=24.0))
    worker = arbiter(machine)
    batch = [received(request(0, cpu=1.0, gpu=8.0)), received(request(1, cpu=1.0, gpu=8.0), received_at=0.1)]
    [offer] = worker.decide(batch, machine, 0.2)
    assert offer.allocation.resources.gpu == 24.0
    left = machine.without([offer.allocation])
    [reason] = worker.rejection_reasons(PEERS[0], batch[1].request, left)
    assert reason.code == "busy"
    [without] = worker.decide([received(request(2, cpu=1.0))], left, 0.2)
    assert without.allocation.resources == Resources(cpu=1.0)


def test_gpu_memory_without_devices_is_no_more_than_the_largest_gpu() -> None:
    machine = Capacity(Resources(cpu=4.0, gpu=40.0), largest_gpu=25.7)
    [reason] = arbiter(machine).rejection_reasons(PEERS[0], request(gpu=40.0), machine)
    assert (reason.code, reason.required, reason.available) == ("gpu", 40.0, 25.7)
    [offer] = arbiter(machine).decide([received(request(gpu=24.0))], machine, 0.0)
    assert offer.allocation.resources.gpu == 40.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 300), st.floats(0, 10), st.floats(0, 90)), max_size=12),
    st.sampled_from(["profit", "utilization", "affinity"]),
    st.sampled_from(["flexible", "whole"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([Resources(), Resources(cpu=1.0, gpu=4.0), Resources(gpu=50.0)]),
)
def test_offers_of_a_batch_fit_the_machine_and_the_policy(
    wanted: list[tuple[int, float, float, float]],
    evaluation: str,
    strategy: str,
    devices: bool,
    sharded: bool,
    defaults: Resources,
) -> None:
    owned = (GpuCapacity(0, 24.0), GpuCapacity(1, 48.0)) if devices else ()
    machine = Capacity(Resources(cpu=8.0, memory=32.0, gpu=72.0), owned)
    policy = OfferSection(evaluation=evaluation, strategy=strategy, price=100.0, floor=60.0)  # type: ignore[arg-type]
    spreading = frozenset({TRAIN}) if sharded else frozenset()
    worker = Arbiter(policy, Capabilities(machine, frozenset({TRAIN}), defaults, spreading))
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
        assert sharded or strategy == "whole" or len(offer.allocation.devices) <= 1
    assert len({offer.received_request.request.id for offer in offers}) == len(offers)
    left = machine.without(taken)
    refused = [ad for ad in batch if ad.request.id not in {o.received_request.request.id for o in offers}]
    assert all(worker.rejection_reasons(ad.scheduler, ad.request, left) for ad in refused), (
        "a request that fits was rejected"
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.2)), min_size=1, max_size=50),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(0, 12),
)
def test_equal_bids_of_schedulers_are_served_in_turn(
    wanted: list[tuple[int, float]], held: list[int], capacity: int
) -> None:
    batch = [received(request(n, cpu=1.0), peer, at) for n, (peer, at) in enumerate(wanted)]
    usage = {peer: LeaseUsage(leases=count) for peer, count in zip(PEERS, held, strict=False)}
    offers = arbiter(Capacity(Resources(cpu=12.0))).decide(
        batch, Capacity(Resources(cpu=float(capacity))), 0.2, usage=usage
    )
    assert len(offers) == min(capacity, len(batch))
    asked = Counter(each.scheduler for each in batch)
    served = Counter(offer.received_request.scheduler for offer in offers)
    for poor in asked:
        for rich in served:
            if served[poor] < asked[poor]:
                assert usage[poor].leases + served[poor] >= usage[rich].leases + served[rich] - 1, (
                    "a scheduler got an offer while another one with fewer and an equal bid got none"
                )


@given(st.integers(1, 100), st.floats(100, 1e9), st.integers(1, 8))
def test_a_flood_never_takes_everything_before_an_equal_or_better_bid(flood: int, bid: float, cores: int) -> None:
    batch = [received(request(n, bid=100.0, cpu=1.0), peer=0) for n in range(flood)]
    batch.append(received(request(1000, bid=bid, cpu=1.0), peer=1, received_at=0.19))
    offers = arbiter().decide(batch, Capacity(Resources(cpu=float(cores))), 0.2)
    served = {offer.received_request.scheduler for offer in offers}
    assert PEERS[1] in served or (cores == 1 and bid == 100.0)


RARE = ExecutorDescriptor("train", "rare")


def numbered(
    number: int,
    peer: int = 0,
    bid: float = 100.0,
    received_at: float = 0.0,
    cpu: float = 5.0,
    executor: ExecutorDescriptor = TRAIN,
) -> ReceivedRequest:
    return received(request(number, bid, executor=executor, cpu=cpu), peer, received_at)


def chosen(batch: list[ReceivedRequest], **policy: object) -> list[int]:
    """Return the numbers of the requests that get an offer, in order."""
    machine = Capacity(MACHINE)
    worker = Arbiter(OfferSection(**policy), Capabilities(machine, frozenset({TRAIN, RARE})))  # type: ignore[arg-type]
    return [offer.received_request.request.id.int for offer in worker.decide(batch, machine, 0.1)]


def test_profit_prefers_the_highest_price() -> None:
    assert chosen([numbered(0), numbered(1, bid=140.0), numbered(2, bid=120.0)]) == [1]


def test_utilization_prefers_the_fullest_use() -> None:
    assert chosen([numbered(0, bid=140.0, cpu=3.0), numbered(1, cpu=8.0)], evaluation="utilization") == [1]


def test_affinity_prefers_peers_and_executors_in_the_order_of_the_list() -> None:
    batch = [numbered(0, bid=150.0), numbered(1, peer=1), numbered(2, peer=2, executor=RARE)]
    assert chosen(batch, evaluation="affinity", prefer=(str(PEERS[1]), "rare")) == [1]
    assert chosen(batch, evaluation="affinity", prefer=("rare", str(PEERS[1]))) == [2]
    assert chosen(batch, evaluation="affinity") == [0]


def test_affinity_excludes_nobody() -> None:
    assert chosen([numbered(0, peer=3)], evaluation="affinity", prefer=(str(PEERS[1]), "rare")) == [0]


@pytest.mark.parametrize("name", ["profit", "utilization"])
def test_preference_decides_between_equal_prices(name: str) -> None:
    batch = [numbered(0), numbered(1, peer=1)]
    assert chosen(batch, evaluation=name) == [0]
    assert chosen(batch, evaluation=name, prefer=(str(PEERS[1]),)) == [1]


SERVER = ExecutorDescriptor("aggregate", "x")


def numbers(batch: RequestBatch) -> list[int]:
    return [each.request.id.int for each in batch.drain()]


def test_a_batch_is_due_after_its_window() -> None:
    batch = RequestBatch(window=0.2)
    assert batch.seconds_until_due(0.0) is None
    batch.add(numbered(0, received_at=1.0))
    batch.add(numbered(1, received_at=1.1))
    assert batch.seconds_until_due(1.05) == pytest.approx(0.15)
    assert batch.seconds_until_due(1.3) == 0.0
    assert numbers(batch) == [0, 1]
    assert batch.seconds_until_due(2.0) is None


def test_a_flood_is_not_decided_alone_and_leaves_a_place_to_others() -> None:
    batch = RequestBatch()
    for number in range(5 * REQUEST_BATCH_SIZE):
        batch.add(numbered(number))
    assert batch.seconds_until_due(0.01) == pytest.approx(0.19)
    batch.add(numbered(9999, peer=1, bid=1.0))
    found = numbers(batch)
    assert len(found) == REQUEST_BATCH_SIZE
    assert 9999 in found


def test_a_repeated_request_takes_one_place() -> None:
    batch = RequestBatch(size=3)
    for _ in range(5):
        batch.add(numbered(7))
    batch.add(numbered(7, peer=1))
    assert numbers(batch) == [7, 7], "one of each scheduler: an id may be copied"


def test_of_more_schedulers_than_places_the_best_bids_stay() -> None:
    batch = RequestBatch(size=3)
    for number, bid in enumerate((1.0, 5.0, 3.0, 9.0, 1.0, 7.0)):
        batch.add(numbered(number, peer=number, bid=bid))
    assert sorted(numbers(batch)) == [1, 3, 5]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=80), st.integers(7, 12))
def test_places_are_shared_evenly_and_each_schedulers_best_bids_stay(wanted: list[tuple[int, int]], size: int) -> None:
    batch = RequestBatch(size=size)
    offered = [numbered(number, peer, float(bid)) for number, (peer, bid) in enumerate(wanted)]
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
        deferred.add(numbered(number, received_at=number / 100))
    assert kept(deferred) == [2]


def test_a_publication_replaces_all_of_the_one_before() -> None:
    deferred = DeferredRequests()
    deferred.add(numbered(0))
    deferred.add(numbered(1, received_at=0.05, executor=SERVER))
    deferred.add(numbered(2, peer=1, executor=SERVER))
    assert kept(deferred) == [0, 1, 2]
    deferred.drop_superseded([numbered(3, received_at=0.5)])
    assert kept(deferred) == [2]


def test_the_next_deadline_is_that_of_the_oldest_request() -> None:
    deferred = DeferredRequests()
    assert deferred.next_deadline == float("inf")
    deferred.add(numbered(0, received_at=1.0))
    deferred.add(numbered(1, received_at=1.1, executor=SERVER))
    assert deferred.next_deadline == 6.0
    deferred.forget(PEERS[0])
    assert deferred.pending == ()


def test_a_flood_of_different_requests_leaves_a_place_to_others() -> None:
    deferred = DeferredRequests()
    for number in range(2 * REQUEST_BATCH_SIZE):
        deferred.add(numbered(number, cpu=number / 1000))
    deferred.add(numbered(9999, peer=1, received_at=0.1))
    assert len(deferred.pending) == REQUEST_BATCH_SIZE
    assert 9999 in kept(deferred)
