"""Faults in rounds on a real network: updates that must not count, and a scheduler whose disk is full.

Three workers run a small numpy executor, that of worker 3 sends wrong updates in some rounds. After each job
`hypha-scheduler audit` proves which samples count.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.local_network import Job, LocalNetwork, local_network
from support.numpy_executor import (
    CLASSES,
    EXIT,
    FALSE_UPDATE,
    FALSE_WEIGHTS,
    NAN,
    RANGES,
    REPLAY,
    SCALE,
    SHAPE,
    executor_toml,
    write_model,
)
from support.numpy_replay import replay_job
from support.small_disk import fill, small_disk
from support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(240)]

WORKERS = 3
WRONG = "worker-3"
"""The worker whose executor sends wrong updates."""
FEATURES = 64
LARGE = 500_000
"""Parameters of the large model that training does not change: an update has 2 MB."""
DISK = 40 << 20
"""Bytes of the scheduler's small disk."""
DELAY = 0.02
"""Seconds that each batch takes longer; a worker has about 25 of them in a round."""
ROUNDS = 5
MORE = 8
"""Rounds of a job in which an executor is started again."""
JOB_ENDS = 120.0
"""Seconds within which a job ends, on a busy machine, too."""
PAUSE = r" pauses: | paused reason="
"""What a scheduler logs when a job pauses."""
OVERHEAD = 1.02
"""Bytes sent, of four for each parameter."""
NOTHING: Mapping[int, str] = {}
SCENARIOS: Mapping[str, Mapping[int, str]] = {
    "unusable": {1: SHAPE, 3: NAN},
    "untrue": {2: FALSE_WEIGHTS, 4: REPLAY},
    "unassigned": {2: RANGES, 3: SCALE, 4: FALSE_UPDATE},
    "repeated": {1: NAN, 2: RANGES, 3: SHAPE},
    "quitting": {2: EXIT},
    "honest": NOTHING,
}
"""What is wrong with the updates of worker 3, by the name of its executor and by round."""
EXPLODES = 3
"""Round in which the updates of all workers are too large, with the executor `EXPLODING`."""
EXPLODING = "exploding"
REASONS = {
    NAN: "tensor 'bias' holds NaN or infinity",
    EXIT: "tensor 'bias' holds NaN or infinity",
    SHAPE: "tensor 'weight' is F32 [9, 64], expected F32 [10, 64]",
    FALSE_WEIGHTS: "it began from weights with digest",
    REPLAY: "for another round already",
    RANGES: "not assigned",
    SCALE: "is over 10 times that of other updates",
}
"""What the event of a refused update says."""


def executors(worker: str) -> str:
    """Return TOML of the executors of a worker, one for each scenario."""
    return executor_toml(EXPLODING, DELAY, {EXPLODES: SCALE}) + "".join(
        executor_toml(name, DELAY, faults if worker == WRONG else NOTHING) for name, faults in SCENARIOS.items()
    )


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    names = [f"worker-{number}" for number in range(1, WORKERS + 1)]
    with local_network(root, WORKERS, **{name.replace("-", "_"): executors(name) for name in names}) as running:
        write_model(root / "small-model", FEATURES)
        write_model(root / "large-model", FEATURES, unused=LARGE)
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: LocalNetwork) -> Iterator[None]:
    yield
    network.check_quiet()


def start(
    network: LocalNetwork, kind: str, model: str = "small-model", settings: str = "", rounds: int = ROUNDS
) -> Job:
    """Start a job that goes on with two of its three workers."""
    found = f'path = "../{model}"'
    return network.job(rounds=rounds, kind=kind, model=found, min_workers=WORKERS - 1, settings=settings)


def directory_of(job: Job) -> Path:
    """Return the directory of a job."""
    [journal] = job.runs.glob("*/journal.jsonl")
    return journal.parent


