"""Local directories of a start model and a preprocessor: which files are used, and what is missing.

Checked when a job is submitted and before it starts. Called by job tables and `artifacts`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ModelTable, PreprocessorTable, StartModelTable
from hypha_scheduler.jobs.model_heads import find_missing_head

MODEL_PATTERNS: Final = ("*.json", "*.safetensors", "*.txt", "*.model")
"""Files of a model that are used: weights as safetensors, configuration, tokenizer; no pickled files."""
PREPROCESSOR_PATTERNS: Final = ("*.json", "*.txt", "*.model")
"""Files of a preprocessor that are used."""


def missing_files(model: ModelTable | None, preprocessor: PreprocessorTable | None = None) -> list[str]:
    """Return what is wrong with the local files of a model, its head included, and a preprocessor, one line each."""
    lines = []
    if isinstance(model, StartModelTable) and model.config is not None:
        try:
            config_file(model)
        except JobFailedError as error:
            lines.append(str(error))
    for table, names in ((model, model_names), (preprocessor, preprocessor_names)):
        if table is not None and table.directory is not None:
            try:
                found = names(table.directory, table.filenames)
            except JobFailedError as error:
                lines.append(str(error))
                continue
            if isinstance(table, ModelTable) and (line := find_missing_head(table.task, table.directory, found)):
                lines.append(line)
    return lines


def config_file(model: StartModelTable) -> Path:
    """Return the config.json that `model.config` names.

    Raises:
        JobFailedError: there is none, or it is no model's configuration.
    """
    assert model.config is not None
    path = model.config / "config.json" if model.config.is_dir() else model.config
    key = "torch_class" if model.task == "torch" else "model_type"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise JobFailedError(f"model.config: {path} cannot be read at the scheduler: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise JobFailedError(f"model.config: {path} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get(key), str):
        raise JobFailedError(f"model.config: {path} is not the configuration of a model: it has no {key}")
    return path


def model_names(source: Path, wanted: tuple[str, ...]) -> list[str]:
    """Return the names of a local model's files."""
    remedy = "`hypha-accelerate-executor create-model` creates a model directory"
    names = _file_names("model.path", source, wanted, MODEL_PATTERNS, remedy)
    if not any(name.endswith(".safetensors") for name in names):
        raise JobFailedError(f"model.path: {source} holds no *.safetensors; {remedy}")
    return names


def preprocessor_names(source: Path, wanted: tuple[str, ...]) -> list[str]:
    """Return the names of a local preprocessor's files."""
    remedy = "save the preprocessor there with save_pretrained"
    names = _file_names("preprocessor.path", source, wanted, PREPROCESSOR_PATTERNS, remedy)
    if not names:
        raise JobFailedError(f"preprocessor.path: {source} holds none of {', '.join(PREPROCESSOR_PATTERNS)}; {remedy}")
    return names


def _file_names(key: str, source: Path, wanted: tuple[str, ...], patterns: tuple[str, ...], remedy: str) -> list[str]:
    if not source.is_dir():
        raise JobFailedError(f"{key}: there is no directory {source} at the scheduler; {remedy}")
    lacking = [name for name in wanted if not (source / name).is_file()]
    if lacking:
        raise JobFailedError(f"{key}: {source} holds no {', '.join(lacking)}, which filenames lists")
    return sorted(wanted) or sorted({path.name for pattern in patterns for path in source.glob(pattern)})
