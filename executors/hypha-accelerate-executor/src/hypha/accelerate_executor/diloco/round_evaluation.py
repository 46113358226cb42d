"""Evaluates the global weights after rounds, without holding up the next round.

When a round that is to be evaluated has been merged, its weights are copied and the copy is evaluated by a thread while
the next round trains; see docs/executor.md for why. The metrics are reported when they are known. Where a copy is not
possible, or evaluation draws random numbers, the model itself is evaluated before its merge is reported. After the last
round the executor exits when the evaluation has been reported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge
from hypha.accelerate_executor.bridge.spans import Spans
from hypha.accelerate_executor.errors import BridgeRefused, DataError, is_out_of_memory
from hypha.accelerate_executor.modeling.evaluation import EvaluatedModel, Subject
from hypha_proto.job_spec import Evaluation as EvaluationSpec
from hypha_proto.training_reports import RoundMetrics

logger = logging.getLogger(__name__)

_MAY_BE_HARMLESS: Final = (BridgeRefused, DataError, MemoryError, RuntimeError)
"""Errors of an evaluation that may cost only itself; torch has a `RuntimeError` for exhausted memory, too."""


class RoundEvaluation:
    """Evaluates the weights after every `wanted.every`-th round, one at a time.

    Attributes:
        batch_size: samples per batch, as many as training computes at once.
    """

    def __init__(
        self,
        bridge: Bridge,
        wanted: EvaluationSpec | None,
        subject: Subject | None,
        batch_size: int,
        spans: Spans,
    ) -> None:
        """Begin to fetch this worker's share of the evaluation samples, if the job evaluates.

        Args:
            bridge: fetches the samples, and gets the metrics.
            wanted: None if the job does not evaluate.
            subject: the module that is trained; None if this process cannot compute it alone.
            batch_size: see the class.
            spans: records evaluations.
        """
        self._bridge = bridge
        self._every = 0 if wanted is None else wanted.every
        self._subject = subject
        self.batch_size = batch_size
        self._spans = spans
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._files: Future[Sequence[Path]] | None = None
        self._running: Future[None] | None = None
        self._due: int | None = None
        """The round that is to be evaluated."""
        self._copy: Subject | None = None
        """The model with its weights."""
        self._may_run_beside: bool | None = None
        """Whether evaluation leaves the random generators alone; None before the first one."""
        if wanted is not None and subject is not None and wanted.every:
            data = wanted.data
            self._files = self._thread.submit(lambda: [file.path for file in bridge.fetch(data, "evaluation")])

    def prepare(self, number: int) -> None:
        """Copy the module's weights, which are those after round `number`, if it is to be evaluated.

        Evaluates them now where a copy is not possible. To be called before the merge is reported: until then the
        scheduler expects no batch, however long an evaluation takes.

        Raises:
            ExecutorError: an evaluation failed for another reason than its samples or memory.
        """
        self._due, self._copy = None, None
        if self._files is None or number % self._every:
            return
        self._due = number
        if self._is_running():
            return
        self._wait(0.0)
        try:
            files = self._files.result()  # bounded by the timeouts of the bridge
            self._copy = self._copied(files)
        except _MAY_BE_HARMLESS as error:
            self._disable(error)
            return
        if self._copy is None:
            self.finish(0.0)

    def begin(self) -> None:
        """Begin to evaluate the copy beside training. If an earlier evaluation still runs, this round is left out."""
        number, self._due = self._due, None
        if number is None:
            return
        if self._copy is None:
            logger.warning("round %d is not evaluated: the evaluation of an earlier round still runs", number)
            return
        self._running = self._thread.submit(self._evaluate, self._copy, number)
        self._copy = None

    def finish(self, timeout: float) -> None:
        """Wait for the evaluation that runs, then evaluate the round for which `prepare` was called last.

        Args:
            timeout: seconds to wait for the evaluation that runs.

        Raises:
            ExecutorError: an evaluation failed for another reason than its samples or memory.
        """
        self._wait(timeout)
        number, self._due = self._due, None
        if number is not None and self._subject is not None:
            self._evaluate(self._copy or self._subject, number)

    def close(self) -> None:
        """Begin no further evaluation."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def _copied(self, files: Sequence[Path]) -> Subject | None:
        """Return a copy of the module, to be evaluated while it trains; None to evaluate the module itself."""
        assert self._subject is not None
        if self._may_run_beside is None:
            self._may_run_beside = not self._subject.draws_random_numbers(files, self.batch_size)
            if not self._may_run_beside:
                logger.info("the model draws random numbers in evaluation: rounds wait for it, to be reproducible")
        return self._subject.copy() if self._may_run_beside else None

    def _evaluate(self, subject: Subject, number: int) -> None:
        assert self._files is not None
        try:
            with self._spans.span("evaluate", round=number) as span:
                found = subject.measure(self._files.result(), self.batch_size)
                span["hypha.samples"] = found.samples
            if found.loss is None:
                raise DataError(f"none of the {found.samples} evaluation samples has a label")
        except _MAY_BE_HARMLESS as error:
            self._disable(error)
            return
        self._bridge.report(RoundMetrics(round=number, metrics=_metrics(found)))

    def _disable(self, error: Exception) -> None:
        """Continue the job without evaluation, if it failed for its samples or for want of memory; else raise."""
        if not isinstance(error, BridgeRefused | DataError) and not is_out_of_memory(error):
            raise error
        logger.warning("evaluation is disabled: %s", error)
        self._files, self._due = None, None

    def _wait(self, timeout: float) -> None:
        """Wait for the evaluation that runs, and raise its error."""
        if self._running is None:
            return
        try:
            self._running.result(timeout)
        except TimeoutError:
            logger.warning("the evaluation of an earlier round takes longer than %g s: not waiting for it", timeout)
        self._running = None


def _metrics(found: EvaluatedModel) -> dict[str, float]:
    assert found.loss is not None
    metrics = {"evaluation_loss": found.loss, "evaluation_samples": float(found.labelled)}
    if found.accuracy is not None:
        metrics["accuracy"] = found.accuracy
    return metrics
