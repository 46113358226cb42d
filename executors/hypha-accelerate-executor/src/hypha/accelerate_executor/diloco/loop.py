"""The DiLoCo training loop: inner steps, and an exchange with the parameter server at the end of each round.

Implements the worker side of DiLoCo (arXiv:2311.08105, algorithm 1). Started by `training`. Updates travel through
`bridge` to the worker and the parameter server, which sends the outer update back; `round_countdown` decides when a
round ends and `replica` computes what is exchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge, OuterUpdates
from hypha.accelerate_executor.bridge.spans import Spans
from hypha.accelerate_executor.data.batches import Batch, Batches
from hypha.accelerate_executor.diloco.metrics import RoundTally, batch_done
from hypha.accelerate_executor.diloco.round_countdown import NextStep, RoundCountdown
from hypha.accelerate_executor.distributed.accelerator import choose_device
from hypha.accelerate_executor.distributed.process_group import (
    BeginRound,
    Compute,
    GatherWeights,
    LoadModel,
    LoadWeights,
    Shutdown,
    join_process_group,
)
from hypha.accelerate_executor.errors import BridgeRefused, DataError
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.training_setup import Setup, build_setup
from hypha_proto.job_spec import PeersReference, Reference, TrainConfig
from hypha_proto.progress import Done, RoundMetrics, SendingUpdate, UpdateMerged

logger = logging.getLogger(__name__)

INCOMING: Final = "incoming"
"""Directory of the outer updates, in the work directory."""


@dataclass(frozen=True, slots=True)
class LoopTiming:
    """Timeout and artificial delay of the loop."""

    update_timeout: float
    """Seconds to wait for an outer update."""
    delay: float = 0.0
    """Seconds added to every batch, for tests and benchmarks of uneven workers."""


class TrainingLoop:
    """Trains rounds until the scheduler ends the job."""

    def __init__(
        self,
        bridge: Bridge,
        config: TrainConfig,
        setup: Setup,
        batches: Batches,
        outer_updates: OuterUpdates | None,
        timing: LoopTiming,
        spans: Spans,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Store the parts; nothing runs before `run`.

        Args:
            outer_updates: None if nobody sends any: the job is over after its first update then.
        """
        self._bridge = bridge
        self._config = config
        self._trainer = setup.trainer
        self._replica = setup.replica
        self._group = setup.group
        self._begin_round = setup.begin_round
        self._batches = batches
        self._outer_updates = outer_updates
        self._timing = timing
        self._spans = spans
        self._clock = clock
        self._measure = setup.measure
        self._evaluation_files: list[Path] | None = None
        """Files of the evaluation dataset, once fetched."""
        self._countdown = RoundCountdown(config.first_round or 1)
        self._mark = 0.0

    def run(self) -> None:
        """Train until the job is done or there is no more data.

        Raises:
            ExecutorError: training cannot continue.
        """
        following = NextStep.TRAIN
        while following is not NextStep.STOP:
            self._spans.flush()
            tally = RoundTally()
            with self._spans.span("round", round=self._countdown.round):
                following = self._train_round(tally)
                if following is NextStep.SYNCHRONISE and not self._synchronise(tally):
                    following = NextStep.STOP
            if following is NextStep.SYNCHRONISE:
                following = self._finish_round()
        self._group.scatter_commands([Shutdown()] * self._group.size)

    def _train_round(self, tally: RoundTally) -> NextStep:
        """Process batches until the round ends, inside a span."""
        with self._spans.span("train") as span:
            try:
                return self._train(tally)
            finally:
                span |= {"hypha.batches": tally.batches, "hypha.samples": tally.samples}
                span |= {"hypha.batch_seconds": tally.seconds}

    def _train(self, tally: RoundTally) -> NextStep:
        """Process batches until the round ends."""
        self._group.scatter_commands([BeginRound(self._countdown.round)] * self._group.size)
        self._begin_round(self._countdown.round)
        self._mark = self._clock()
        following = NextStep.TRAIN
        while following is NextStep.TRAIN:
            before = self._clock()
            batch = next(self._batches, None)
            waited = self._clock() - before
            if batch is None:
                logger.info("no data left in round %d: training is over", self._countdown.round)
                return self._countdown.without_data() if tally.samples else NextStep.STOP
            loss = self._step(batch)
            if self._timing.delay:
                time.sleep(self._timing.delay)
            now = self._clock()
            seconds, self._mark = now - self._mark - waited, now
            tally.add(loss, batch.samples, seconds)
            following = self._countdown.after_batch(
                self._bridge.report(batch_done(batch.samples, batch.slices, seconds))
            )
        return following

    def _step(self, batch: Batch) -> float:
        """Train every process on its part of the batch; return the batch's mean loss."""
        parts = self._trainer.split(batch, self._group.size)
        self._group.scatter_commands([Compute(part) for part in parts])
        return self._trainer.compute(parts[0])

    def _synchronise(self, tally: RoundTally) -> bool:
        """Send the pseudo-gradient, wait for the outer update and merge it; return False if the job ends before."""
        number = self._countdown.round
        if isinstance(self._bridge.report(SendingUpdate()), Done):
            return False
        unconfirmed = self._send_update(number, tally.samples)
        metrics = tally.metrics(number)
        if isinstance(self._bridge.report(metrics), Done) or self._outer_updates is None:
            return False
        with self._spans.span("wait for outer update"):
            outer = self._outer_updates.wait(number, self._timing.update_timeout)
        if unconfirmed is not None:
            unconfirmed.unlink(missing_ok=True)
        with self._spans.span("merge outer update"):
            self._group.scatter_commands([LoadWeights()] * self._group.size)
            self._replica.merge(outer)
        outer.unlink(missing_ok=True)
        self._evaluate(number)
        logger.info("round %d: %d samples, loss %.4f", number, tally.samples, metrics.metrics["loss"])
        return True

    def _evaluate(self, number: int) -> None:
        """Evaluate the merged model on this worker's share of the evaluation dataset, if due in this round."""
        wanted, measure = self._config.evaluation, self._measure
        if wanted is None or measure is None or wanted.every == 0 or number % wanted.every:
            return
        try:
            with self._spans.span("evaluate") as span:
                if self._evaluation_files is None:
                    self._evaluation_files = [fetched.path for fetched in self._bridge.fetch(wanted.data, "evaluation")]
                found = measure(self._evaluation_files, self._config.batch_size)
                span["hypha.samples"] = found.samples
        except (BridgeRefused, DataError) as error:  # training continues without evaluation
            logger.warning("evaluation is disabled: %s", error)
            self._measure = None
            return
        metrics = {"evaluation_loss": found.loss, "evaluation_samples": float(found.samples)}
        if found.accuracy is not None:
            metrics["accuracy"] = found.accuracy
        self._bridge.report(RoundMetrics(round=number, metrics=metrics))

    def _finish_round(self) -> NextStep:
        """Report that the outer update was merged; return whether another round follows."""
        self._spans.flush()  # before the report: after the last one the worker closes the bridge
        return self._countdown.after_merge(self._bridge.report(UpdateMerged()))

    def _send_update(self, number: int, samples: int) -> Path | None:
        """Send the pseudo-gradient and delete its file; return the file if the worker may still have to read it."""
        path = self._bridge.work_dir / f"update-{number}.safetensors"
        with self._spans.span("write pseudo-gradient") as span:
            self._group.scatter_commands([GatherWeights()] * self._group.size)
            self._replica.write_update(path, number, samples)
            span["hypha.file.size"] = path.stat().st_size
        if not self._bridge.send(self._config.updates, path, number, samples):
            return path
        path.unlink(missing_ok=True)
        return None


