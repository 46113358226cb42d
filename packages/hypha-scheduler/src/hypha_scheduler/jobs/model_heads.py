"""Models without a head: found by their configuration and tensor names, so that a job is refused before it has leases.

A scheduler has no library of models. It refuses only what is certain: no architecture that config.json names is one of
the task, and no tensor has the name of such a head. Executors refuse the rest when they load the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from hypha_proto.errors import TensorFileError

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
