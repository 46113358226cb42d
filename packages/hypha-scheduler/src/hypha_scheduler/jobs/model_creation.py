"""Start models with random weights, made from a configuration and a seed by an executor's command.

A scheduler has no library of models: it runs ``hypha-accelerate-executor create-model``, or the command of
``scheduler.model_command``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_proto.model_listing import list_companions, names_in
from hypha_scheduler.errors import JobFailedError, files_unusable
from hypha_scheduler.jobs.config import MODEL_COMMAND, StartModelTable
from hypha_scheduler.jobs.model_files import config_file

_TIMEOUT: Final = 1800.0
"""Seconds for the creation of a model."""
_MAX_TEXT: Final = 2000


async def create_model(table: StartModelTable, out: Path, command: Sequence[str] = MODEL_COMMAND) -> None:
    """Write a model directory with the weights that a configuration and a seed give, and the tokenizer's files.

    Args:
        table: has `config`.
        out: directory to create; must be empty or absent.
        command: program and first arguments; it gets ``--task``, ``--config-json``, ``--seed`` and ``--out``.

    Raises:
        JobFailedError: the configuration is no model's, or the command is not installed, fails or takes too long.
    """
    config = config_file(table)
    words = [_find_program(command[0]), *command[1:], "--task", table.task, "--config-json", str(config)]
    words += ["--seed", str(table.seed or 0), "--out", str(out)]
    try:
        with anyio.fail_after(_TIMEOUT):
            done = await anyio.run_process(words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False)
    except TimeoutError:
        raise JobFailedError(f"model.config: {config}: {words[0]} did not end within {_TIMEOUT:g} s") from None
    except OSError as error:
        raise JobFailedError(f"model.config: {words[0]} cannot be run: {error}") from None
    if done.returncode:
        raise JobFailedError(f"model.config: {config}: {words[0]} failed:\n{_last_lines(done.stdout)}")
    await anyio.to_thread.run_sync(_copy_other_files, config, out)


def _find_program(name: str) -> str:
    """Return the path of a program beside this Python interpreter or on the search path.

    Raises:
        JobFailedError: there is none.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise JobFailedError(
            f"model.config: a model is created by {name}, which is not installed here: install "
            "hypha-accelerate-executor beside the scheduler, or name its path in scheduler.model_command, or run "
            "`hypha-accelerate-executor create-model` elsewhere and name the model's directory in model.path"
        )
    return found


def _last_lines(output: bytes) -> str:
    lines = output.decode(errors="replace")[-_MAX_TEXT:].splitlines()
    return "\n".join(f"  | {line}" for line in lines)


def _copy_other_files(config: Path, out: Path) -> None:
    """Copy the files of a tokenizer or preprocessor beside a config.json."""
    if config.name != "config.json":
        return
    try:
        for name in list_companions(names_in(config.parent)):
            if not (out / name).exists():
                shutil.copyfile(config.with_name(name), out / name)
    except OSError as error:
        raise JobFailedError(files_unusable(out.parent, [error])) from None
