"""Joint model of schedulers and workers: under loss, duplication, reordering, expiry and stopped nodes no resource is
leased twice, no scheduler believes in a lease that its worker has given away, and in the end everything is free."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.placement_model import Conditions, World

from hypha_proto.leases import RENEWED_LEASE
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_worker.leasing.lease_manager import LeaseManager

ROUGH = Conditions(loss=0.1, duplication=0.2, delay=0.3, late=0.05)


class PlacementMachine(RuleBasedStateMachine):
    """Jobs that begin, run and end on three workers while messages and nodes fail."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.world = World(seed, workers=3, schedulers=3)

    @rule(
        loss=st.sampled_from([0.0, 0.1, 0.5]),
        duplication=st.sampled_from([0.0, 0.3]),
        delay=st.sampled_from([0.01, 0.1, 0.4]),
        late=st.sampled_from([0.0, 0.1]),
    )
    def change_conditions(self, loss: float, duplication: float, delay: float, late: float) -> None:
        self.world.conditions = Conditions(loss, duplication, delay, late)

    @rule(scheduler=st.integers(0, 2), train=st.integers(1, 2))
    def ask(self, scheduler: int, train: int) -> None:
        self.world.schedulers[scheduler].ask(train)

    @rule(scheduler=st.integers(0, 2))
    def dispatch(self, scheduler: int) -> None:
        self.world.schedulers[scheduler].dispatch()

    @rule(scheduler=st.integers(0, 2))
    def give_up(self, scheduler: int) -> None:
        self.world.schedulers[scheduler].give_up()

    @rule(scheduler=st.integers(0, 2))
    def close(self, scheduler: int) -> None:
        self.world.schedulers[scheduler].close()

    @rule(worker=st.integers(0, 2))
    def end_job(self, worker: int) -> None:
        list(self.world.workers.values())[worker].end_job()
        self.world.check()

    @rule(node=st.integers(0, 5), seconds=st.sampled_from([0.3, 1.0, 5.0, 12.0]))
    def stop(self, node: int, seconds: float) -> None:
        peers = [*self.world.workers, *(scheduler.peer for scheduler in self.world.schedulers)]
        self.world.stop(peers[node], seconds)

    @rule(seconds=st.sampled_from([0.2, 0.7, 2.0, 6.0]))
    def run_for(self, seconds: float) -> None:
        self.world.run(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check_quiescence()


PlacementMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
test_leases_stay_consistent_whatever_happens_to_messages_and_nodes = PlacementMachine.TestCase


def run_jobs(seed: int, conditions: Conditions) -> World:
    """Run three competing jobs with stopped nodes for two minutes; end them, and return the world."""
    world = World(seed, workers=3, schedulers=3)
    world.conditions = conditions
    peers = [*world.workers, *(scheduler.peer for scheduler in world.schedulers)]
    for _ in range(12):
        for scheduler in world.schedulers:
            world.random.choice([scheduler.close, lambda: None, scheduler.dispatch])()
            if not len(scheduler.leases):
                scheduler.ask(train=2)
        world.stop(world.random.choice(peers), world.random.choice((0.5, 3.0, 12.0)))
        world.run(10.0)
    world.settle()
    world.check_quiescence()
    return world


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))])
def test_jobs_are_placed_in_the_model(seed: int) -> None:
    """The model reaches what it is about: without placed jobs its invariants would hold trivially."""
    assert sum(scheduler.placed for scheduler in run_jobs(seed, Conditions()).schedulers) >= 3
    assert sum(scheduler.placed for scheduler in run_jobs(seed, ROUGH).schedulers) >= 1


def test_deferred_requests_get_offers_in_the_model_and_hold_nothing_for_long() -> None:
    """Demand exceeds the three workers. Once all jobs have ended, nothing is held when the last deadline is over."""
    worlds = [World(seed, workers=3, schedulers=3) for seed in range(5)]
    for world in worlds:
        for scheduler in world.schedulers:
            scheduler.ask(train=2)
        world.run(10.0)
        for scheduler in world.schedulers:
            scheduler.close()
        world.run(5.0 + 2.5)
        world.check_quiescence()
    assert sum(worker.deferred for world in worlds for worker in world.workers.values()) >= 5


def test_the_model_detects_a_scheduler_that_counts_a_lease_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    record = HeldLeases.record_renewal

    def from_the_answer(self, lease, peer, asked_at, life=RENEWED_LEASE):  # type: ignore[no-untyped-def]
        record(self, lease, peer, asked_at + 0.5, life)

    monkeypatch.setattr(HeldLeases, "record_renewal", from_the_answer)
    with pytest.raises(AssertionError, match="its worker has given it away"):
        run_all_seeds()


def test_the_model_detects_a_worker_that_frees_what_processes_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    release = LeaseManager.release

    def release_at_once(self, lease_id, scheduler):  # type: ignore[no-untyped-def]
        lease = release(self, lease_id, scheduler)
        self.detach_job(lease_id)
        return lease

    monkeypatch.setattr(LeaseManager, "release", release_at_once)
    with pytest.raises(AssertionError, match="taken"):
        run_all_seeds()


def run_all_seeds() -> None:
    for seed in range(20):
        run_jobs(seed, ROUGH)
