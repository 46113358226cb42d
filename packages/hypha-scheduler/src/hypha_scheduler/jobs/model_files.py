"""Local directories of a start model and a preprocessor: which files are used, and what is missing.

Checked when a job is submitted and before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hypha_proto.errors import TensorFileError
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import list_companions, list_model, names_in, reader_of
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ModelTable, PreprocessorTable, StartModelTable
from hypha_scheduler.jobs.model_heads import find_missing_head


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
    """Return the names of a local model's files: `wanted` if it names any, otherwise as `model_listing` has it."""
    return _file_names("model.path", source, wanted, _list_model)


def preprocessor_names(source: Path, wanted: tuple[str, ...]) -> list[str]:
    """Return the names of a local preprocessor's files, as `model_names`."""
    return _file_names("preprocessor.path", source, wanted, _list_preprocessor)


def _list_model(source: Path, wanted: tuple[str, ...]) -> list[str]:
    """Return all files of a model, or those wanted, which must be a whole model too."""
    return list_model(names_in(source), reader_of(source), wanted)


def _list_preprocessor(source: Path, wanted: tuple[str, ...]) -> list[str]:
    if names := sorted(set(wanted)) or list_companions(names_in(source)):
        return names
    raise TensorFileError("there is no file of a tokenizer or processor: write one there with save_pretrained")


def _file_names(
    key: str, source: Path, wanted: tuple[str, ...], select: Callable[[Path, tuple[str, ...]], list[str]]
) -> list[str]:
    if not source.is_dir():
        raise JobFailedError(f"{key}: there is no directory {source} at the scheduler; save_pretrained writes one")
    lacking = [name for name in wanted if not (source / name).is_file()]
    if lacking:
        raise JobFailedError(f"{key}: {source} holds no {', '.join(lacking)}, which filenames lists")
    try:
        names = select(source, wanted)
        fault = find_fault(source, names)
    except TensorFileError as error:
        listed = " among filenames" if wanted else ""
        raise JobFailedError(f"{key}: {source}{listed}: {error}") from None
    except OSError as error:
        raise JobFailedError(f"{key}: {source} cannot be read: {error.filename}: {error.strerror}") from None
    if fault is not None:
        raise JobFailedError(f"{key}: {source}: {fault}")
    return names
