"""Training executor for tests on real processes: softmax regression in numpy, which starts in a second.

A process executor with the bridge, batches and exit codes of `hypha.accelerate_executor`, but without torch.
Deterministic: the update follows from the global weights and the samples. It can be told to fail at chosen places
(`Failure`).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.bridge.client import Bridge
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.diloco.contribution import SampleRecord
from hypha.accelerate_executor.diloco.round_countdown import NextStep, RoundCountdown
from hypha.accelerate_executor.errors import ContributionRefused, ModelError, NotTakingPart, RoundWentOn
from hypha.accelerate_executor.exit_codes import exit_code_of, log_to_stderr, run_as_process
from hypha.accelerate_executor.modeling.archive import unpacked_files
from hypha.accelerate_executor.modeling.hf import model_directory
from hypha.accelerate_executor.training import read_settings
from hypha_proto.bridge_api import RoundJoined
from hypha_proto.contributions import OPTIMIZER_RESET, Contribution
from hypha_proto.file_digests import digest_file
from hypha_proto.job_spec import TrainConfig
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.training_reports import BatchDone, Done, RoundMetrics, SendingUpdate, UpdateMerged
from hypha_proto.update_file import UpdateMetadata, open_update, write_update
from hypha_proto.weights_digest import digest_weights

logger = logging.getLogger(__name__)

CLASSES = 10
DELAY = "HYPHA_NUMPY_DELAY"
"""Environment variable with the seconds that each batch takes longer."""
FAILURES = "HYPHA_NUMPY_FAILURES"
"""Environment variable with the places where the executor fails: a JSON array of objects like `Failure`."""
COUNTS = "HYPHA_NUMPY_COUNTS"
"""Environment variable with the path of the file that lists the failures that have happened: one position a line."""
KILL = "kill"
"""The executor ends itself with SIGKILL."""
MEMORY = "memory"
"""MemoryError is raised."""
_TIMEOUT = 600.0
_FETCHES = 40
"""Attempts to fetch weights that a scheduler which has just begun may not serve yet."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A place where the executor dies, once over all its restarts."""

    round: int
    how: str
    """`KILL` or `MEMORY`."""
    batch: int
    """Batch of the round, from 1, that is computed and not reported."""
    above: int = 0
    """It happens only while more samples than this are computed at once: the micro-batch, or else the batch."""


def write_model(folder: Path, features: int, seed: int = 0, unused: int = 0) -> int:
    """Write a start model; return its number of parameters.

    Args:
        folder: where; created.
        features: numbers in a sample.
        seed: seed of the weights.
        unused: number of further parameters, which training does not change.
    """
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(seed).normal(scale=0.01, size=(CLASSES, features)).astype(np.float32)
    tensors = {"bias": np.zeros(CLASSES, np.float32), "weight": drawn}
    if unused:
        tensors["unused"] = np.ones(unused, np.float32)
    infos = {name: TensorInfo("F32", values.shape) for name, values in tensors.items()}
    with TensorFileWriter(folder / "model.safetensors", infos, {}) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
    (folder / "config.json").write_text("{}\n")
    return sum(values.size for values in tensors.values())


def executor_toml(name: str, delay: float = 0.0, failures: Sequence[Failure] = (), counts: Path | None = None) -> str:
    """Return TOML of a worker's ``[[executors]]`` that runs this module.

    Args:
        name: name of the executor.
        delay: seconds that each batch takes longer.
        failures: where it dies.
        counts: file that lists these; its folder must exist and becomes writable for the executor.
    """
    env, writable = {DELAY: str(delay)}, ""
    if counts is not None:
        env |= {FAILURES: json.dumps([asdict(failure) for failure in failures]), COUNTS: str(counts.resolve())}
        writable = f"writable = [{json.dumps(str(counts.resolve().parent))}]\n"
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in env.items())
    options = ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    args = json.dumps([str(Path(__file__).resolve()), *options])
    return (
        f'\n[[executors]]\nclass = "train"\nname = "{name}"\nruntime = "process"\ncmd = {json.dumps(sys.executable)}\n'
        f"args = {args}\nenv = {{ {pairs} }}\n{writable}"
    )


