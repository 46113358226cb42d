"""Errors of single rows, recorded in the results instead of ending the process."""

from __future__ import annotations

from typing import Final

DETAIL_LIMIT: Final = 300
"""Largest number of characters of a recorded detail."""


class RowError(Exception):
    """A row cannot be computed.

    Attributes:
        kind: one of missing-column, wrong-type, wrong-value, not-json, too-long, not-finite, out-of-memory, failed.
        detail: what is wrong, in one line.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = " ".join(detail.split())[:DETAIL_LIMIT]
        super().__init__(f"{kind}: {self.detail}")


def row_error_of(error: Exception) -> RowError:
    """Return the error to record for a row whose computation raised `error`."""
    if isinstance(error, RowError):
        return error
    return RowError("failed", f"{type(error).__name__}: {error}")
