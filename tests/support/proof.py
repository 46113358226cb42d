"""Proof that a DiLoCo job on a real network has lost nothing: its record, `audit` and `replay`."""

from __future__ import annotations

import itertools
import json
from collections import Counter

from support.local_network import Job, LocalNetwork
from support.numpy_replay import replay_job


def prove(network: LocalNetwork, job: Job, rounds: int, timeout: float = 120.0) -> None:
    """Check that a job ends well, and see `check_rounds`."""
    assert job.wait(timeout) == 0, job.log
    assert "Traceback" not in job.log, job.log
    check_rounds(network, job, rounds)


def check_rounds(network: LocalNetwork, job: Job, rounds: int) -> None:
    """Check that each round of a job that has ended was recorded once, and that no sample counts twice.

    Each round must begin with the weights with which the one before ended; all are computed again and compared to the
    bit. The job's executors must be `numpy_executor`.
    """
    recorded = job.records("round")
    assert [record["round"] for record in recorded] == list(range(1, rounds + 1))
    for before, after in itertools.pairwise(recorded):
        assert after["weights_before"] == before["weights"]
        for member in after["members"]:
            assert member["contribution"]["weights"] == before["weights"]
    audited = network.scheduler_command(job, "audit")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    check_used_once(job)
    replayed = replay_job(job.directory, network.folders.data / "digits")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.splitlines()[-1] == f"proven: {rounds} rounds equal to the bit"


def check_used_once(job: Job) -> None:
    """Check that each sample counts once in an epoch, and that the numbers of samples are those of the ranges."""
    members = [member for record in job.records("round") for member in record["members"]]
    used = Counter(
        (epoch, index, position)
        for member in members
        for epoch, index, first, end in member["ranges"]
        for position in range(first, end)
    )
    assert set(used.values()) == {1}
    assert used.total() == sum(member["samples"] for member in members)


def check_whole_epochs(job: Job, epochs: int) -> None:
    """Check that every sample of the first epochs was used: what members that left had in hand went to others."""
    manifest = json.loads((job.directory / "manifest.json").read_text())
    used: Counter[int] = Counter()
    for record in job.records("round"):
        for member in record["members"]:
            for epoch, _, first, end in member["ranges"]:
                used[epoch] += end - first
    whole = sum(entry["samples"] for entry in manifest["slices"])
    assert {epoch: used[epoch] for epoch in range(epochs)} == dict.fromkeys(range(epochs), whole)