class Trainer:
    """The rounds of one job."""

    def __init__(self, bridge: Bridge, config: TrainConfig) -> None:
        self.bridge, self.config = bridge, config
        self.batches = Batches(lambda _count: bridge.fetch(config.data, "slices"), config.batch_size, config.seed or 0)
        fetched = [each.path for each in bridge.fetch(config.model.artifact, "model")]
        self.model = model_directory(unpacked_files(fetched, is_model=True)) / "model.safetensors"
        self.weights = read_weights(self.model)
        self.outer_updates = bridge.updates(config.results, "incoming")
        self.delay = float(os.environ.get(DELAY, "0"))
        self.countdown = RoundCountdown(config.first_round or 1)
        self.samples = 0
        """Samples of this round."""

    @property
    def round(self) -> int:
        return self.countdown.round

    def run(self) -> None:
        """Train until the job is over."""
        try:
            self.begin()
            while self.train_round():
                pass
        except NotTakingPart as end:
            logger.info("no work is left: %s", end)
        finally:
            self.batches.close()

    def begin(self) -> None:
        """Begin with the round that the scheduler names, or that the task says."""
        if self.config.join:
            self.enter(self.bridge.join())
        elif self.round > 1 and self.config.weights is not None:
            self.fetch_weights(self.round - 1)

    def train_round(self) -> bool:
        """Train a round and exchange its update; return whether another one follows."""
        trained = self.train()
        if trained is None:
            return False
        update, contribution, loss = trained
        if isinstance(self.bridge.report(SendingUpdate()), Done):
            return False
        try:
            self.bridge.send(self.config.updates, update, self.round, self.samples, contribution)
        except RoundWentOn as closed:
            logger.info("round %d: closed: %s", self.round, closed)
            update.unlink()
            self.enter(self.bridge.join())
            return True
        except ContributionRefused as refusal:
            logger.info("round %d: refused: %s", self.round, refusal)
        if isinstance(self.bridge.report(self.metrics(loss)), Done):
            return False
        self.merge()
        update.unlink()
        logger.info("round %d: %d samples, loss %.4f", self.round, self.samples, loss)
        return self.countdown.after_merge(self.bridge.report(UpdateMerged())) is NextStep.TRAIN

    def enter(self, joined: RoundJoined) -> None:
        """Begin with a round: without samples that were assigned before, from the weights after the round before."""
        for _ in range(_FETCHES):
            self.batches.drop()
            self.countdown = RoundCountdown(joined.round)
            logger.info("joined at round %d", joined.round)
            if joined.weights is None:
                self.weights = read_weights(self.model)
                return
            if digest_weights(self.weights.items()) == joined.weights or self.fetch_weights(joined.round - 1, True):
                found = digest_weights(self.weights.items())
                if found != joined.weights:
                    raise ModelError(f"the weights before round {self.round} are {found}, expected {joined.weights}")
                return
            joined = self.bridge.join()  # the scheduler has gone on meanwhile
        raise ModelError(f"the job was ahead of the weights {_FETCHES} times")

    def metrics(self, loss: float) -> RoundMetrics:
        """Return the metrics of the round."""
        found = {"loss": loss, "samples": float(self.samples)}
        if self.config.micro_batch is not None:
            found["micro_batch"] = float(self.config.micro_batch)
        return RoundMetrics(round=self.round, metrics=found)

    def train(self) -> tuple[Path, Contribution | None, float] | None:
        """Train one round; return the update, what it was computed from, and the mean loss; None if the job is over."""
        local = {name: values.copy() for name, values in self.weights.items()}
        record, following, batches, losses = SampleRecord(), NextStep.TRAIN, 0, 0.0
        self.samples = 0
        while following is NextStep.TRAIN:
            began = time.perf_counter()
            batch = next(self.batches, None)
            if batch is None:
                return None
            images, labels = batch.tensors["pixel_values"], batch.tensors["labels"]
            rate = self.config.optimizer.learning_rate
            losses += step(local, images.reshape(len(labels), -1), labels, rate) * batch.samples
            time.sleep(self.delay)
            record.add(batch)
            self.samples, batches = self.samples + batch.samples, batches + 1
            fail_if_told(self.round, batches, self.config.micro_batch or self.config.batch_size)
            milliseconds = 1000 * (time.perf_counter() - began)
            done = BatchDone(batch_size=batch.samples, slices=dict(batch.slices), batch_ms=milliseconds)
            following = self.countdown.after_batch(self.bridge.report(done))
        if following is NextStep.STOP:
            return None
        path = self.bridge.work_dir / f"update-{self.round}.safetensors"
        differences = {name: values - self.weights[name] for name, values in local.items()}
        shapes = {name: values.shape for name, values in differences.items()}
        write_update(path, shapes, differences.items(), UpdateMetadata(round=self.round, samples=self.samples))
        return path, self.contribution(path, record, batches), losses / self.samples

    def contribution(self, update: Path, record: SampleRecord, batches: int) -> Contribution | None:
        """Return what the update was computed from."""
        if self.config.term is None or record.ranges is None:
            return None
        member = "" if self.config.member is None else self.config.member
        seed = hashlib.sha256(f"{self.config.seed or 0}/{member}/{self.round}".encode()).digest()
        return Contribution(
            round=self.round,
            weights=digest_weights(self.weights.items()),
            ranges=record.ranges,
            batches=batches,
            batch_size=self.config.batch_size,
            seed=int.from_bytes(seed[:8], "big") >> 1,
            optimizer=OPTIMIZER_RESET,
            update=digest_file(update),
        )

    def merge(self) -> None:
        """Wait for the outer update of the round and add it."""
        outer = self.outer_updates.wait(self.round, _TIMEOUT)
        file, _ = open_update(outer.path)
        with file:
            for name, values in self.weights.items():
                values += file.tensor(name)
        outer.path.unlink()
        if outer.weights is not None and digest_weights(self.weights.items()) != outer.weights:
            logger.info("round %d: the weights differ", self.round)
            self.fetch_weights(self.round)

    def fetch_weights(self, number: int, may_be_over: bool = False) -> bool:
        """Replace the weights by the scheduler's after a round; return False if it is further and may be."""
        assert self.config.weights is not None
        for _ in range(_FETCHES):
            [fetched] = self.bridge.fetch(self.config.weights, "weights")
            with TensorFile(fetched.path) as file:
                found = int(file.metadata["round"])
            if found == number:
                self.weights = read_weights(fetched.path)
                return True
            if found > number and may_be_over:
                return False
            time.sleep(0.25)
        raise ModelError(f"the weights of round {number} are not there, but those of round {found}")


