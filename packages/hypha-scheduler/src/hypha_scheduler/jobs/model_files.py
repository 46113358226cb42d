"""Local directories of a start model and a preprocessor: which files are used, and what is missing.

Checked when a job is submitted and before it starts. Called by job tables and `artifacts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ModelTable, PreprocessorTable

MODEL_PATTERNS: Final = ("*.json", "*.safetensors", "*.txt", "*.model")
"""Files of a model that are used: weights as safetensors, configuration, tokenizer; no pickled files."""
PREPROCESSOR_PATTERNS: Final = ("*.json", "*.txt", "*.model")
"""Files of a preprocessor that are used."""


def missing_files(model: ModelTable | None, preprocessor: PreprocessorTable | None = None) -> list[str]:
    """Return what is wrong with the local directories of a model and a preprocessor, one line each."""
    lines = []
    for table, names in ((model, model_names), (preprocessor, preprocessor_names)):
        if table is not None and table.path is not None:
            try:
                names(table.path, table.filenames)
            except JobFailedError as error:
                lines.append(str(error))
    return lines


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
