"""Whole DiLoCo jobs on a simulated network whose executors report batches in the background."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from support.diloco_invariants import check_job
from support.diloco_network import Delays, Network
from support.diloco_simulation import BATCH, job_table

from hypha_net.testing import simulate

ROUNDS = 6
TARGET = 40 * BATCH
TABLE = job_table(
    rounds={"update_rounds": ROUNDS, "avg_samples_between_updates": TARGET},
    resources={"num_workers": 4, "min_workers": 2, "allocation_timeout": 60.0},
)


def finish(network: Network) -> Network:
    """Run a job that must finish; check what must hold of every job, and that each batch was counted once."""
    simulate(network.run, seed=network.seed)
    check_job(network)
    assert network.outcome == "finished"
    assert len(network.rounds) == ROUNDS
    return network


def samples(network: Network, number: int) -> int:
    """Return the samples of a recorded round."""
    return sum(member["samples"] for member in network.rounds[number - 1]["members"])


@pytest.mark.parametrize("slowness", [(1.0,), (1.0, 1.0, 2.0, 4.0)], ids=["equal", "uneven"])
def test_rounds_have_about_the_target_and_no_worker_is_suspected(slowness: Sequence[float]) -> None:
    network = finish(Network(table=TABLE, slowness=slowness, message_faults=0.0))

    assert network.seen["reports checked"] >= 4 * ROUNDS - 4
    assert network.named("worker_suspected") == []
    assert all(len(record["members"]) == 4 for record in network.rounds)
    later = [samples(network, number) for number in range(2, ROUNDS + 1)]
    assert all(0.8 * TARGET <= found <= 1.3 * TARGET for found in later), later


@pytest.mark.parametrize("delays", [Delays(0.02, batch=0.02), Delays(0.1, batch=0.05)], ids=["short", "slow links"])
@pytest.mark.parametrize("slowness", [(1.0,), (4.0, 1.0, 2.0, 1.0)], ids=["equal", "uneven"])
def test_short_rounds_have_the_target_to_a_batch_a_worker(slowness: Sequence[float], delays: Delays) -> None:
    network = finish(Network(table=TABLE, slowness=slowness, message_faults=0.0, delays=delays))

    found = [samples(network, number) - TARGET for number in range(2, ROUNDS + 1)]
    assert all(abs(each) <= 4 * BATCH for each in found), found
    assert network.seen["ends confirmed"] <= 2 * 4 * ROUNDS


@pytest.mark.parametrize("seed", range(3))
def test_with_lost_messages_too_rounds_have_the_target(seed: int) -> None:
    rounds = {"update_rounds": ROUNDS, "avg_samples_between_updates": 4 * TARGET}
    table = job_table(rounds=rounds, resources={"num_workers": 4, "min_workers": 2, "allocation_timeout": 60.0})
    delays = Delays(message=0.02, batch=0.05)
    network = finish(Network(seed=seed, table=table, slowness=(4.0, 1.0, 2.0, 1.0), message_faults=0.03, delays=delays))

    suspected = {event["round"] for event in network.named("worker_suspected")}
    found = {number: samples(network, number) - 4 * TARGET for number in range(2, ROUNDS + 1)}
    assert all(abs(each) <= 4 * BATCH for number, each in found.items() if number not in suspected), found


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 8))])
def test_lost_doubled_and_late_messages_change_nothing(seed: int) -> None:
    network = finish(Network(seed=seed, table=TABLE, message_faults=0.2))

    faults = ("batches lost", "batches doubled", "answer to batches lost")
    assert all(network.seen[fault] > 0 for fault in faults)
    assert network.seen["reports checked"] > ROUNDS


def test_long_links_hold_no_batch_up_once_rounds_are_known() -> None:
    network = finish(Network(table=TABLE, message_faults=0.0, delays=Delays(message=0.3, batch=0.1)))

    assert network.named("worker_suspected") == []
    assert network.seen["reports checked"] >= 4 * ROUNDS - 4


@pytest.mark.parametrize("seed", range(4))
def test_a_job_goes_on_with_a_scheduler_that_was_started_again(seed: int) -> None:
    async def kill(network: Network) -> None:
        await anyio.sleep(8.0 + seed)
        network.kill_scheduler()

    network = finish(Network(seed=seed, table=TABLE, message_faults=0.1, during=kill))

    assert network.died == 1
