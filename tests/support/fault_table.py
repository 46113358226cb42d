"""Table of faults and what was seen, printed after the tests that measured it: the table of ``docs/faults.md``.

A test notes its rows with the fixture ``fault_row``; they reach the process that prints as properties of its report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import pytest

PROPERTY: Final = "fault"
HEAD: Final = ("| fault | seen |", "| --- | --- |")
FaultRow = Callable[[str, str], None]
"""Notes a fault and what was seen."""


def fault_row_of(record_property: Callable[[str, object], None]) -> FaultRow:
    """Return a function that notes a row of the table."""

    def note(fault: str, seen: str) -> None:
        record_property(PROPERTY, f"| {fault} | {seen} |")

    return note


def rows_of(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return the rows that tests have noted, in their order."""
    found = (pair for report in reports if report.when == "call" for pair in report.user_properties)
    return [str(value) for name, value in found if name == PROPERTY]
