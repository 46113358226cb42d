"""A model and a dataset by their digests on a real network; a worker with a cache fetches each byte of them once."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_network import Job, LocalNetwork, running
from support.numpy_executor import executor_toml, write_model

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(180)]

FEATURES = 64
ROUNDS = 8
"""400 samples each, of a dataset with fewer than 1600: two epochs."""


class Network(LocalNetwork):
    """One worker with a cache, and a model in an archive that the data node announces."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1)
        write_model(root / "small-model", FEATURES, unused=100_000)
        with tarfile.open(root / "model.tar", "w") as archive:
            archive.add(root / "small-model", "small-model")
        self.archive, self.dataset = root / "model.tar", root / "digits.tar"
        self.sha256 = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        self.extend("worker-1", f'[cache]\npath = "{root / "cache"}"\nmax_size = 0.1\n{executor_toml("numpy")}')
        data = self.configuration("data")
        data.write_text(f"provide = {json.dumps([str(self.archive), str(self.dataset)])}\n{data.read_text()}")

    def _run(self, program: str, *args: str) -> None:
        if program != "hypha-accelerate-executor":  # its model, which needs torch, is not used
            super()._run(program, *args)
        if program == "hypha-data":
            with tarfile.open(self.dataset, "w") as archive:
                archive.add(self.folders.data / "digits", "digits")

    def train(self, dataset: str | None = None) -> Job:
        """Run a job to its end."""
        job = self.job(rounds=ROUNDS, kind="numpy", model=f'dht = "{self.sha256}"', dataset=dataset)
        assert job.wait(120) == 0, job.log
        return job

    def sent_to_worker(self) -> Counter[int]:
        """Return how many files of each size the data node has sent to the worker."""
        return Counter(map(int, re.findall(r" for worker-1…\w{6}, (\d+) bytes", self.log("data"))))


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with running(Network(tmp_path / "run")) as network:
        yield network


def test_neither_the_second_epoch_nor_the_second_job_fetches_model_or_slices_again(network: Network) -> None:
    first = network.train()
    members = [member for record in first.records("round") for member in record["members"]]
    assert max(epoch for member in members for epoch, *_ in member["ranges"]) >= 1
    sent = network.sent_to_worker()
    slices = Counter(path.stat().st_size for path in (network.folders.data / "digits").glob("*.safetensors"))
    assert sent == slices + Counter([network.archive.stat().st_size])
    second = network.train()
    assert second.records("round")[-1]["weights"] == first.records("round")[-1]["weights"]
    assert network.sent_to_worker() == sent


def test_a_dataset_in_an_archive_trains_as_that_of_data_nodes(network: Network) -> None:
    packed = network.train(f'dht = "{hashlib.sha256(network.dataset.read_bytes()).hexdigest()}"')
    assert set(network.sent_to_worker()) == {network.archive.stat().st_size}, "the scheduler has sent the slices"
    assert not list(packed.directory.glob(".dataset*")), "nor is its copy left"
    named = network.train()
    assert packed.records("round")[-1]["weights"] == named.records("round")[-1]["weights"]
