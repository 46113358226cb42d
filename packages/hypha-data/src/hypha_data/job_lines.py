"""Lines of a job's file that fit a prepared dataset, printed by ``prepare``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from hypha_proto.datasets import JSONL, Manifest

_LABELS: Final = "labels"
_MAX_SHOWN: Final = 12


def job_lines(manifest: Manifest, evaluation: str | None = None) -> list[str]:
    """Return TOML of a job's file that names the dataset and how a model reads it.

    Args:
        manifest: the dataset.
        evaluation: name of the dataset for evaluation.
    """
    columns = manifest.columns or {}
    named = [f"dataset = {json.dumps(manifest.dataset)}"]
    if manifest.format == JSONL:
        return ['type = "inference"  # or "diloco", with [rows] and [preprocessor]', *named]
    if evaluation is not None:
        named.append(f"evaluation = {json.dumps(evaluation)}")
    lines = ["[dataset]", *named, "", "[model]", *_model_lines(manifest, columns)]
    preprocessor = _preprocessor(columns)
    if preprocessor is not None:
        lines += ["", "[preprocessor]", f'type = "{preprocessor}"  # and its path or repository']
    return lines


def _model_lines(manifest: Manifest, columns: Mapping[str, str]) -> list[str]:
    names = manifest.labels
    classes = f"; {len(names)} classes: {describe_labels(names)}" if names else ""
    if "pixel_values" in columns or "image" in columns:
        return [f'type = "vision-classification"  # and its path, repository or config{classes}']
    if "input_ids" in columns or "text" in columns:
        task = "sequence-classification" if _LABELS in columns else "causal-lm"
        return [f'type = "{task}"  # and its path, repository or config{classes}']
    inputs = ", ".join(json.dumps(name) for name in columns)
    return [f'type = "torch"  # a class of your own, which takes these tensors{classes}', f"input_names = [{inputs}]"]


def _preprocessor(columns: Mapping[str, str]) -> str | None:
    if "image" in columns:
        return "image"
    return "tokenizer" if "text" in columns else None


def describe_labels(names: tuple[str, ...]) -> str:
    """Return the numbers and names of classes in one line, at most a dozen."""
    shown = ", ".join(f"{number} {name}" for number, name in enumerate(names[:_MAX_SHOWN]))
    return " ".join(shown.split()) + (", …" if len(names) > _MAX_SHOWN else "")
