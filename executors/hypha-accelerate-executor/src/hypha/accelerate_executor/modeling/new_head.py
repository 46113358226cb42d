"""Adds a new head to a trained model, so that a job can train it for another task or other classes.

Run by ``create-model --from``. The weights of the head are determined by a seed; a job refuses a model without one, as
each worker would start from another.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypha.accelerate_executor.errors import JobError, ModelError
from hypha.accelerate_executor.modeling.create import check_out
from hypha.accelerate_executor.modeling.hf import TORCH, auto_class, lean_imports, quieten_transformers
from hypha_proto.model_listing import list_companions, names_in


@dataclass(frozen=True, slots=True)
class CreatedModel:
    """A model that was written."""

    parameters: int
    """Number of its parameters."""
    new: tuple[str, ...]
    """Names of the tensors that are not those of the trained model."""


def create_from_pretrained(task: str, source: str, labels: int | None, seed: int, out: Path) -> CreatedModel:
    """Write a trained model with a head for a task; files of its tokenizer or image processor are copied.

    Args:
        task: wire name of the task, which selects the head.
        source: directory of the trained model, or repository of the hub.
        labels: number of classes; None for a task without, or for those that the model has.
        seed: decides the weights of new tensors.
        out: directory to create; must be empty or absent.

    Raises:
        JobError: the directory is not empty, or transformers has no such model for the task.
        ModelError: the trained model cannot be loaded, or none of its tensors fits.
    """
    if task == TORCH:
        raise JobError("--from: task 'torch' has no heads; create the model with --torch-class")
    check_out(out)
    folder = Path(source)
    if not folder.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelError(f"--from {source}: no such folder; name that of a model, or a repository such as owner/name")
    module, new = _load(task, source, folder.is_dir(), {} if labels is None else {"num_labels": labels}, seed)
    if {name for name, _ in module.named_parameters()} <= set(new):
        raise ModelError(f"--from {source}: none of its tensors fits task {task!r}; name a model of the same kind")
    module.save_pretrained(out)
    if folder.is_dir():
        for name in list_companions(names_in(folder)):
            if not (out / name).exists():
                shutil.copyfile(folder / name, out / name)
    return CreatedModel(sum(parameter.numel() for parameter in module.parameters()), new)


def _load(task: str, source: str, is_local: bool, settings: dict[str, Any], seed: int) -> tuple[Any, tuple[str, ...]]:
    """Return the model, and the names of its tensors that the files do not have in this shape."""
    with lean_imports(task):
        kind = auto_class(task)
        import torch

        quieten_transformers()
        torch.manual_seed(seed)
        try:
            module, info = kind.from_pretrained(
                source,
                trust_remote_code=False,
                local_files_only=is_local,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **settings,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"--from {source}: cannot be loaded for task {task!r}: {reason}") from error
    changed = {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]}
    return module, tuple(sorted({*info["missing_keys"], *changed}))
