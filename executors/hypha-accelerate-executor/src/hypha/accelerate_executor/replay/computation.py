"""Computes rounds again: the updates of their members, the weighted mean, the outer step, the new weights.

The outer step is `hypha_proto.outer_step`, which the parameter server calls. Every round begins with the recorded
weights: the start model's plus the outer updates before, which the job has kept, or which were computed here and are
equal to the recorded ones. If there are neither, nothing more can be computed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hypha.accelerate_executor.diloco.round_seed import round_seed
from hypha.accelerate_executor.errors import ExecutorError
from hypha_proto.contributions import Contribution
from hypha_proto.file_digests import digest_file
from hypha_proto.job_spec import Nesterov, TrainConfig
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.outer_step import outer_step
from hypha_proto.replay_plan import RecordedRound, RecordedUpdate, ReplayPlan
from hypha_proto.safetensors_io import Float32Array, TensorFile, TensorFileWriter
from hypha_proto.update_file import UpdateMetadata, open_update

if TYPE_CHECKING:
    from hypha.accelerate_executor.replay.trainee import TorchTrainee

_BLOCK: Final = 1 << 16


class NotProvableError(Exception):
    """An update cannot be computed again from the record; the message says why."""


@dataclass(slots=True)
class RoundFindings:
    """What the replay of a round has found."""

    round: int
    updates: int = 0
    """Number of updates that were computed."""
    reproduced: int = 0
    """Number of those that are equal to the recorded ones, to the bit."""
    is_exact: bool = False
    """Whether anything but zeros was equal to the bit: this machine can compute the job exactly."""
    wrong: list[str] = field(default_factory=list)
    """What cannot follow from another machine's arithmetic."""
    differing: list[str] = field(default_factory=list)
    """What differs from the record, possibly by rounding."""
    unproven: list[str] = field(default_factory=list)
    """What cannot be computed again."""
    notes: list[str] = field(default_factory=list)
    """What is of no importance for the round: updates that did not count."""
    difference: float | None = None
    """Largest difference between the computed and the kept outer update; None without a kept one."""
    tolerance: float = 0.0
    """Largest difference that counts as rounding."""

    @property
    def is_equal(self) -> bool:
        """Return whether everything was computed and is equal to the bit."""
        return not (self.wrong or self.differing or self.unproven)

    @property
    def is_close(self) -> bool:
        """Return whether the outer update is within the tolerance and nothing else is wrong."""
        close = self.difference is not None and self.difference <= self.tolerance
        return close and not (self.wrong or self.unproven)


