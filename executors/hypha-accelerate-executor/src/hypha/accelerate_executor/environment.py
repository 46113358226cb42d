"""Environment variables, module path and garbage collection of a process that a worker starts."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.errors import JobError

TIMEOUT_VARIABLE: Final = "HYPHA_EXECUTOR_TIMEOUT"
"""Seconds that one request (default 600), or the wait for an outer update (default a day), may take."""
DELAY_VARIABLE: Final = "HYPHA_EXECUTOR_DELAY"
"""Seconds added to every batch; for tests and benchmarks of uneven workers only."""
DEFAULT_TIMEOUT: Final = 600.0
"""Seconds that one request may take unless the owner says otherwise."""


def read_seconds(variable: str, default: float) -> float:
    """Return a duration from the environment.

    Raises:
        JobError: it is not a number of seconds.
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise JobError(f"{variable}={text!r} is not a number of seconds")
    return value


def isolate(work_dir: Path) -> None:
    """Keep the process from importing files of the job, and transformers from downloading anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes through the worker
    # `python -m` adds the current directory, which holds the job's files, to the module path
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != work_dir]


@contextmanager
def collected_at_end() -> Iterator[None]:
    """Collect garbage once, when what was imported and loaded in the context is complete, and leave that out later.

    The interpreter would look through all modules of torch and transformers six times while they are imported, and
    again every few thousand rows, for 0.2 s each time. It never frees them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.collect()  # cycles of the loader would stay for good
    gc.freeze()
