"""Models without a head: found by their configuration and tensor names, so that a job is refused before it has leases.

A scheduler has no library of models. It refuses only what is certain: every architecture that config.json names is a
base model, and no tensor has the name of a classification head. Executors refuse the rest when they load the model.
Called by `model_files`, after `hypha_proto.model_contents` has found no fault.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from hypha_proto.errors import TensorFileError
from hypha_proto.safetensors_io import TensorFile

_TASKS: Final = "-classification"
"""End of the wire names of tasks whose models have a head of their own; a causal-lm head may be tied to the inputs."""
_BASE: Final = re.compile(r"(?!\w*LMHeadModel$)[A-Za-z]\w*Model")
"""Architectures without a head, such as ``BertModel`` and ``ResNetModel``."""
_HEAD: Final = re.compile(r"classif|score|head|logits|(^|\.)fc\d*\.|qa_outputs", re.IGNORECASE)
"""Parts of names that tensors of heads have; some tensors of base models have them too, which are then not refused."""


def find_missing_head(task: str, directory: Path, names: list[str]) -> str | None:
    """Return what says that a model has no head for a task; None if it may have one, or if that cannot be told.

    Args:
        task: wire name of the task.
        directory: of the model.
        names: the model's files in it.
    """
    if not task.endswith(_TASKS):
        return None
    try:
        bases = _base_architectures(directory / "config.json")
        if not bases or _has_head(directory, names):
            return None
    except (OSError, ValueError, TensorFileError):
        return None  # changed since `find_fault` has read it
    return (
        f"model.path: {directory} has no head for {task}: its config.json names {', '.join(bases)}; add one with "
        f"`hypha-accelerate-executor create-model --from {directory} --task {task} --labels N --out DIR`"
    )


def _base_architectures(config: Path) -> list[str]:
    """Return the architectures of a configuration if all are base models, otherwise none."""
    named = json.loads(config.read_bytes()).get("architectures")
    if not isinstance(named, list) or not all(isinstance(name, str) and _BASE.fullmatch(name) for name in named):
        return []
    return named


def _has_head(directory: Path, names: list[str]) -> bool:
    """Return whether a tensor may belong to a head."""
    for name in names:
        if name.endswith(".safetensors"):
            with TensorFile(directory / name) as file:
                if any(map(_HEAD.search, file.tensors)):
                    return True
    return False