class RoundComputation:
    """Computes the rounds of a plan one after the other."""

    def __init__(self, plan: ReplayPlan, trainee: TorchTrainee, folder: Path) -> None:
        """Begin before the first round.

        Args:
            plan: the record.
            trainee: has loaded the start model.
            folder: for updates and momentum; files in it are replaced.
        """
        self._plan, self._trainee, self._folder = plan, trainee, folder
        self._momentum = folder / "momentum.safetensors"

    def rounds(self) -> Iterator[RoundFindings]:
        """Compute the rounds in order; the last findings are those of a round without recorded weights to go on from.

        Raises:
            ExecutorError: a file cannot be used.
        """
        for recorded in self._plan.rounds:
            found = RoundFindings(recorded.round)
            self._trainee.configure(self._plan.runs[recorded.run].train)
            goes_on = self._round(recorded, found)
            yield found
            if not goes_on:
                return

    def _round(self, recorded: RecordedRound, found: RoundFindings) -> bool:
        """Compute a round; return whether the weights after it are known."""
        self._check_weights(recorded.weights_before, "weights before it", found)
        config = self._plan.runs[recorded.run].train
        files = [self._update(config, recorded, update, found) for update in recorded.members]
        for update in recorded.unused:
            self._train_unused(recorded, update, found)
        computed, integers = self._outer_step(recorded, files, found)
        agreed = self._agree(recorded, computed, integers, found)
        if agreed is None:
            return False
        optimizer = self._plan.runs[recorded.run].outer
        if optimizer.learning_rate != 0.0:  # nothing follows from updates that are zero, and they need no momentum
            write_momentum(agreed, self._momentum, optimizer)
        self._trainee.merge(agreed)
        self._check_weights(recorded.weights, "weights after it", found)
        for path in (*files, computed):
            if path is not None:
                path.unlink(missing_ok=True)
        return True

    def _update(
        self, config: TrainConfig, recorded: RecordedRound, update: RecordedUpdate, found: RoundFindings
    ) -> Path | None:
        """Compute the update of a member; None if that is impossible."""
        name = f"the update of {update.peer}"
        try:
            path, stated = self._train(recorded, update)
        except NotProvableError as reason:
            found.unproven.append(f"{name}: {reason}")
            return None
        found.updates += 1
        expected = None if update.member is None else round_seed(config.seed or 0, update.member, recorded.round)
        if expected is not None and stated.seed != expected:
            found.wrong.append(f"{name} has the seed {stated.seed}, and that of member {update.member} is {expected}")
        if (digest := digest_file(path)) == update.update:
            found.reproduced += 1
            found.is_exact |= has_numbers(path)
        else:
            found.differing.append(f"{name} is {digest}, recorded is {update.update}")
        return path

    def _train_unused(self, recorded: RecordedRound, update: RecordedUpdate, found: RoundFindings) -> None:
        """Bring the optimizer state of a worker whose update did not count to the end of the round.

        What it stated may be false: perhaps that is why it did not count.
        """
        name = f"the update of {update.peer}, which did not count,"
        try:
            path, _ = self._train(recorded, update)
        except (NotProvableError, ExecutorError) as reason:
            self._trainee.forget(update.peer)
            found.notes.append(f"{name} cannot be computed: {reason}")
            return
        if (digest := digest_file(path)) != update.update:
            found.notes.append(f"{name} is {digest}, stated was {update.update}")
        path.unlink()

    def _train(self, recorded: RecordedRound, update: RecordedUpdate) -> tuple[Path, Contribution]:
        path, stated = self._folder / f"update-{update.peer}.safetensors", update.contribution
        try:
            if stated is None:
                raise NotProvableError("its executor stated nothing about it")
            if recorded.weights_before is not None and stated.weights != recorded.weights_before:
                raise NotProvableError(f"it began from the weights {stated.weights}, not from those of the round")
            self._trainee.train(update.peer, recorded.round, stated, path)
        except NotProvableError:
            self._trainee.forget(update.peer)
            raise
        return path, stated

    def _outer_step(
        self, recorded: RecordedRound, files: Sequence[Path | None], found: RoundFindings
    ) -> tuple[Path | None, frozenset[str]]:
        """Compute the outer update from the members' updates, None unless there are all; also return its integers."""
        present = [path for path in files if path is not None]
        if len(present) < len(files):
            return None, frozenset()
        file, metadata = open_update(present[0])
        file.close()
        result = self._folder / "outer.safetensors"
        replaced = self._folder / "replaced-momentum.safetensors"  # by that of this outer update, recorded or not
        replaced.unlink(missing_ok=True)
        if self._momentum.exists():
            shutil.copyfile(self._momentum, replaced)
        outer_step(
            [(path, float(update.samples)) for path, update in zip(present, recorded.members, strict=True)],
            replaced,
            result,
            self._plan.runs[recorded.run].outer,
            UpdateMetadata(round=recorded.round, statistics=metadata.statistics, aliases=metadata.aliases),
        )
        if (digest := digest_file(result)) == recorded.update:
            found.is_exact |= has_numbers(result)
        else:
            found.differing.append(f"the outer update is {digest}, recorded is {recorded.update}")
        return result, metadata.integers

    def _agree(
        self, recorded: RecordedRound, computed: Path | None, integers: frozenset[str], found: RoundFindings
    ) -> Path | None:
        """Return the recorded outer update, which the job has kept or which was computed; None if there is none."""
        kept = None if recorded.kept is None else Path(recorded.kept)
        if kept is None:
            return computed if computed is not None and digest_file(computed) == recorded.update else None
        if computed is not None:
            found.difference, largest = compare_updates(computed, kept, integers)
            found.tolerance = self._plan.tolerance * largest
        return kept

    def _check_weights(self, recorded: str | None, name: str, found: RoundFindings) -> None:
        if recorded is not None and (digest := self._trainee.weights_digest()) != recorded:
            found.wrong.append(f"the {name} are {digest}, recorded are {recorded}")


def compare_updates(computed: Path, kept: Path, integers: frozenset[str]) -> tuple[float, float]:
    """Return the largest difference between two updates, and the largest number of the second.

    Of parameters and running statistics, whose sizes have nothing to do with each other, the numbers are those of the
    kind that differs more. The difference is infinite if integers, which nothing rounds, or the tensors differ.
    """
    other, metadata = open_update(kept)
    with other, TensorFile(computed) as one:
        if one.tensors != other.tensors:
            return math.inf, 0.0
        names = other.tensors.keys()
        if _differ(one, other, names & integers)[0]:
            return math.inf, 0.0
        statistics = names & (metadata.statistics - integers)
        kinds = [_differ(one, other, found) for found in (names - metadata.statistics, statistics)]
        return max(kinds, key=lambda kind: kind[0] / kind[1] if kind[1] else math.inf if kind[0] else -1.0)


def _differ(computed: TensorFile, kept: TensorFile, names: Iterable[str]) -> tuple[float, float]:
    """Return the largest difference between tensors of two files, and the largest number of the second."""
    difference = largest = 0.0
    for name in names:
        for found, recorded in zip(computed.blocks(name, _BLOCK), kept.blocks(name, _BLOCK), strict=True):
            difference = max(difference, float(np.abs(found - recorded).max(initial=0.0)))
            largest = max(largest, float(np.abs(recorded).max(initial=0.0)))
    return difference, largest


def has_numbers(update: Path) -> bool:
    """Return whether an update holds a number other than zero."""
    with TensorFile(update) as file:
        return any(block.any() for name in file.tensors for block in file.blocks(name, _BLOCK))


def write_momentum(update: Path, momentum: Path, optimizer: Nesterov) -> None:
    """Replace a file of outer momentum by the one after an outer update; without a file it was zero."""
    file, metadata = open_update(update)
    with ExitStack() as stack:
        stack.enter_context(file)
        before = stack.enter_context(TensorFile(momentum)) if momentum.exists() else None
        infos = {name: info for name, info in file.tensors.items() if name not in metadata.statistics}
        out = stack.enter_context(TensorFileWriter(momentum, infos))
        for name in infos:
            previous: Iterator[Float32Array | float] = repeat(0.0) if before is None else before.blocks(name, _BLOCK)
            for block, moved in zip(file.blocks(name, _BLOCK), previous, strict=False):
                out.write(name, derive_momentum(block, moved, optimizer))
