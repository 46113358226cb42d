"""Batch inference for one task: the process that a worker starts, `python -m hypha.accelerate_executor.inference`.

Started by the worker's process executor with a socket, a work directory and the task. It computes one result for each
row of the slices that the scheduler assigns, with `predict.loop`. Exit codes: 0 when no slice is left or the scheduler
drains this worker, 1 with a one-line reason when inference failed, 2 when the task is invalid or not supported, 74
(``EX_IOERR`` of sysexits.h) when this machine's disk is full or fails.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hypha.accelerate_executor.bridge.client import Bridge
from hypha.accelerate_executor.bridge.spans import TRACE_VARIABLE, Spans
from hypha.accelerate_executor.environment import (
    DEFAULT_TIMEOUT,
    DELAY_VARIABLE,
    TIMEOUT_VARIABLE,
    collected_at_end,
    isolate,
    read_seconds,
)
from hypha.accelerate_executor.errors import ExecutorError, JobError, ModelError
from hypha.accelerate_executor.exit_codes import exit_code_of, log_to_stderr, run_as_process
from hypha.accelerate_executor.modeling.archive import unpacked
from hypha.accelerate_executor.modeling.hf import lean_imports, load_stored_model, quieten_transformers
from hypha.accelerate_executor.options import ENGINES, PADDED, make_parser
from hypha.accelerate_executor.predict.settings import GENERATE, InferenceTask, read_task
from hypha.accelerate_executor.predict.slice_queue import SliceQueue

if TYPE_CHECKING:
    import torch

    from hypha.accelerate_executor.data.preprocess import BatchPreprocessor
    from hypha.accelerate_executor.predict.classifier import Classifier
    from hypha.accelerate_executor.predict.generator import Generator

logger = logging.getLogger("hypha.accelerate_executor.inference")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; return its exit code."""
    started = time.perf_counter()
    options = _parser().parse_args(arguments)
    log_to_stderr(logging.INFO)
    return exit_code_of(lambda: _run(options, started), options.work_dir)


def _parser() -> argparse.ArgumentParser:
    waits = f"an answer (or {TIMEOUT_VARIABLE}; default {DEFAULT_TIMEOUT:g})"
    parser = make_parser("inference", "Compute results for one Hypha task.", waits)
    parser.add_argument(
        "--generation",
        choices=ENGINES,
        default=PADDED,
        help="how rows are generated together: in padded batches, or by continuous batching",
    )
    return parser


def _run(options: argparse.Namespace, started: float) -> None:
    task = read_task(options.job)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise JobError('inference runs in one process; start it with cmd = "python", not with accelerate launch')
    timeout = read_seconds(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT) if options.timeout is None else options.timeout
    delay = read_seconds(DELAY_VARIABLE, 0.0)
    work_dir = options.work_dir.resolve()
    isolate(work_dir)
    with Bridge(options.socket, work_dir, timeout) as bridge:
        queue = SliceQueue(bridge, task)
        spans = Spans(bridge.report_spans, os.environ.get(TRACE_VARIABLE))
        try:
            queue.prefetch()  # comes while torch is imported and the model is loaded
            about = spans.span("start executor", time.perf_counter() - started, task=task.model.type)
            with about, collected_at_end():
                from hypha.accelerate_executor.predict.loop import InferenceLoop

                computation = _load(task, work_dir, options)
            logger.info("ready after %.1f s", time.perf_counter() - started)
            done = InferenceLoop(bridge, task, computation, queue, spans, delay).run()
        finally:
            spans.flush()
            queue.close()
            gc.unfreeze()  # for a caller that goes on
    logger.info("done: %d slices, %d rows, %d errors", done.slices, done.rows, done.errors)


def _load(task: InferenceTask, work_dir: Path, options: argparse.Namespace) -> Classifier | Generator:
    """Load the model and what prepares its inputs.

    Raises:
        ExecutorError: it cannot be loaded, or is not supported.
    """
    with lean_imports(task.model.type):
        quieten_transformers()
    from hypha.accelerate_executor.predict.computation import pick_device

    device = pick_device()
    model = unpacked(work_dir / task.model.path, is_model=True)
    folder = model  # may have a tokenizer or processor, too
    if task.preprocessor is not None and task.preprocessor.path != task.model.path:
        folder = unpacked(work_dir / task.preprocessor.path, is_model=False)
    module = load_stored_model(
        task.model.type,
        model,
        allowed=frozenset(options.allow_module),
        device_map=options.device_map,
    )
    if options.device_map is None:
        module.to(device)
    logger.info("%s with %s on %s", task.task, type(module).__name__, device)
    if task.task == GENERATE:
        from hypha.accelerate_executor.data.preprocess import load_tokenizer
        from hypha.accelerate_executor.predict.generator import Generator

        try:
            tokenizer = load_tokenizer(folder)
        except ExecutorError as error:
            remedy = "generate needs a tokenizer in the model's folder, or a preprocessor of type tokenizer"
            raise ModelError(f"{remedy}: {error}") from error
        return Generator(task, module, tokenizer, device, options.generation)
    from hypha.accelerate_executor.predict.classifier import Classifier

    return Classifier(task, module, device, _preprocessor(task, folder, module))


def _preprocessor(task: InferenceTask, folder: Path, module: torch.nn.Module) -> BatchPreprocessor | None:
    from hypha.accelerate_executor.data.preprocess import load_preprocessor

    if task.preprocessor is None:
        return None
    return load_preprocessor(task.preprocessor.type, folder, task.raw_columns, module)


if __name__ == "__main__":
    run_as_process(main)
