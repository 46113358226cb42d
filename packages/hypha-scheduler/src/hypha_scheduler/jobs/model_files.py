"""Local directories of a start model and a preprocessor: which files are used, and what is missing.

Checked when a job is submitted and before it starts. A scheduler has no library of models: of one without a head for
its task it refuses only what is certain, which is that no architecture that config.json names is one of the task, and
no tensor has the name of such a head. Executors refuse the rest when they load the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from hypha_proto.errors import TensorFileError
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import list_companions, list_model, names_in, reader_of
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ArtifactTable, ModelTable, StartModelTable

_CLASSIFICATION: Final = re.compile(r"(?!zero-shot-).*-classification")
"""Tasks that classify with a head; zero-shot models compare images with texts instead."""
_OWN: Final = re.compile(r"For\w*(Classification|Classifier)")
"""Architectures that classify; one of another such task may have a head that fits."""
_LANGUAGE_OWN: Final = re.compile(
    r"LMHead|For(CausalLM|MaskedLM|PreTraining|ConditionalGeneration|TextToText)|Decoder$"
)
"""Architectures with a head of tokens."""
_HEAD: Final = re.compile(r"classif|score|(?<!lm_)head|logits|(^|\.)fc\d*\.", re.IGNORECASE)
"""Parts of names that tensors of heads have; some tensors of base models have them too, which are then not refused."""
_LANGUAGE_HEAD: Final = re.compile(
    r"head|cls|predict|pred_|vocab|generator|logits|decoder|(^|\.)(embed|lm|proj)_out|^(\w+\.)?output", re.IGNORECASE
)
"""The same of heads of tokens."""
_TRANSFORMED: Final = re.compile(r"(^|\.)embeddings\.word_embeddings\.")
"""Input embeddings of BERT and its kind, whose heads have more tensors than what may be tied to the embeddings."""


def missing_files(*tables: ArtifactTable | None) -> list[str]:
    """Return what is wrong with the local files of a model, its head included, and a preprocessor, one line each."""
    lines = []
    for table in tables:
        try:
            if isinstance(table, StartModelTable) and table.config is not None:
                config_file(table)
            if table is not None and table.directory is not None:
                found = file_names(table.content, table.directory, table.filenames)
                if isinstance(table, ModelTable) and (line := find_missing_head(table.task, table.directory, found)):
                    lines.append(line)
        except JobFailedError as error:
            lines.append(str(error))
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


def file_names(content: str, source: Path, wanted: tuple[str, ...]) -> list[str]:
    """Return the names of a local model's or preprocessor's files: `wanted`, or if empty, as `model_listing` has it.

    A model must be whole, also by `wanted`.
    """
    key = f"{content}.path"
    if not source.is_dir():
        raise JobFailedError(f"{key}: there is no directory {source} at the scheduler; save_pretrained writes one")
    lacking = [name for name in wanted if not (source / name).is_file()]
    if lacking:
        raise JobFailedError(f"{key}: {source} holds no {', '.join(lacking)}, which filenames lists")
    try:
        if content == "model":
            names = list_model(names_in(source), reader_of(source), wanted)
        elif not (names := sorted(set(wanted)) or list_companions(names_in(source))):
            raise TensorFileError("there is no file of a tokenizer or processor: write one there with save_pretrained")
        fault = find_fault(source, names)
    except TensorFileError as error:
        listed = " among filenames" if wanted else ""
        raise JobFailedError(f"{key}: {source}{listed}: {error}") from None
    except OSError as error:
        raise JobFailedError(f"{key}: {source} cannot be read: {error.filename}: {error.strerror}") from None
    if fault is not None:
        raise JobFailedError(f"{key}: {source}: {fault}")
    return names


# --------------------------------------------------------------------------------------------------------------- heads


def find_missing_head(task: str, directory: Path, names: list[str]) -> str | None:
    """Return what says that a model has no head for a task; None if it may have one, or if that cannot be told.

    Args:
        task: wire name of the task.
        directory: of the model.
        names: the model's files in it.
    """
    if _CLASSIFICATION.fullmatch(task):
        own, head = _OWN, _HEAD
    elif task in ("causal-lm", "masked-lm"):
        own, head = _LANGUAGE_OWN, _LANGUAGE_HEAD
    else:
        return None
    try:
        config = json.loads((directory / "config.json").read_bytes())
        named = _others(config, own)
        tensors = _tensor_names(directory, names)
        is_tied = task == "causal-lm" and config.get("tie_word_embeddings") is not False
        may_be_tied = is_tied and not any(map(_TRANSFORMED.search, tensors))
        if not named or may_be_tied or any(map(head.search, tensors)):
            return None
    except (OSError, ValueError, TensorFileError):
        return None  # changed since `find_fault` has read it
    return (
        f"model.path: {directory} has no head for {task}: its config.json names {', '.join(named)}; add one with "
        f"`hypha-accelerate-executor create-model --from {directory} --task {task} --labels N --out DIR`"
    )


def _others(config: dict[str, Any], own: re.Pattern[str]) -> list[str]:
    """Return the architectures of a configuration if none is one of `own`, otherwise none."""
    named = config.get("architectures")
    if not isinstance(named, list) or not all(isinstance(name, str) and not own.search(name) for name in named):
        return []
    return named


def _tensor_names(directory: Path, names: list[str]) -> list[str]:
    from hypha_proto.safetensors_io import TensorFile  # imports numpy, a tenth of the time of most commands

    found: list[str] = []
    for name in names:
        if name.endswith(".safetensors"):
            with TensorFile(directory / name) as file:
                found += file.tensors
    return found
