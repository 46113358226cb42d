"""Replays a job of the numpy executor: the command for `hypha-scheduler replay --executor`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hypha.accelerate_executor.data.recorded_batches import recorded_batches
from hypha.accelerate_executor.replay.__main__ import read_plan
from hypha.accelerate_executor.replay.computation import RoundComputation
from hypha.accelerate_executor.replay.verdict import conclude, describe_round
from hypha_local.processes import script
from hypha_proto.contributions import Contribution
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import TrainConfig
from hypha_proto.safetensors_io import TensorFile
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights
from support.numpy_executor import Weights, read_weights, step


class NumpyTrainee:
    """Stands for a `TorchTrainee`; the executor keeps nothing from round to round but the weights."""

    def __init__(self, weights: Weights, slices: Mapping[int, Path]) -> None:
        self.weights, self.slices = weights, slices

    def configure(self, config: TrainConfig) -> None:
        self.config = config

    def weights_digest(self) -> str:
        return digest_weights(self.weights.items())

    def train(self, peer: PeerId, number: int, stated: Contribution, path: Path) -> None:
        local, samples = {name: values.copy() for name, values in self.weights.items()}, 0
        for batch in recorded_batches(self.slices.__getitem__, stated.ranges, stated.batch_size, self.config.seed or 0):
            images, labels = batch.tensors["pixel_values"], batch.tensors["labels"]
            step(local, images.reshape(len(labels), -1), labels, self.config.optimizer.learning_rate)
            samples += batch.samples
        shapes = {name: values.shape for name, values in local.items()}
        differences = ((name, values - self.weights[name]) for name, values in local.items())
        write_update(path, shapes, differences, UpdateMetadata(round=number, samples=samples))

    def forget(self, peer: PeerId) -> None:
        """Nothing is kept."""

    def merge(self, update: Path) -> None:
        with TensorFile(update) as file:
            for name, values in self.weights.items():
                values += np.asarray(file.tensor(name))


def replay_job(directory: Path, data: Path) -> subprocess.CompletedProcess[str]:
    """Run `hypha-scheduler replay` with this module as the executor; the worker gives it one thread."""
    executor = shlex.join([sys.executable, str(Path(__file__).resolve())])
    command = [script("hypha-scheduler"), "replay", str(directory), "--data", str(data), "--threads", "1"]
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [*command, "--executor", executor], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def main() -> int:
    """Replay a plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    plan = read_plan(parser.parse_args().plan)
    slices = {entry.index: Path(entry.path) for entry in plan.slices}
    trainee, found = NumpyTrainee(read_weights(Path(plan.model) / "model.safetensors"), slices), []
    with tempfile.TemporaryDirectory() as folder:
        for findings in RoundComputation(plan, trainee, Path(folder)).rounds():
            found.append(findings)
            print(*describe_round(findings), sep="\n")
    proven, verdict = conclude(found, len(plan.rounds))
    print(verdict)
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
