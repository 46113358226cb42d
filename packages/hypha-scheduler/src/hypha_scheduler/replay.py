"""Replay of a job: lets an executor compute it again from its journal, in one process, and compares.

The strategy of the job's type makes a plan from the journal and checks that the files are those of the job; the
executor's command does the mathematics and prints what it finds. Nothing in the job's directory is written.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import to_json
from hypha_proto.replay_plan import ReplayPlan
from hypha_scheduler.errors import JobFailedError, JobRefusedError
from hypha_scheduler.jobs.journal import JOURNAL, read_journal
from hypha_scheduler.strategies.registry import DEFAULT_TYPE, load_strategy
from hypha_scheduler.strategies.replayable import Replayable, ReplayOptions

_MODULE: Final = "hypha.accelerate_executor.replay"
_VERDICTS: Final = {True: (0, "proven"), False: (1, "not proven")}
"""Exit status and beginning of the last line of an executor, by whether the job is proven."""


def plan_replay(directory: Path, options: ReplayOptions) -> ReplayPlan:
    """Return the plan of the job in a directory.

    Raises:
        JobRefusedError: it is no directory of a job that can be replayed, or its files are not those of the job.
    """
    try:
        records = read_journal(directory / JOURNAL)
        return _strategy_of(directory, records).plan_replay(directory, records, options)
    except JobFailedError as error:
        raise JobRefusedError(str(error)) from None
    except OSError as error:
        raise JobRefusedError(f"{error.filename or directory}: {error.strerror or error}") from None


def _strategy_of(directory: Path, records: Sequence[Mapping[str, Any]]) -> Replayable:
    if not records:
        raise JobRefusedError(f"{directory}: there is no {JOURNAL} with a record; name a job's directory")
    job = records[0].get("job")
    if not isinstance(job, dict):
        raise JobRefusedError(f"{directory}: the first record of {JOURNAL} has no job; name a job's directory")
    kind = job.get("type", DEFAULT_TYPE)
    strategy = load_strategy(str(kind))
    if not isinstance(strategy, Replayable):
        raise JobRefusedError(f"{directory}: the job is of type {kind!r}, which cannot be computed again")
    return strategy


def run_replay(plan: ReplayPlan, command: str | None, show: Callable[[str], object]) -> bool:
    """Let an executor compute a plan; return whether the job is proven.

    Args:
        plan: the plan.
        command: the executor's command, to which the path of the plan is added; None starts the one of
            hypha-accelerate-executor in this environment.
        show: called with each line of its output.

    Raises:
        JobRefusedError: the executor cannot be started, or refuses the plan.
    """
    arguments = _default_command() if command is None else shlex.split(command)
    if not arguments:
        raise JobRefusedError("--executor: the command is empty")
    # as many threads as a worker gives to an executor with its cores
    threads = {} if plan.threads is None else {"OMP_NUM_THREADS": str(plan.threads)}
    with tempfile.TemporaryDirectory(prefix="hypha-plan-") as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(to_json(ReplayPlan, plan))
        status, last = _run([*arguments, str(path)], os.environ | threads, show)
    for proven, (expected, verdict) in _VERDICTS.items():
        if status == expected and last.startswith(verdict):
            return proven
    raise JobRefusedError(f"the executor ended with status {status} and without a verdict; its last lines say why")


def _default_command() -> list[str]:
    try:
        found = importlib.util.find_spec(_MODULE)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise JobRefusedError(
            "hypha-accelerate-executor is not installed here; name the command that computes with --executor, such as "
            f"'/path/to/python -m {_MODULE}'"
        )
    return [sys.executable, "-m", _MODULE]


def _run(command: Sequence[str], environment: Mapping[str, str], show: Callable[[str], object]) -> tuple[int, str]:
    """Run a command and show its output; return its exit status and its last line."""
    last = ""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, errors="replace")
    except OSError as error:
        raise JobRefusedError(f"--executor: {command[0]}: {error.strerror or error}") from None
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = line.rstrip("\n")
                show(last)
        except BaseException:
            process.terminate()
            raise
    return process.returncode, last
