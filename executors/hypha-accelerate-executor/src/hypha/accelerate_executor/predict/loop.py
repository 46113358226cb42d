"""The loop over slices: fetch, compute, send, until the scheduler has no further slice or drains this worker.

At most two slices are in hand: while one is computed, the part of the one before is sent and the next is fetched
after it. So a worker that is lost costs at most these two. A row that cannot be computed costs no other row its result.
The part of a slice, its results, is JSON lines in the order of the rows.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from hypha.accelerate_executor.bridge.client import Bridge, Fetched
from hypha.accelerate_executor.bridge.spans import Spans
from hypha.accelerate_executor.errors import (
    BridgeRefused,
    DataError,
    ExecutorError,
    RowError,
    is_out_of_memory,
    row_error_of,
)
from hypha.accelerate_executor.predict.computation import Result, RowComputation
from hypha.accelerate_executor.predict.settings import InferenceTask
from hypha.accelerate_executor.predict.slice_queue import SliceQueue
from hypha.accelerate_executor.predict.slices import SliceRows, open_slice

LINE_LIMIT: Final = 4 << 20
"""Largest number of bytes of a line; schedulers refuse longer ones."""

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def part_name(slice_index: int) -> str:
    """Return the name of a slice's part."""
    return f"part-{slice_index}.jsonl"


class Part:
    """The results of a slice, in any order until they are written."""

    def __init__(self, slice_index: int, rows: SliceRows, columns: Sequence[str]) -> None:
        """Begin a part.

        Args:
            slice_index: index of the slice in its dataset.
            rows: the slice.
            columns: its columns to copy; a row that lacks one has null.
        """
        self._slice, self._rows, self._columns = slice_index, rows, columns
        self._lines: dict[int, bytes] = {}
        self.errors = 0

    def add(self, row: int, outcome: Result | RowError) -> None:
        """Add the outcome of a row."""
        line = self._encoded(row, outcome.values) if isinstance(outcome, Result) else outcome
        if isinstance(line, RowError):
            self.errors += 1
            line = self._encoded_error(row, line)
        self._lines[row] = line

    def write(self, path: Path) -> int:
        """Write the part; return the number of rows.

        Raises:
            OSError: it cannot be written.
        """
        with path.open("wb") as file:
            file.writelines(self._lines[row] for row in range(self._rows.count))
        return self._rows.count

    def _encoded(self, row: int, values: Mapping[str, Any]) -> bytes | RowError:
        """Return the line of a row with its copied columns, or why they cannot be written."""
        try:
            line = self._line(row, dict(values) | self._copied(row))
        except ValueError as error:  # a column holds what is no JSON or no text
            return RowError("wrong-value", f"a column cannot be written as JSON: {error}")
        except RowError as error:
            return error
        if len(line) > LINE_LIMIT:
            return RowError("too-long", f"the result has {len(line)} bytes of JSON; the limit is {LINE_LIMIT}")
        return line

    def _encoded_error(self, row: int, error: RowError) -> bytes:
        values = _error(error)
        line = self._encoded(row, values)
        return self._line(row, values) if isinstance(line, RowError) else line

    def _copied(self, row: int) -> dict[str, Any]:
        """Return the row's columns to copy."""
        if not self._columns:
            return {}
        present = self._rows.columns_of(row)
        return {column: self._rows.value(row, column) if column in present else None for column in self._columns}

    def _line(self, row: int, values: Mapping[str, Any]) -> bytes:
        line = {"slice": self._slice, "row": row} | dict(values)
        return _ENCODER.encode(line).encode() + b"\n"


def _error(error: RowError) -> dict[str, Any]:
    return {"error": {"kind": error.kind, "detail": error.detail.encode(errors="replace").decode()}}


logger = logging.getLogger(__name__)

_REPORT_SECONDS: Final = 1.0
"""Least time between two reports while a slice is computed."""


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


