"""The loop of a training worker: batches, and at the end of each round the exchange with the parameter server.

`training` starts it. From here the way of a job goes on through `bridge` to the worker, to the parameter server, and
back with the outer update; `rounds` decides when, `replica` computes what is exchanged.
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
    Compute,
    GatherWeights,
    LoadModel,
    LoadWeights,
    Shutdown,
    form_team,
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
    """What bounds and slows the loop."""

    update_timeout: float
    """Seconds to wait for an outer update."""
    delay: float = 0.0
    """Seconds added to every batch, for tests and benchmarks of uneven workers."""


class TrainingLoop:
    """Trains rounds until the scheduler says that the job is done."""

    def __init__(
        self,
        bridge: Bridge,
        config: TrainConfig,
        setup: Setup,
        batches: Batches,
        outer_updates: OuterUpdates,
        pace: LoopTiming,
        spans: Spans,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Put the parts together; nothing happens before `run`."""
        self._bridge = bridge
        self._config = config
        self._trainer = setup.trainer
        self._replica = setup.replica
        self._team = setup.team
        self._batches = batches
        self._outer_updates = outer_updates
        self._pace = pace
        self._spans = spans
        self._clock = clock
        self._measure = setup.measure
        self._samples: list[Path] | None = None
        """Files to evaluate on, once they were fetched."""
        self._countdown = RoundCountdown(config.first_round or 1)
        self._mark = 0.0

    def run(self) -> None:
        """Train until the job is done or there is no more data.

        Raises:
            ExecutorError: the run cannot go on.
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
                following = self._end_round()
        self._team.order([Shutdown()] * self._team.size)

    def _train_round(self, tally: RoundTally) -> NextStep:
        """Process batches until the round ends, and tell of it."""
        with self._spans.span("train") as about:
            try:
                return self._train(tally)
            finally:
                about |= {"hypha.batches": tally.batches, "hypha.samples": tally.samples}
                about |= {"hypha.batch_seconds": tally.seconds}

    def _train(self, tally: RoundTally) -> NextStep:
        """Process batches until the round ends."""
        self._mark = self._clock()
        following = NextStep.TRAIN
        while following is NextStep.TRAIN:
            before = self._clock()
            batch = next(self._batches, None)
            waited = self._clock() - before
            if batch is None:
                logger.info("no data is left in round %d: training is over", self._countdown.round)
                return self._countdown.without_data() if tally.samples else NextStep.STOP
            loss = self._step(batch)
            if self._pace.delay:
                time.sleep(self._pace.delay)
            now = self._clock()
            seconds, self._mark = now - self._mark - waited, now
            tally.add(loss, batch.samples, seconds)
            following = self._countdown.after_batch(
                self._bridge.report(batch_done(batch.samples, batch.slices, seconds))
            )
        return following

    def _step(self, batch: Batch) -> float:
        """Have every process train on its part of the batch."""
        parts = self._trainer.divide(batch, self._team.size)
        self._team.order([Compute(part) for part in parts])
        return self._trainer.compute(parts[0])

    def _synchronise(self, tally: RoundTally) -> bool:
        """Send the pseudo-gradient, wait for the outer update, merge it; false when the job is done before that."""
        number = self._countdown.round
        if isinstance(self._bridge.report(SendingUpdate()), Done):
            return False
        self._send_update(number, tally.samples)
        metrics = tally.metrics(number)
        if isinstance(self._bridge.report(metrics), Done):
            return False
        with self._spans.span("wait for outer update"):
            outer = self._outer_updates.wait(number, self._pace.update_timeout)
        with self._spans.span("merge outer update"):
            self._team.order([LoadWeights()] * self._team.size)
            self._replica.merge(outer)
        outer.unlink(missing_ok=True)
        self._evaluate(number)
        logger.info("round %d: %d samples, loss %.4f", number, tally.samples, metrics.metrics["loss"])
        return True

    def _evaluate(self, number: int) -> None:
        """Measure the merged model on this worker's share of the samples to evaluate on, when it is time for that."""
        wanted, measure = self._config.evaluation, self._measure
        if wanted is None or measure is None or wanted.every == 0 or number % wanted.every:
            return
        try:
            with self._spans.span("evaluate") as about:
                if self._samples is None:
                    self._samples = [fetched.path for fetched in self._bridge.fetch(wanted.data, "evaluation")]
                found = measure(self._samples, self._config.batch_size)
                about["hypha.samples"] = found.samples
        except (BridgeRefused, DataError) as error:  # training goes on without
            logger.warning("the model is not evaluated any more: %s", error)
            self._measure = None
            return
        metrics = {"evaluation_loss": found.loss, "evaluation_samples": float(found.samples)}
        if found.accuracy is not None:
            metrics["accuracy"] = found.accuracy
        self._bridge.report(RoundMetrics(round=number, metrics=metrics))

    def _end_round(self) -> NextStep:
        """Tell that the outer update was merged; hear whether there is another round."""
        self._spans.flush()  # before the report: after the last one the worker closes its door
        return self._countdown.after_merge(self._bridge.report(UpdateMerged()))

    def _send_update(self, number: int, samples: int) -> None:
        path = self._bridge.work_dir / f"update-{number}.safetensors"
        with self._spans.span("write pseudo-gradient") as about:
            self._team.order([GatherWeights()] * self._team.size)
            self._replica.write_update(path, number, samples)
            about["hypha.file.size"] = path.stat().st_size
        self._bridge.send(self._config.updates, path, number, samples)
        path.unlink(missing_ok=True)


def follow(config: TrainConfig, choices: OwnerOptions, pace: LoopTiming) -> None:
    """Compute for the process that leads, until it says that the job is over.

    Raises:
        ExecutorError: the leader has ended, or this process cannot go on.
    """
    device, team = choose_device(), form_team(pace.update_timeout)
    first = team.hear()
    if not isinstance(first, LoadModel):
        return
    setup = build_setup(config, choices, first.files, device, team)
    while not isinstance(order := team.hear(), Shutdown):
        match order:
            case Compute(pieces):
                setup.trainer.compute(pieces)
            case GatherWeights():
                setup.weights.gather()
            case LoadWeights():
                setup.weights.take({})


def build_loop(
    bridge: Bridge,
    config: TrainConfig,
    choices: OwnerOptions,
    fetched: Callable[[], ModelFiles],
    batches: Batches,
    pace: LoopTiming,
    spans: Spans,
) -> TrainingLoop:
    """Load the model and put a loop together that trains it.

    Args:
        choices: what the worker's owner has allowed and asked for.
        fetched: waits for the model's files and says where they lie.
        spans: takes what is done.

    Raises:
        ExecutorError: the model cannot be loaded, or the job asks for what is not supported.
    """
    device, team = choose_device(), form_team(pace.update_timeout)
    with spans.span("wait for model"):
        files = fetched()
    batches.prefetch()
    with spans.span("load model", task=config.model.task, processes=team.size) as about:
        team.order([LoadModel(files)] * team.size)
        setup = build_setup(config, choices, files, device, team)
        about["hypha.parameters"] = sum(value.numel() for value in setup.replica.parameters.values())
    outer_updates = bridge.updates(_source(config), INCOMING)
    return TrainingLoop(bridge, config, setup, batches, outer_updates, pace, spans)


def _source(config: TrainConfig) -> Reference:
    """Say who sends outer updates: the peers of `results`, or those that get ours when it names none."""
    results = config.results
    return config.updates if isinstance(results, PeersReference) and not results.peers else results
