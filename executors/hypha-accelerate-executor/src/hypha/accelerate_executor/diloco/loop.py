"""The DiLoCo training loop: inner steps, and an exchange with the parameter server at the end of each round.

Implements the worker side of DiLoCo (arXiv:2311.08105, algorithm 1). Started by `training`. Updates travel through
`bridge` to the worker and the parameter server, which sends the outer update back; `batch_reporter` reports batches in
the background, and `round_countdown` decides from the answers when a round ends. `replica` computes what is exchanged,
`contribution` records what from, `global_weights` compares the merged weights with the scheduler's, and
`round_evaluation` evaluates them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge, OuterUpdates
from hypha.accelerate_executor.bridge.spans import Spans
from hypha.accelerate_executor.data.batches import Batch, Batches
from hypha.accelerate_executor.diloco.batch_reporter import BatchReporter
from hypha.accelerate_executor.diloco.contribution import SampleRecord
from hypha.accelerate_executor.diloco.global_weights import GlobalWeights
from hypha.accelerate_executor.diloco.metrics import RoundTally, trained_batch
from hypha.accelerate_executor.diloco.round_countdown import NextStep, RoundCountdown
from hypha.accelerate_executor.diloco.round_evaluation import RoundEvaluation
from hypha.accelerate_executor.diloco.round_seed import round_seed
from hypha.accelerate_executor.distributed.accelerator import choose_device
from hypha.accelerate_executor.distributed.process_group import (
    BeginRound,
    Compute,
    GatherWeights,
    LoadModel,
    LoadWeights,
    Reset,
    Shutdown,
    join_process_group,
)
from hypha.accelerate_executor.environment import keep_freed_memory
from hypha.accelerate_executor.errors import ContributionRefused, ModelError, NotTakingPart, RoundWentOn
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.training_setup import Setup, build_setup
from hypha_proto.bridge_api import RoundJoined
from hypha_proto.contributions import OPTIMIZER_KEPT, OPTIMIZER_RESET, Contribution
from hypha_proto.file_digests import digest_file
from hypha_proto.job_spec import PeersReference, Reference, TrainConfig
from hypha_proto.training_reports import MICRO_BATCH, Done, RoundMetrics, SendingUpdate, UpdateMerged

logger = logging.getLogger(__name__)

INCOMING: Final = "incoming"
"""Directory of the outer updates, in the work directory."""
MAX_REFUSED: Final = 3
"""Number of consecutive updates that the scheduler may refuse before the executor gives up."""
MAX_BEHIND: Final = 20
"""Number of consecutive times that the job may go on while the executor fetches the weights of the round to join."""


@dataclass(frozen=True, slots=True)
class LoopTiming:
    """Timeout and artificial delay of the loop."""

    update_timeout: float
    """Seconds to wait for an outer update."""
    delay: float = 0.0
    """Seconds added to every batch, for tests and benchmarks of uneven workers."""


@dataclass(slots=True)
class _Round:
    """What was done in one round."""

    number: int
    tally: RoundTally = field(default_factory=RoundTally)
    samples: SampleRecord = field(default_factory=SampleRecord)


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
    ) -> None:
        """Store the parts; nothing is trained before `run`.

        Args:
            outer_updates: None if nobody sends any: the job is over after its first update then.
        """
        self._bridge = bridge
        self._config = config
        self._trainer = setup.trainer
        self._replica = setup.replica
        self._group = setup.group
        self._sizer = setup.sizer
        self._begin_round = setup.begin_round
        self._reset = setup.reset
        self._check_delivery = setup.check_delivery
        self._batches = batches
        self._outer_updates = outer_updates
        self._timing = timing
        self._spans = spans
        self._weights = GlobalWeights(bridge, setup.replica, setup.group, config)
        self._evaluation = RoundEvaluation(
            bridge, config.evaluation, setup.subject, config.micro_batch or config.batch_size, spans
        )
        self._countdown = RoundCountdown(config.first_round or 1)
        self._reporter = BatchReporter(bridge, timing.update_timeout)
        batches.before_retry = self._reporter.flush
        self._mark: float | None = None
        """End of the last batch and its report, or the beginning of the round; None before the first one."""
        self._trained = False
        """Whether a round was trained since the last reset, so that the inner optimizer has state."""
        self._refused = 0
        """Consecutive contributions that the scheduler did not accept."""
        self._is_over = False
        """Whether the last round has been merged, so that these are the weights that the job delivers."""

    def run(self) -> None:
        """Train until the job is done or there is no more data.

        Raises:
            ExecutorError: training cannot continue.
        """
        if self._sizer is None:
            keep_freed_memory()
        try:
            self._train_rounds()
            self._evaluation.finish(self._timing.update_timeout)
            if self._is_over:
                self._reset()  # frees memory of the optimizer
                with self._spans.span("check delivered model"):
                    self._check_delivery()
        finally:
            self._reporter.close()
            self._evaluation.close()
        self._group.scatter_commands([Shutdown()] * self._group.size)

    def _begin(self) -> None:
        """Begin with the round that the scheduler names, or with the one that its settings name."""
        if self._config.join:
            self._enter(self._ask_for_round())
        elif self._countdown.round > 1 and self._config.weights is not None:
            with self._spans.span("fetch weights"):
                self._weights.fetch(self._countdown.round - 1)

    def _ask_for_round(self) -> RoundJoined:
        """Ask for the round to begin with."""
        self._reporter.drop()
        self._spans.flush()
        with self._spans.span("wait for round"):
            return self._bridge.join()

    def _enter(self, joined: RoundJoined) -> None:
        """Begin with a round, from its weights and without state of the inner optimizer."""
        self._group.scatter_commands([Reset()] * self._group.size)
        self._reset()
        self._trained, self._refused = False, 0
        with self._spans.span("fetch weights"):
            joined = self._load_weights(joined)
        if not joined.keeps:
            self._batches.drop()
        logger.info("joined at round %d", joined.round)
        self._countdown = RoundCountdown(joined.round)
        self._batches.prefetch()

    def _load_weights(self, joined: RoundJoined) -> RoundJoined:
        """Load the weights of the round to join, or of a later one if the job goes on meanwhile; return which."""
        for _ in range(MAX_BEHIND):
            if self._weights.begin_from(joined.round - 1, joined.weights):
                return joined
            joined = self._bridge.join()
        raise ModelError(f"the job went on {MAX_BEHIND} times while the weights of a round were fetched")

    def _train_rounds(self) -> None:
        """Begin, and train rounds until the job is over or goes on without this process."""
        try:
            self._begin()
            self._run_rounds()
        except NotTakingPart as end:
            logger.info("the job needs this process no more: %s", end)

    def _run_rounds(self) -> None:
        """Train rounds until the job is over."""
        while True:
            self._spans.flush()
            current = _Round(self._countdown.round)
            try:
                with self._spans.span("round", round=current.number):
                    following = self._train_round(current)
                    if following is not NextStep.SYNCHRONISE or not self._synchronise(current):
                        return
            except RoundWentOn as closed:
                logger.warning("round %d goes on without this update: %s", current.number, closed)
                self._batches.drop()
                self._enter(self._ask_for_round())
                continue
            self._evaluation.prepare(current.number)
            if self._finish_round() is NextStep.STOP:
                self._is_over = True
                return
            self._evaluation.begin()

    def _train_round(self, current: _Round) -> NextStep:
        """Process batches until the round ends, inside a span."""
        tally = current.tally
        with self._spans.span("train") as span:
            try:
                return self._train(current)
            finally:
                tally.report_wait = self._reporter.waited
                span |= {"hypha.batches": tally.batches, "hypha.samples": tally.samples}
                span |= {"hypha.batch_seconds": tally.seconds}

    def _train(self, current: _Round) -> NextStep:
        """Process batches until the round ends."""
        self._group.scatter_commands([BeginRound(current.number)] * self._group.size)
        self._begin_round(current.number)
        self._reporter.begin(current.number)
        now = time.perf_counter()
        current.tally.sync = None if self._mark is None else now - self._mark
        self._mark = now
        following = NextStep.TRAIN
        while following is NextStep.TRAIN:
            before = time.perf_counter()
            batch = next(self._batches, None)
            waited = time.perf_counter() - before
            if batch is None:
                logger.info("no data left in round %d: training is over", current.number)
                return self._without_data(current)
            self._choose_micro_batch(batch, current.number)
            loss = self._step(batch)
            if self._timing.delay:
                time.sleep(self._timing.delay)
            seconds = time.perf_counter() - self._mark - waited
            current.tally.add(loss, batch.samples, seconds, waited)
            current.samples.add(batch)
            trained = trained_batch(batch.samples, batch.slices, seconds, waited)
            following = self._countdown.after_batch(self._reporter.report(trained))
            if following is NextStep.SYNCHRONISE:  # unless the round lacks batches that others have not trained
                counted = self._config.term is None or current.samples.ranges is None
                following = self._countdown.after_batch(self._reporter.confirm_end(counted=counted))
            self._mark = time.perf_counter()
        return following

    def _without_data(self, current: _Round) -> NextStep:
        """Return the next step when no sample is left, once the scheduler has said whether the round has an end."""
        if not current.tally.samples or isinstance(answer := self._reporter.flush(), Done):
            return NextStep.STOP
        self._countdown.after_batch(answer)
        return self._countdown.without_data()

    def _choose_micro_batch(self, batch: Batch, number: int) -> None:
        """Decide with the first batch how many samples are computed at once; its time is not that of the batch."""
        sizer, self._sizer = self._sizer, None
        if sizer is None:
            return
        before, limit = time.perf_counter(), self._at_once
        with self._spans.span("choose micro-batch") as span:
            found = sizer.find(batch, limit)
            span["hypha.samples"] = found
        keep_freed_memory()  # only now: it was measured how much memory is used
        self._begin_round(number)  # seeds the random generators again
        if found < limit:
            logger.info("computing at most %d samples of a batch at once, for want of memory", found)
            self._trainer.micro_batch = self._evaluation.batch_size = found
            if self._config.term is not None:  # should memory end all the same, the scheduler knows with how many
                self._bridge.report(RoundMetrics(round=number, metrics={MICRO_BATCH: float(found)}))
        if self._mark is not None:
            self._mark += time.perf_counter() - before

    @property
    def _at_once(self) -> int:
        """Largest number of samples of a batch that are computed at once."""
        return min(self._config.batch_size, self._trainer.micro_batch or self._config.batch_size)

    def _step(self, batch: Batch) -> float | None:
        """Train every process on its part of the batch; return the batch's mean loss, or None without labels."""
        parts = self._trainer.split(batch, self._group.size)
        self._group.scatter_commands([Compute(part) for part in parts])
        return self._trainer.compute(parts[0], batch)

    def _synchronise(self, current: _Round) -> bool:
        """Send the pseudo-gradient, wait for the outer update and merge it; return False if the job ends before."""
        number = current.number
        update = self._write_update(current)
        # where rounds are committed, the report of the last batches has said so
        if self._config.term is None and isinstance(self._bridge.report(SendingUpdate()), Done):
            update.unlink(missing_ok=True)
            return False
        self._send_update(update, current)
        metrics = current.tally.metrics(number)
        metrics.metrics[MICRO_BATCH] = float(self._at_once)
        if self._weights.take_fetched():
            metrics.metrics["weights_fetched"] = 1.0
        if isinstance(self._bridge.report(metrics), Done) or self._outer_updates is None:
            return False
        with self._spans.span("wait for outer update"):
            outer = self._outer_updates.wait(number, self._timing.update_timeout)
        with self._spans.span("merge outer update"):
            self._weights.merge(outer, number)
        update.unlink(missing_ok=True)
        outer.path.unlink(missing_ok=True)
        loss = metrics.metrics.get("loss", math.nan)
        logger.info("round %d: %d samples, loss %.4f", number, current.tally.samples, loss)
        return True

    def _finish_round(self) -> NextStep:
        """Report that the outer update was merged; return whether another round follows."""
        self._spans.flush()  # before the report: after the last one the worker closes the bridge
        return self._countdown.after_merge(self._bridge.report(UpdateMerged()))

    def _write_update(self, current: _Round) -> Path:
        """Write the pseudo-gradient to a file."""
        path = self._bridge.work_dir / f"update-{current.number}.safetensors"
        with self._spans.span("write pseudo-gradient") as span:
            self._group.scatter_commands([GatherWeights()] * self._group.size)
            self._replica.write_update(path, current.number, current.tally.samples)
            span["hypha.file.size"] = path.stat().st_size
        return path

    def _send_update(self, path: Path, current: _Round) -> None:
        """Send an update, with what it was computed from; delete the file if nobody needs it any more.

        An update of a job with rounds that are committed stays until the outer update of its round is merged.

        Raises:
            ContributionRefused: the scheduler has not accepted `MAX_REFUSED` updates in a row.
            RoundClosed: the round goes on without it.
            ExecutorError: it cannot be sent.
        """
        samples, contribution = current.tally.samples, self._contribution(path, current)
        self._trained = True
        try:
            self._bridge.send(self._config.updates, path, current.number, samples, contribution)
        except ContributionRefused as refusal:
            self._refused += 1
            if self._refused >= MAX_REFUSED:
                raise ContributionRefused(
                    f"the scheduler has not accepted the updates of {self._refused} rounds in a row; round "
                    f"{current.number}: {refusal}"
                ) from None
            logger.warning("the update of round %d does not count: %s", current.number, refusal)
            return
        except RoundWentOn:
            path.unlink(missing_ok=True)
            raise
        self._refused = 0
        if self._config.term is None:
            path.unlink(missing_ok=True)

    def _contribution(self, path: Path, current: _Round) -> Contribution | None:
        """Return what the update was computed from; None if the job does not ask for it, or of too many ranges."""
        ranges = current.samples.ranges
        if self._config.term is None or ranges is None:
            return None
        with self._spans.span("digest update and weights"):
            return Contribution(
                round=current.number,
                weights=self._weights.digest,
                ranges=ranges,
                batches=current.tally.batches,
                batch_size=self._config.batch_size,
                seed=round_seed(self._config.seed or 0, self._config.member, current.number),
                optimizer=OPTIMIZER_KEPT if self._trained else OPTIMIZER_RESET,
                update=digest_file(path),
                micro_batch=self._trainer.micro_batch,
            )


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
    keep_freed_memory()
    while not isinstance(command := group.receive_command(), Shutdown):
        match command:
            case BeginRound(number):
                setup.begin_round(number)
            case Reset():
                setup.reset()
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
    with spans.span("load model", task=config.model.task, processes=group.size) as span:
        group.scatter_commands([LoadModel(files)] * group.size)
        setup = build_setup(config, options, files, device, group)
        span["hypha.parameters"] = sum(value.numel() for value in setup.replica.members.values())
    outer_updates = bridge.updates(config.results, INCOMING) if _has_senders(config.results) else None
    return TrainingLoop(bridge, config, setup, batches, outer_updates, timing, spans)


def _has_senders(results: Reference) -> bool:
    """Return whether anybody sends outer updates: a list of peers may be empty."""
    return not isinstance(results, PeersReference) or bool(results.peers)