def fail_if_told(number: int, batch: int, at_once: int) -> None:
    """Fail if this is a place to do so, and it has not happened there; see `Failure`.

    Raises:
        MemoryError: as told.
    """
    for position, each in enumerate(json.loads(os.environ.get(FAILURES, "[]"))):
        failure = Failure(**each)
        if (failure.round, failure.batch) == (number, batch) and at_once > failure.above and _claim(position):
            logger.warning("round %d: %s, as told", number, failure.how)
            if failure.how == MEMORY:
                raise MemoryError("as told")
            os.kill(os.getpid(), signal.SIGKILL)


def _claim(position: int) -> bool:
    """Note a failure and return True, unless it has happened already."""
    with Path(os.environ[COUNTS]).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # executors of other workers may be at the same place at the same time
        file.seek(0)
        if str(position) in file.read().split():
            return False
        file.write(f"{position}\n")
        return True


def read_weights(path: Path) -> Weights:
    """Read all tensors of a file."""
    with TensorFile(path) as file:
        return {name: np.array(file.tensor(name)) for name in sorted(file.tensors)}


def step(weights: Weights, images: NDArray[np.float32], labels: NDArray[np.int64], rate: float) -> float:
    """Take a step of gradient descent; return the mean loss before it."""
    scores = images @ weights["weight"].T + weights["bias"]
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(np.maximum(shares[rows, labels], 1e-12)).mean())
    shares[rows, labels] -= 1
    shares /= len(labels)
    weights["weight"] -= np.float32(rate) * (shares.T @ images)
    weights["bias"] -= np.float32(rate) * shares.sum(axis=0)
    return loss


def main() -> int:
    """Run the executor; return its exit code."""
    parser = argparse.ArgumentParser()
    for name in ("--socket", "--work-dir"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args()
    log_to_stderr(logging.INFO)

    def train() -> None:
        with Bridge(options.socket, options.work_dir.resolve(), _TIMEOUT) as bridge:
            Trainer(bridge, read_settings(options.job)).run()

    return exit_code_of(train, options.work_dir)


if __name__ == "__main__":
    run_as_process(main)
