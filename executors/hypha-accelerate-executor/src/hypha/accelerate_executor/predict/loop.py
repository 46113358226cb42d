"""The loop over slices: fetch, compute, send, until the scheduler has no further slice or drains this worker.

At most two slices are in hand: while one is computed, the part of the one before is sent and the next is fetched
after it. So a worker that is lost costs at most these two.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hypha.accelerate_executor.bridge.client import Bridge, Fetched
from hypha.accelerate_executor.bridge.spans import Spans
from hypha.accelerate_executor.data.samples import Samples, open_samples
from hypha.accelerate_executor.errors import BridgeRefused, DataError, ExecutorError, RowError, row_error_of
from hypha.accelerate_executor.predict.batching import BatchComputer
from hypha.accelerate_executor.predict.computation import Result
from hypha.accelerate_executor.predict.parts import Part, part_name
from hypha.accelerate_executor.predict.settings import InferenceTask
from hypha.accelerate_executor.predict.slice_queue import SliceQueue
from hypha_proto.texts import quote

if TYPE_CHECKING:
    from hypha.accelerate_executor.predict.classifier import Classifier
    from hypha.accelerate_executor.predict.generator import Generator

logger = logging.getLogger(__name__)

_REPORT_SECONDS: Final = 1.0
"""Least time between two reports, but for the last."""


class RowFailed(ExecutorError):
    """A row cannot be computed, and the job asks to fail then."""


@dataclass(slots=True)
class RowCounts:
    """What has been computed since the start."""

    slices: int = 0
    rows: int = 0
    tokens: int = 0
    errors: int = 0

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the numbers to report; rates are means since the model was ready."""
        rate = 1 / seconds if seconds > 0 else 0.0
        return {
            "slices": self.slices,
            "rows": self.rows,
            "errors": self.errors,
            "rows_per_second": self.rows * rate,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens * rate,
        }


@dataclass(slots=True)
class InferenceLoop:
    """Computes slices until none is left; nothing runs before `run`."""

    bridge: Bridge
    task: InferenceTask
    computation: Classifier | Generator
    queue: SliceQueue
    spans: Spans
    """Records the work done."""
    delay: float = 0.0
    """Seconds added to every batch, for tests and benchmarks of uneven workers."""
    _batch_size: int | None = field(init=False)
    _progress: RowCounts = field(default_factory=RowCounts)
    _begun: float = field(default_factory=time.monotonic)
    _reported: float = field(default_factory=time.monotonic)
    _drains: bool = False

    def __post_init__(self) -> None:
        self._batch_size = self.computation.rows_at_once

    def run(self) -> RowCounts:
        """Compute slices until the scheduler has no further one, or wants this worker to end.

        Raises:
            ExecutorError: a slice could not be fetched or computed, or a part not sent.
        """
        while not self._drains and (fetched := self.queue.take()) is not None:
            self.queue.prefetch()  # the second slice in hand; after the part before it
            with self.spans.span("compute slice", slice=_slice_index(fetched)):
                self._compute_slice(fetched)
            self._report_if_due()
            self.spans.flush()
        self._report()
        self.queue.flush()
        if self._drains:
            logger.info("the scheduler drains this worker")
        return self._progress

    def _compute_slice(self, fetched: Fetched) -> None:
        index = _slice_index(fetched)
        with closing(open_samples(fetched.path)) as rows:
            part = Part(index, rows, self.task.copied_columns)
            for row, outcome in self._outcomes(rows, index):
                self._count(part, row, outcome, index, fetched)
            path = self.bridge.work_dir / part_name(index)
            count = part.write(path)
        fetched.path.unlink(missing_ok=True)
        self._progress.slices += 1
        self.queue.send(path, index, count)

    def _count(self, part: Part, row: int, outcome: Result | RowError, index: int, fetched: Fetched) -> None:
        if isinstance(outcome, RowError) and self.task.inference.on_error == "fail":
            dataset = fetched.metadata.get("dataset", "")
            raise RowFailed(f"dataset {dataset!r}, slice {index}, row {row}: {outcome}")
        before = part.errors
        part.add(row, outcome)
        self._progress.rows += 1
        self._progress.errors += part.errors - before
        self._progress.tokens += outcome.tokens if isinstance(outcome, Result) else 0

    def _outcomes(self, rows: Samples, index: int) -> Iterator[tuple[int, Result | RowError]]:
        """Yield the outcome of each row, those that cannot be prepared first."""
        groups: dict[Hashable, list[tuple[int, Any]]] = {}
        for row in range(rows.count):
            try:
                prepared = self.computation.prepare(rows, row)
                groups.setdefault(prepared.alike, []).append((row, prepared))
            except Exception as error:  # noqa: BLE001 – whatever a tokenizer raises is recorded with its row
                yield row, row_error_of(error)
        size = self._batch_size or rows.count
        batches = BatchComputer[tuple[int, Any], Result | RowError](
            lambda batch: self.computation.compute(rows, index, batch), size
        )
        for batch in itertools.chain.from_iterable(map(batches, groups.values())):
            for (row, _), outcome in batch:
                yield row, outcome
            if self.delay:
                time.sleep(self.delay)
            self._report_if_due()
        if batches.size < size:
            self._batch_size = batches.size

    def _report_if_due(self) -> None:
        if time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        try:
            self._drains = self.bridge.report_task(self._progress.metrics(self._reported - self._begun))
        except BridgeRefused as error:  # the results do not depend on it
            logger.warning("the worker refused a report of the progress: %s", error)


def _slice_index(fetched: Fetched) -> int:
    text = fetched.metadata.get("slice", "")
    if not (text.isascii() and text.isdecimal()):
        raise DataError(f"the worker named no slice of {fetched.path.name}: metadata slice is {quote(text)}")
    return int(text)
