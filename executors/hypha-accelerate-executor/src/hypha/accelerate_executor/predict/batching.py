"""Computes rows in batches, so that a row that cannot be computed costs no other row its result.

A batch that fails is halved until the row is found. When memory runs out, batches become smaller for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from hypha.accelerate_executor.errors import ExecutorError, RowError, is_out_of_memory, row_error_of

logger = logging.getLogger(__name__)

_Row = TypeVar("_Row")
_Result = TypeVar("_Result")
_DEVICE_WORDS: Final = ("cuda error", "hip error", "acceleratorerror", "device-side assert")


class DeviceFailed(ExecutorError):
    """The accelerator cannot compute anything any more, so that no row is to blame."""


class BatchComputer(Generic[_Row, _Result]):
    """Computes rows in batches with a function that takes several rows.

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
            raise DeviceFailed(f"the device failed: {type(error).__name__}: {error}") from error
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