class InferenceLoop:
    """Computes slices until none is left."""

    def __init__(
        self,
        bridge: Bridge,
        task: InferenceTask,
        computation: RowComputation,
        queue: SliceQueue,
        spans: Spans,
        delay: float = 0.0,
    ) -> None:
        """Store the parts; nothing runs before `run`.

        Args:
            spans: records the work done.
            delay: seconds added to every batch, for tests and benchmarks of uneven workers.
        """
        self._bridge, self._task, self._computation, self._queue = bridge, task, computation, queue
        self._spans, self._delay = spans, delay
        self._batch_size = computation.rows_at_once
        self._progress = RowCounts()
        self._begun = time.monotonic()
        self._reported = time.monotonic()
        self._drains = False

    def run(self) -> RowCounts:
        """Compute slices until the scheduler has no further one, or wants this worker to end.

        Raises:
            ExecutorError: a slice could not be fetched or computed, or a part not sent.
        """
        while not self._drains and (fetched := self._queue.take()) is not None:
            self._queue.prefetch()  # the second slice in hand; after the part before it
            with self._spans.span("compute slice", slice=_slice_index(fetched)):
                self._compute_slice(fetched)
            self._report()
            self._spans.flush()
        self._queue.flush()
        if self._drains:
            logger.info("the scheduler drains this worker")
        return self._progress

    def _compute_slice(self, fetched: Fetched) -> None:
        index = _slice_index(fetched)
        with closing(open_slice(fetched.path)) as rows:
            part = Part(index, rows, self._task.copied_columns)
            for row, outcome in self._outcomes(rows, index):
                self._count(part, row, outcome, index, fetched)
            path = self._bridge.work_dir / part_name(index)
            count = part.write(path)
        fetched.path.unlink(missing_ok=True)
        self._progress.slices += 1
        self._queue.send(path, index, count)

    def _count(self, part: Part, row: int, outcome: Result | RowError, index: int, fetched: Fetched) -> None:
        if isinstance(outcome, RowError) and self._task.inference.on_error == "fail":
            dataset = fetched.metadata.get("dataset", "")
            raise RowFailed(f"dataset {dataset!r}, slice {index}, row {row}: {outcome}")
        before = part.errors
        part.add(row, outcome)
        self._progress.rows += 1
        self._progress.errors += part.errors - before
        self._progress.tokens += outcome.tokens if isinstance(outcome, Result) else 0

    def _outcomes(self, rows: SliceRows, index: int) -> Iterator[tuple[int, Result | RowError]]:
        """Yield the outcome of each row, those that cannot be prepared first."""
        groups: dict[Hashable, list[tuple[int, Any]]] = {}
        for row in range(rows.count):
            try:
                prepared = self._computation.prepare(rows, row)
                groups.setdefault(prepared.alike, []).append((row, prepared))
            except Exception as error:  # noqa: BLE001 – whatever a tokenizer raises is recorded with its row
                yield row, row_error_of(error)
        size = self._batch_size or rows.count
        batches = BatchComputer[tuple[int, Any], Result | RowError](
            lambda batch: self._computation.compute(rows, index, batch), size
        )
        for batch in itertools.chain.from_iterable(map(batches, groups.values())):
            for (row, _), outcome in batch:
                yield row, outcome
            if self._delay:
                time.sleep(self._delay)
            if time.monotonic() - self._reported >= _REPORT_SECONDS:
                self._report()
        if batches.size < size:
            self._batch_size = batches.size

    def _report(self) -> None:
        self._reported = time.monotonic()
        try:
            self._drains = self._bridge.report_task(self._progress.metrics(self._reported - self._begun))
        except BridgeRefused as error:  # the results do not depend on it
            logger.warning("the worker refused a report of the progress: %s", error)


def _slice_index(fetched: Fetched) -> int:
    text = fetched.metadata.get("slice", "")
    if not (text.isascii() and text.isdecimal()):
        raise DataError(f"the worker named no slice of {fetched.path.name}: metadata slice is {text!r:.80}")
    return int(text)


_Row = TypeVar("_Row")
_Result = TypeVar("_Result")
_DEVICE_WORDS: Final = ("cuda error", "hip error", "acceleratorerror", "device-side assert")


class DeviceFailed(ExecutorError):
    """The accelerator cannot compute anything any more, so that no row is to blame."""


class BatchComputer(Generic[_Row, _Result]):
    """Computes rows in batches with a function that takes several rows.

    A batch that fails is halved until the row is found. When memory runs out, batches become smaller for good.

    Attributes:
        size: most rows of a batch.
    """

    def __init__(self, compute: Callable[[Sequence[_Row]], Sequence[_Result]], size: int) -> None:
        """Store the function and the first size of batches."""
        self._compute = compute
        self.size = size

    def __call__(self, rows: Sequence[_Row]) -> Iterator[list[tuple[_Row, _Result | RowError]]]:
        """Yield the rows of each batch in order, with their results or errors.

        Raises:
            DeviceFailed: the device failed.
        """
        pending = [rows] if rows else []
        while pending:
            batch = pending.pop()
            if len(batch) > self.size:
                pending += [batch[self.size :], batch[: self.size]]
                continue
            try:
                results = self._compute(batch)
            except Exception as error:  # noqa: BLE001 – whatever a model raises is recorded with its row
                halves = self._after(error, batch)
                if halves is None:
                    yield [(batch[0], _recorded(error))]
                else:
                    pending += reversed(halves)
            else:
                yield list(zip(batch, results, strict=True))

    def _after(self, error: Exception, batch: Sequence[_Row]) -> list[Sequence[_Row]] | None:
        """Return the halves of a batch that failed; None for a single row."""
        if _is_device_failure(error):
            raise DeviceFailed(f"the device failed: {type(error).__name__}: {str(error).strip()[:300]}") from error
        middle = (len(batch) + 1) // 2
        if len(batch) == 1:
            return None
        if is_out_of_memory(error):
            self.size = middle
            logger.warning("memory is exhausted by a batch of %d rows: batches have %d from now on", len(batch), middle)
        return [batch[:middle], batch[middle:]]


def _is_device_failure(error: Exception) -> bool:
    text = f"{type(error).__name__}: {error}".lower()
    return not is_out_of_memory(error) and any(words in text for words in _DEVICE_WORDS)


def _recorded(error: Exception) -> RowError:
    if is_out_of_memory(error):
        return RowError("out-of-memory", str(error))
    return row_error_of(error)
