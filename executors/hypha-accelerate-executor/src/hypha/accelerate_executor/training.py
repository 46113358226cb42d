"""Train for one job: the process that a worker starts, `python -m hypha.accelerate_executor.training`.

Started by the worker's process executor with a socket, a work directory and the job. It connects to the job bridge,
fetches the model while torch is being imported, and runs `diloco.loop`. Exit codes: 0 when the job is done, 1 with a
one-line reason when training failed, 2 when the job is invalid or not supported, 74 (``EX_IOERR`` of sysexits.h) when
this machine's disk is full or fails: the worker then gives its work back, and the job can continue without it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge, Fetched
from hypha.accelerate_executor.bridge.redaction import Redaction, hide, secrets_of
from hypha.accelerate_executor.bridge.spans import TRACE_VARIABLE, Spans
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.data.preprocess import preprocessed_columns
from hypha.accelerate_executor.environment import (
    DEFAULT_TIMEOUT,
    DELAY_VARIABLE,
    TIMEOUT_VARIABLE,
    isolate,
    read_seconds,
)
from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.exit_codes import exit_code_of, log_to_stderr, run_as_process
from hypha.accelerate_executor.modeling.hf import model_directory
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha_proto.codec import from_json
from hypha_proto.errors import DecodeError
from hypha_proto.job_spec import JobSpec, SchedulerReference, TrainConfig, TrainJob

logger = logging.getLogger("hypha.accelerate_executor.training")

_DEFAULT_UPDATE_TIMEOUT: Final = 86_400.0
"""A round lasts as long as its slowest worker takes; the worker ends an executor whose job is over."""
_JOB_LIMIT: Final = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; return its exit code."""
    started = time.perf_counter()
    options = _parser().parse_args(arguments)
    # only the leader of several processes logs progress; the others log warnings
    log_to_stderr(logging.WARNING if _is_follower() else logging.INFO)
    code = exit_code_of(lambda: _train(options, started), options.work_dir)
    if code:
        return code
    logger.info("the job is done")
    return 0


def read_job(text: str) -> TrainConfig:
    """Read the job from JSON, or from the file that `@path` names.

    Raises:
        JobError: it is not a training job, or is not supported.
    """
    try:
        content = Path(text[1:]).read_text() if text.startswith("@") else text
        spec: JobSpec = from_json(JobSpec, content, _JOB_LIMIT)
    except OSError as error:
        raise JobError(f"--job {text[:200]}: {error.strerror}") from None
    except DecodeError as error:
        raise JobError(f"--job: {error}") from None
    if not isinstance(spec.executor, TrainJob):
        raise JobError("--job: expected a job of class 'train'")
    config = spec.executor.config
    if config.batch_size < 1:
        raise JobError("--job: batch_size must be at least 1")
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hypha.accelerate_executor.training", description="Train for one Hypha job.")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket of the worker's job bridge")
    parser.add_argument("--work-dir", type=Path, required=True, help="directory of this job")
    parser.add_argument("--job", required=True, help="job specification as JSON, or @FILE")
    parser.add_argument(
        "--allow-module",
        action="append",
        default=[],
        metavar="NAME",
        help="a module whose classes jobs of task 'torch' may train; may be repeated",
    )
    parser.add_argument(
        "--device-map",
        metavar="MAP",
        help="distribute the model's layers over several devices of one process, as in transformers: auto, balanced, …",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=None,
        help=(
            f"seconds to wait for an answer or an outer update (or {TIMEOUT_VARIABLE}; "
            f"default {DEFAULT_TIMEOUT:g} and {_DEFAULT_UPDATE_TIMEOUT:g})"
        ),
    )
    return parser


def _is_follower() -> bool:
    """Return whether this process is a follower: its launcher gave it a rank other than 0."""
    return os.environ.get("RANK", "0") != "0"


def _timeouts(options: argparse.Namespace) -> tuple[float, float]:
    """Return the timeouts, seconds, of a request and of waiting for an outer update."""
    if options.timeout is not None:
        return options.timeout, options.timeout
    return read_seconds(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT), read_seconds(TIMEOUT_VARIABLE, _DEFAULT_UPDATE_TIMEOUT)


def _train(options: argparse.Namespace, started: float) -> None:
    config = read_job(options.job)
    timeout, update_timeout = _timeouts(options)
    delay = read_seconds(DELAY_VARIABLE, 0.0)
    hide(secrets_of(config))
    work_dir = options.work_dir.resolve()
    isolate(work_dir)
    if _is_follower():
        from hypha.accelerate_executor.diloco.loop import LoopTiming, follow

        follow(config, _owner_options(options), LoopTiming(update_timeout, delay))
        return
    with Bridge(options.socket, work_dir, timeout) as bridge:
        batches = Batches(
            _slices(bridge, config),
            config.batch_size,
            config.seed or 0,
            preprocessed_columns(config),
            config.data.dataset if isinstance(config.data, SchedulerReference) else "",
        )
        clean = Redaction(secrets_of(config)).clean
        spans = Spans(bridge.report_spans, os.environ.get(TRACE_VARIABLE), clean)
        try:
            with (
                spans.span("start executor", time.perf_counter() - started),
                ThreadPoolExecutor(1, thread_name_prefix="model") as thread,
            ):
                files = thread.submit(_files, bridge, config)
                # takes seconds; the files arrive meanwhile
                with spans.span("import torch"):
                    from hypha.accelerate_executor.diloco.loop import LoopTiming, build_loop

                timing = LoopTiming(update_timeout, delay)
                loop = build_loop(bridge, config, _owner_options(options), files.result, batches, timing, spans)
            logger.info("ready after %.1f s", time.perf_counter() - started)
            loop.run()
        finally:
            spans.flush()
            batches.close()


def _owner_options(options: argparse.Namespace) -> OwnerOptions:
    return OwnerOptions(frozenset(options.allow_module), options.device_map)


def _files(bridge: Bridge, config: TrainConfig) -> ModelFiles:
    model = model_directory([fetched.path for fetched in bridge.fetch(config.model.artifact, "model")])
    if config.preprocessor is None:
        return ModelFiles(model)
    paths = [fetched.path for fetched in bridge.fetch(config.preprocessor.artifact, "preprocessor")]
    if not paths:
        raise JobError("the preprocessor's artifact contains no file")
    top = min(paths, key=lambda path: len(path.parts))
    return ModelFiles(model, top if top.is_dir() else top.parent)


def _slices(bridge: Bridge, config: TrainConfig) -> Callable[[], list[Fetched]]:
    """Return a function that fetches the next slice into a new directory.

    A dataset of one slice is assigned again under the same name while the file is still in use.
    """
    numbers = itertools.count()
    return lambda: bridge.fetch(config.data, f"slices/{next(numbers)}")


if __name__ == "__main__":
    run_as_process(main)