def rounds_of(job: Job) -> list[dict[str, Any]]:
    """Return the records of the rounds of a job, oldest first."""
    lines = (directory_of(job) / "journal.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["record"] == "round"]


def check(network: LocalNetwork, job: Job, rounds: int = ROUNDS) -> None:
    """Check that a job has ended well, each round once, and that no sample counts twice."""
    assert job.wait(JOB_ENDS) == 0, job.log
    assert "Traceback" not in job.log, job.log
    assert [record["round"] for record in rounds_of(job)] == list(range(1, rounds + 1))
    for before, after in itertools.pairwise(rounds_of(job)):
        assert after["weights_before"] == before["weights"]
    audited = network.scheduler_command(job, "audit")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    replayed = replay_job(directory_of(job), network.folders.data / "digits")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def members_of(job: Job) -> dict[int, set[str]]:
    """Return the members of each round."""
    return {record["round"]: {member["peer"] for member in record["members"]} for record in rounds_of(job)}


def check_refusals(
    network: LocalNetwork, job: Job, faults: Mapping[int, str], last: int = ROUNDS, returns: int | None = None
) -> None:
    """Check that of worker 3 these updates were refused, those and no others, and that they do not count.

    Args:
        network: the network.
        job: a job that has ended.
        faults: what is wrong with the updates, by round.
        last: the last round in which worker 3 takes part, or before it begins anew.
        returns: the round with which it begins anew; that may be over before its first batch.
    """
    wrong, everyone = network.peer_id(WRONG), {network.peer_id(name) for name in network.trainers}
    refused = job.events("update_refused")
    assert {event["worker"] for event in refused} == {wrong}
    assert [(event["round"], event["count"]) for event in refused] == list(
        zip(faults, itertools.count(1), strict=False)
    )
    for event in refused:
        assert REASONS[faults[event["round"]]] in event["reason"]
    for number, members in members_of(job).items():
        if number == returns:
            continue
        counts = number not in faults and (number <= last or (returns is not None and number > returns))
        assert members == (everyone if counts else everyone - {wrong}), f"round {number}"
    unused = [(record["round"], entry["peer"]) for record in rounds_of(job) for entry in record["unused"]]
    assert unused == [(number, wrong) for number in faults]
    check_samples(job)


def check_samples(job: Job) -> None:
    """Check that what refused updates were computed from was used all the same: all samples of the first epochs were.

    That none was used twice is what the audit proves.
    """
    manifest = json.loads((directory_of(job) / "manifest.json").read_text())
    used: Counter[int] = Counter()
    for record in rounds_of(job):
        for member in record["members"]:
            for epoch, _, first, end in member["ranges"]:
                used[epoch] += end - first
    assert len(used) > 2
    assert used[0] == used[1] == sum(entry["samples"] for entry in manifest["slices"])


@pytest.mark.parametrize("kind", ["unusable", "untrue", "unassigned"])
def test_updates_that_must_not_count_are_refused_and_the_job_goes_on(network: LocalNetwork, kind: str) -> None:
    job = start(network, kind)
    check(network, job)
    refused = {number: fault for number, fault in SCENARIOS[kind].items() if fault != FALSE_UPDATE}
    check_refusals(network, job, refused)
    assert job.events("worker_excluded") == job.events("worker_lost") == []
    if FALSE_UPDATE in SCENARIOS[kind].values():
        assert "answered 400 bad-request: contribution.update: " in network.log(WRONG)


def test_three_updates_that_must_not_count_exclude_their_worker(network: LocalNetwork) -> None:
    rounds = 8
    job = start(network, "repeated", rounds=rounds)
    wait_until(lambda: bool(job.events("worker_excluded")), 60, "the exclusion of a worker")
    wait_until(lambda: not network.executors(WRONG), 60, "the end of the executor of a worker that was excluded")
    assert job.child.process.poll() is None, "the lease was not released before the end of the job"
    check(network, job, rounds)
    faults = SCENARIOS["repeated"]
    [excluded] = job.events("worker_excluded")
    assert excluded["worker"] == network.peer_id(WRONG)
    assert "3 of its updates were refused" in excluded["reason"]
    check_refusals(network, job, faults, last=len(faults))


def test_an_executor_that_exits_as_its_update_is_refused_is_started_again(network: LocalNetwork) -> None:
    job = start(network, "quitting", rounds=MORE)
    check(network, job, MORE)
    [number] = SCENARIOS["quitting"]
    [restarted] = job.events("worker_restarted")
    assert restarted["worker"] == network.peer_id(WRONG)
    [returns] = [event["round"] for event in job.events("worker_joined")]
    assert number < returns < MORE
    check_refusals(network, job, SCENARIOS["quitting"], last=number, returns=returns)
    assert job.events("worker_lost") == job.events("worker_excluded") == []


def test_a_loss_that_explodes_ends_the_job_with_the_last_good_model(network: LocalNetwork) -> None:
    job = start(network, EXPLODING, rounds=MORE)
    assert job.wait(JOB_ENDS) == 1, job.log
    good = directory_of(job) / "checkpoints" / f"round-{EXPLODES - 1}"
    assert "the loss has exploded: it is " in job.log
    assert f"the last good model is {good}. Start from it with a lower learning rate" in job.log
    assert (good / "model.safetensors").exists()
    assert [record["round"] for record in rounds_of(job)] == list(range(1, EXPLODES + 4))
    assert job.events("update_refused") == []
    audited = network.scheduler_command(job, "audit")
    assert audited.returncode == 0, audited.stdout + audited.stderr


def pauses(job: Job) -> int:
    """Return how often a job has said in its log that it pauses."""
    assert job.child.process.poll() is None, job.log
    return len(re.findall(PAUSE, job.log))


def test_a_job_pauses_while_the_disk_of_its_scheduler_is_full(network: LocalNetwork) -> None:
    """Without any room a record finds none, with little the outer update, with some more the weights after it."""
    rounds, update = 8, 4 * LARGE
    with small_disk(network.folders.runs, DISK):
        job = start(network, "honest", model="large-model", rounds=rounds)
        job.wait_for_round(1)
        for left in (0, update // 4, update + update // 2):
            pause_and_continue(job, network.folders.runs / "filler", left)
        check(network, job, rounds)
        assert job.events("worker_lost") == job.events("worker_late") == []
        assert all(len(members) == WORKERS for members in members_of(job).values())


def pause_and_continue(job: Job, filler: Path, left: int) -> None:
    """Leave so many bytes on the disk until the job says that it pauses, then make room until it has gone on."""
    before, ended = pauses(job), len(job.events("continued"))

    def is_paused() -> bool:
        fill(filler, left)  # again and again: the scheduler deletes files, too
        return pauses(job) > before

    wait_until(is_paused, 60, f"a pause of the job with {left} bytes left")
    reason = re.split(PAUSE, job.log)[-1]
    assert reason.startswith(f"{directory_of(job)}: there is no room for the job's files: ")
    filler.unlink()
    wait_until(lambda: len(job.events("paused")) == len(job.events("continued")) > ended, 60, "the end of the pause")


def test_a_round_costs_four_bytes_for_each_parameter_and_peer(network: LocalNetwork) -> None:
    """Each worker sends its update, the parameter server the outer update to the workers and the scheduler."""
    rounds = 3
    job = start(network, "honest", model="large-model", rounds=rounds)
    check(network, job, rounds)
    result = json.loads((directory_of(job) / "result.json").read_text())
    update = 4 * (LARGE + CLASSES * (FEATURES + 1)) * rounds
    assert len(result["workers"]) == WORKERS
    for worker in result["workers"]:
        assert update <= worker["bytes_sent"] <= OVERHEAD * update
    assert (WORKERS + 1) * update <= result["parameter_server"]["bytes_sent"] <= OVERHEAD * (WORKERS + 1) * update
