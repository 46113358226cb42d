"""Compute a job again: the process that `hypha-scheduler replay` starts, `python -m hypha.accelerate_executor.replay`.

Reads a plan (`hypha_proto.replay_plan`), computes its rounds and prints what it finds. Exit codes: 0 the record is
proven, 1 it is not, 2 the plan is invalid or a file that it names cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypha.accelerate_executor.errors import ExecutorError, JobError
from hypha.accelerate_executor.exit_codes import end_unforeseen, log_to_stderr, run_as_process
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha_proto.codec import from_json
from hypha_proto.errors import DecodeError, ProtoError
from hypha_proto.replay_plan import FORMAT, ReplayPlan

logger = logging.getLogger("hypha.accelerate_executor.replay")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; return its exit code."""
    options = _parser().parse_args(arguments)
    log_to_stderr(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        plan = read_plan(options.plan)
        with tempfile.TemporaryDirectory(prefix="hypha-replay-", dir=options.scratch) as scratch:
            return 0 if replay(plan, OwnerOptions(frozenset(options.allow_module)), Path(scratch)) else 1
    except (ExecutorError, ProtoError, OSError) as error:
        logger.error("%s", error)
        return 2
    except Exception as error:  # noqa: BLE001 – whatever libraries raise must not look like a record that is not proven
        return end_unforeseen(error)


def read_plan(path: Path) -> ReplayPlan:
    """Read and check a plan.

    Raises:
        JobError: it cannot be read, is malformed or of another version.
    """
    try:
        plan: ReplayPlan = from_json(ReplayPlan, path.read_bytes())
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    except DecodeError as error:
        raise JobError(f"{path}: {error}") from None
    if plan.format != FORMAT:
        raise JobError(f"{path}: format: {plan.format}, this version reads {FORMAT}; update this package")
    if not plan.rounds or any(found.run >= len(plan.runs) or not found.members for found in plan.rounds):
        raise JobError(f"{path}: rounds: none, or one without a member or of a run that the plan does not have")
    return plan


def replay(plan: ReplayPlan, options: OwnerOptions, folder: Path) -> bool:
    """Compute the rounds of a plan, print what is found, and return whether the record is proven.

    Args:
        plan: the record.
        options: modules that models of task ``torch`` may use.
        folder: for the members' states and updates, as large as these.

    Raises:
        ExecutorError: the model or a slice cannot be used.
        ProtoError, OSError: a file cannot be read or written.
    """
    import torch

    from hypha.accelerate_executor.replay.computation import RoundComputation, RoundFindings
    from hypha.accelerate_executor.replay.trainee import TorchTrainee
    from hypha.accelerate_executor.replay.verdict import conclude, describe_round

    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    files = ModelFiles(Path(plan.model), None if plan.preprocessor is None else Path(plan.preprocessor))
    slices = {entry.index: Path(entry.path) for entry in plan.slices}
    trainee = TorchTrainee(plan.runs[plan.rounds[0].run].train, files, slices, options, folder)
    found: list[RoundFindings] = []
    for findings in RoundComputation(plan, trainee, folder).rounds():
        found.append(findings)
        print(*describe_round(findings), sep="\n", flush=True)
    proven, verdict = conclude(found, len(plan.rounds))
    print(verdict, flush=True)
    return proven


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hypha.accelerate_executor.replay", description="Compute the rounds of a DiLoCo job again and compare."
    )
    parser.add_argument("plan", type=Path, help="plan that `hypha-scheduler replay` has written")
    parser.add_argument(
        "--allow-module",
        action="append",
        default=[],
        metavar="NAME",
        help="a module whose classes jobs of task 'torch' may train; may be repeated",
    )
    parser.add_argument("--scratch", type=Path, help="directory for temporary files; default: the system's")
    return parser


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run_as_process(main)
