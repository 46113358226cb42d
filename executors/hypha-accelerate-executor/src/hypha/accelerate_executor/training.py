"""Train for one job: the process that a worker starts, `python -m hypha.accelerate_executor.training`.

Started by the worker's process executor with a socket, a work directory and the task. It connects to the job bridge,
fetches the model while torch is being imported, and runs `diloco.loop`. Exits with 0 when the job is done, otherwise
with a code of `exit_codes` and a reason of one line.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge, Fetched
from hypha.accelerate_executor.bridge.redaction import Redaction, hide, secrets_of
from hypha.accelerate_executor.bridge.spans import TRACE_VARIABLE, Spans
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.data.preprocess import preprocessed_columns
from hypha.accelerate_executor.environment import (
    DELAY_VARIABLE,
    TIMEOUT_VARIABLE,
    collected_at_end,
    isolate,
    leave_out_of_collections,
    read_seconds,
)
from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.exit_codes import exit_code_of, log_to_stderr, run_as_process
from hypha.accelerate_executor.modeling.archive import unpacked_files
from hypha.accelerate_executor.modeling.hf import import_library, model_directory
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions, make_parser, parse_task
from hypha_proto.codec import from_plain
from hypha_proto.errors import DecodeError
from hypha_proto.job_spec import SchedulerReference, TrainConfig
from hypha_proto.wire_schema import Message

logger = logging.getLogger("hypha.accelerate_executor.training")

_DEFAULT_TIMEOUT: Final = 86_400.0
"""Seconds to wait for an answer of the worker, or an outer update.

What the worker answers depends on others: on sizes and rates of files, on a parameter server that is replaced, on a
scheduler that is started again. The job bounds all of it, and its worker closes the bridge or ends the executor; this
is the last bound."""


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


class _Task(Message, frozen=True):
    """What is read of a task."""

    settings: TrainConfig


def read_settings(text: str) -> TrainConfig:
    """Read the settings of the task that `--job` has or names.

    Raises:
        JobError: it is not a task that trains, or is not supported.
    """
    try:
        task: _Task = from_plain(_Task, parse_task(text))
    except DecodeError as error:
        raise JobError(f"--job: {error}") from None
    config = task.settings
    if config.batch_size < 1:
        raise JobError("--job: settings.batch_size must be at least 1")
    if config.micro_batch is not None and config.micro_batch < 1:
        raise JobError("--job: settings.micro_batch must be at least 1")
    return config


def _parser() -> argparse.ArgumentParser:
    default = f"{TIMEOUT_VARIABLE}; default {_DEFAULT_TIMEOUT:g}: the job's own bounds are shorter"
    waits = f"an answer of the worker, or an outer update (or {default})"
    return make_parser("training", "Train for one Hypha job.", waits)


def _is_follower() -> bool:
    """Return whether this process is a follower: its launcher gave it a rank other than 0."""
    return os.environ.get("RANK", "0") != "0"


def _train(options: argparse.Namespace, started: float) -> None:
    config = read_settings(options.job)
    timeout = read_seconds(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT) if options.timeout is None else options.timeout
    delay = read_seconds(DELAY_VARIABLE, 0.0)
    hide(secrets_of(config))
    work_dir = options.work_dir.resolve()
    isolate(work_dir)
    if _is_follower():
        from hypha.accelerate_executor.diloco.loop import LoopTiming, follow

        follow(config, _owner_options(options), LoopTiming(timeout, delay))
        return
    dataset = config.data.dataset if isinstance(config.data, SchedulerReference) else ""
    with Bridge(options.socket, work_dir, timeout) as bridge:
        batches = Batches(
            partial(_fetch_slices, bridge, config),
            config.batch_size,
            config.seed or 0,
            preprocessed_columns(config),
            dataset,
        )
        clean = Redaction(secrets_of(config)).clean
        spans = Spans(bridge.report_spans, os.environ.get(TRACE_VARIABLE), clean)
        try:
            with (
                spans.span("start executor", time.perf_counter() - started),
                ThreadPoolExecutor(1, thread_name_prefix="model") as thread,
                collected_at_end(),
            ):
                files = thread.submit(_files, bridge, config)
                batches.prefetch()
                # takes seconds; the files and the first slice arrive meanwhile
                with spans.span("import torch"):
                    from hypha.accelerate_executor.diloco.loop import LoopTiming, build_loop

                    import_library(config.model.task)
                    leave_out_of_collections()

                timing = LoopTiming(timeout, delay)
                loop = build_loop(bridge, config, _owner_options(options), files.result, batches, timing, spans)
            logger.info("ready after %.1f s", time.perf_counter() - started)
            loop.run()
        finally:
            spans.flush()
            batches.close()
            gc.unfreeze()  # for a caller that goes on


def _owner_options(options: argparse.Namespace) -> OwnerOptions:
    return OwnerOptions(frozenset(options.allow_module), options.device_map)


def _fetch_slices(bridge: Bridge, config: TrainConfig, count: int) -> list[Fetched]:
    """Fetch the next slices; `count` and `ahead` are for a scheduler's dataset."""
    if not isinstance(config.data, SchedulerReference):
        return bridge.fetch(config.data, "slices")
    return bridge.fetch(config.data, "slices", count, ahead=bool(config.join) and not bridge.has_joined)


def _files(bridge: Bridge, config: TrainConfig) -> ModelFiles:
    fetched = [each.path for each in bridge.fetch(config.model.artifact, "model")]
    model = model_directory(unpacked_files(fetched, is_model=True))
    if config.preprocessor is None:
        return ModelFiles(model)
    fetched = [each.path for each in bridge.fetch(config.preprocessor.artifact, "preprocessor")]
    paths = unpacked_files(fetched, is_model=False)
    if not paths:
        raise JobError("the preprocessor's artifact contains no file")
    top = min(paths, key=lambda path: len(path.parts))
    return ModelFiles(model, top if top.is_dir() else top.parent)


if __name__ == "__main__":
    run_as_process(main)
