"""Environment variables, module path and memory management of a process that a worker starts."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.errors import JobError
from hypha_proto.bridge_api import MEMORY_VARIABLE

TIMEOUT_VARIABLE: Final = "HYPHA_EXECUTOR_TIMEOUT"
"""Seconds that one request may take (default 600, in training a day)."""
DELAY_VARIABLE: Final = "HYPHA_EXECUTOR_DELAY"
"""Seconds added to every batch; for tests and benchmarks of uneven workers only."""
LAUNCH_VARIABLES: Final = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
"""Variables that `accelerate launch` sets."""
DEFAULT_TIMEOUT: Final = 600.0
"""Seconds that one request may take unless the owner says otherwise."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Numbers of the parameters of ``mallopt``, in malloc.h."""
_KEPT: Final = 1 << 30
"""Bytes of freed memory at the end of the heap that are kept."""
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
"""Bytes that glibc accepts at most: larger blocks are mapped one by one in any case."""


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


def read_memory() -> int | None:
    """Return how many bytes of main memory the lease has; None if it has no limit.

    Raises:
        JobError: the variable is not a positive number of bytes.
    """
    text = os.environ.get(MEMORY_VARIABLE)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise JobError(f"{MEMORY_VARIABLE}={text!r} is not a number of bytes, 1 or more")
    return int(text)


def keep_freed_memory() -> None:
    """Let glibc keep the memory that one step frees for the next (mallopt(3)); nothing with another C library.

    By default it gives much of it back to the kernel, and each step takes 1,000 page faults and more to get it again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def isolate(work_dir: Path) -> None:
    """Keep the process from importing files of the job, and transformers from downloading anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes through the worker
    # `python -m` adds the current directory, which holds the job's files, to the module path
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != work_dir]


def leave_out_of_collections() -> None:
    """Leave what is imported out of all later collections of garbage, without looking through it now."""
    gc.freeze()


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
