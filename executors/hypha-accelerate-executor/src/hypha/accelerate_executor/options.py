"""Command line, environment variables, module path and garbage collection of a process that a worker starts.

The task that a worker passes with `--job` is read by `training` and `predict.settings`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.errors import JobError
from hypha_proto.bridge_api import MEMORY_VARIABLE
from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError

TIMEOUT_VARIABLE: Final = "HYPHA_EXECUTOR_TIMEOUT"
"""Seconds that one request may take (default 600, in training a day)."""
DELAY_VARIABLE: Final = "HYPHA_EXECUTOR_DELAY"
"""Seconds added to every batch; for tests and benchmarks of uneven workers only."""
LAUNCH_VARIABLES: Final = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
"""Variables that `accelerate launch` sets."""
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


def read_memory() -> int | None:
    """Return how many bytes of main memory the lease has; None if it has no limit.

    Raises:
        JobError: the variable is not a positive number of bytes.
    """
    text = os.environ.get(MEMORY_VARIABLE)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise JobError(f"{MEMORY_VARIABLE}={text[:50]!r} is not a number of bytes, 1 or more")
    return int(text)


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


_TASK_LIMIT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class OwnerOptions:
    """Options set by the worker's owner with command-line flags."""

    modules: frozenset[str] = field(default_factory=frozenset)
    """Modules whose classes models of task `torch` may use."""
    device_map: str | None = None
    """How transformers distributes the model's layers over devices; None keeps the model on one device."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Paths of the files that the worker has fetched."""

    model: Path
    preprocessor: Path | None = None


def parse_task(text: str) -> Any:
    """Parse the task that `--job` has as JSON, or whose file it names as `@path`.

    Raises:
        JobError: there is no such file, or it is not JSON.
    """
    try:
        return parse_json(Path(text[1:]).read_text() if text.startswith("@") else text, _TASK_LIMIT)
    except OSError as error:
        raise JobError(f"--job {text[:200]}: {error.strerror}") from None
    except DecodeError as error:
        raise JobError(f"--job: {error}") from None


def make_parser(module: str, description: str, timeout: str) -> argparse.ArgumentParser:
    """Return the parser of the options of every process that a worker starts.

    Args:
        module: name of the module that is run.
        description: what it does.
        timeout: what is waited for, and for how many seconds by default, for the help.
    """
    parser = argparse.ArgumentParser(prog=f"hypha.accelerate_executor.{module}", description=description)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket of the worker's job bridge")
    parser.add_argument("--work-dir", type=Path, required=True, help="directory of this task")
    parser.add_argument("--job", required=True, help="the task as JSON, or @FILE")
    parser.add_argument(
        "--allow-module",
        action="append",
        default=[],
        metavar="NAME",
        help="a module whose classes tasks with a model of type 'torch' may use; may be repeated",
    )
    parser.add_argument(
        "--device-map",
        metavar="MAP",
        help="distribute the model's layers over several devices of one process, as in transformers: auto, balanced, …",
    )
    parser.add_argument("--timeout", type=float, default=None, help=f"seconds to wait for {timeout}")
    return parser