def follow(config: TrainConfig, options: OwnerOptions, timing: LoopTiming) -> None:
    """Execute the leader's commands until it ends the job.

    Raises:
        ExecutorError: the leader has exited, or this process cannot continue.
    """
    device, group = choose_device(), join_process_group(timing.update_timeout)
    first = group.receive_command()
    if not isinstance(first, LoadModel):
        return
    setup = build_setup(config, options, first.files, device, group)
    while not isinstance(command := group.receive_command(), Shutdown):
        match command:
            case BeginRound(number):
                setup.begin_round(number)
            case Compute(micro_batches):
                setup.trainer.compute(micro_batches)
            case GatherWeights():
                setup.weights.gather()
            case LoadWeights():
                setup.weights.load({})


def build_loop(
    bridge: Bridge,
    config: TrainConfig,
    options: OwnerOptions,
    fetched: Callable[[], ModelFiles],
    batches: Batches,
    timing: LoopTiming,
    spans: Spans,
) -> TrainingLoop:
    """Load the model and build the loop that trains it.

    Args:
        options: set by the worker's owner.
        fetched: waits for the model's files and returns their paths.
        spans: records the work done.

    Raises:
        ExecutorError: the model cannot be loaded, or the job is not supported.
    """
    device, group = choose_device(), join_process_group(timing.update_timeout)
    with spans.span("wait for model"):
        files = fetched()
    batches.prefetch()
    with spans.span("load model", task=config.model.task, processes=group.size) as span:
        group.scatter_commands([LoadModel(files)] * group.size)
        setup = build_setup(config, options, files, device, group)
        span["hypha.parameters"] = sum(value.numel() for value in setup.replica.parameters.values())
    outer_updates = bridge.updates(config.results, INCOMING) if _has_senders(config.results) else None
    return TrainingLoop(bridge, config, setup, batches, outer_updates, timing, spans)


def _has_senders(results: Reference) -> bool:
    """Return whether anybody sends outer updates: a list of peers may be empty."""
    return not isinstance(results, PeersReference) or bool(results.peers)
