"""Values of the command line, and what `training` passes to `diloco.loop` and `training_setup`.

The task that a worker passes with `--job` is read by `training` and `predict.settings`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.errors import JobError
from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError
from hypha_proto.texts import quote

PADDED: Final = "padded"
CONTINUOUS: Final = "continuous"
ENGINES: Final = (PADDED, CONTINUOUS)
"""Ways to generate several rows together, as the worker's owner names them."""


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
        return parse_json(Path(text[1:]).read_text() if text.startswith("@") else text)
    except OSError as error:
        raise JobError(f"--job {quote(text)}: {error.strerror}") from None
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
