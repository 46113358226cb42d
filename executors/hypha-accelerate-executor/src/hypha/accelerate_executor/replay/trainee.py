"""One model that trains all members of a job in turn, so that a replay needs the memory of one worker.

What a worker keeps from round to round is written to a file for each member: the state of its inner optimizer, and the
model's buffers, some of which are never exchanged. Its weights are the global ones at the beginning of each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from hypha.accelerate_executor.data.preprocess import preprocessed_columns
from hypha.accelerate_executor.data.recorded_batches import recorded_batches
from hypha.accelerate_executor.diloco.round_seed import seed_generators
from hypha.accelerate_executor.distributed.accelerator import choose_device
from hypha.accelerate_executor.distributed.process_group import SingleProcess
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.replay.computation import NotProvableError
from hypha.accelerate_executor.training_setup import Setup, build_setup
from hypha_proto.contributions import OPTIMIZER_KEPT, Contribution
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import TrainConfig

_STATES: Final = "members"


class TorchTrainee:
    """Trains the members of a job, each from the global weights, with its model and training step."""

    def __init__(
        self, config: TrainConfig, files: ModelFiles, slices: Mapping[int, Path], options: OwnerOptions, folder: Path
    ) -> None:
        """Load the start model.

        Args:
            config: configuration of a training worker.
            files: start model and preprocessor.
            slices: file of each slice by its index.
            options: modules that models of task ``torch`` may use.
            folder: for the members' states and updates.

        Raises:
            ExecutorError: the model cannot be loaded, or the job is not supported.
        """
        self._files, self._slices, self._options, self._folder = files, slices, options, folder
        self._last: dict[PeerId, int] = {}
        (folder / _STATES).mkdir(exist_ok=True)
        self._configure(config)

    def configure(self, config: TrainConfig) -> None:
        """Train with other settings from now on: those of a resumed run.

        Raises:
            ExecutorError: the model cannot be loaded, or the job is not supported.
        """
        if config == self._config:
            return
        before = self._setup.replica
        self._configure(config)
        self._setup.replica.take(before)

    def _configure(self, config: TrainConfig) -> None:
        device = choose_device()
        if device.is_sharded:
            raise JobError("a replay computes in one process; start it without accelerate launch")
        self._config = config
        self._setup: Setup = build_setup(config, self._options, self._files, device, SingleProcess())
        self._blank = self._state()

    def weights_digest(self) -> str:
        """Return the digest of the global weights."""
        return self._setup.replica.digest()

    def merge(self, update: Path) -> None:
        """Add an outer update to the global weights.

        Raises:
            ModelError: it does not fit the model.
        """
        self._setup.replica.add(update)

    def train(self, peer: PeerId, number: int, stated: Contribution, path: Path) -> None:
        """Train a round of a member from the global weights, and write its update.

        Raises:
            NotProvableError: its optimizer state is not known.
            ExecutorError: a slice is malformed or does not fit the model.
        """
        self._enter(peer, number, stated)
        setup = self._setup
        setup.replica.load_global()
        setup.begin_round(number)
        setup.trainer.micro_batch = stated.micro_batch
        seed_generators(stated.seed)
        samples = batches = 0
        for batch in recorded_batches(
            self._file_of, stated.ranges, stated.batch_size, self._config.seed or 0, preprocessed_columns(self._config)
        ):
            setup.trainer.step(batch)
            samples, batches = samples + batch.samples, batches + 1
        if batches != stated.batches:
            raise NotProvableError(f"its ranges are {batches} batches of {stated.batch_size}, not {stated.batches}")
        setup.replica.write_update(path, number, samples)
        torch.save(self._state(), self._state_file(peer))
        self._last[peer] = number

    def forget(self, peer: PeerId) -> None:
        """Drop the state of a member that trained on something unknown."""
        self._last.pop(peer, None)

    def _enter(self, peer: PeerId, number: int, stated: Contribution) -> None:
        """Load the state with which a member begins a round."""
        if stated.optimizer != OPTIMIZER_KEPT:
            self._load(self._blank)
        elif self._last.get(peer) == number - 1:
            self._load(torch.load(self._state_file(peer), weights_only=True))
        else:
            raise NotProvableError(
                f"it kept its optimizer state from round {number - 1}, which could not be computed for it"
            )

    def _state(self) -> dict[str, Any]:
        buffers = {name: buffer.detach().clone() for name, buffer in self._setup.module.named_buffers()}
        return {"optimizer": self._setup.optimizer.adamw.state_dict(), "buffers": buffers}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._setup.optimizer.adamw.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, buffer in self._setup.module.named_buffers():
                buffer.copy_(state["buffers"][name])

    def _state_file(self, peer: PeerId) -> Path:
        return self._folder / _STATES / f"{peer}.pt"

    def _file_of(self, index: int) -> Path:
        if index not in self._slices:
            raise DataError(f"slice {index}: the plan names no file of it")
        return self._slices[index]
