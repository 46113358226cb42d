"""Loads a Hugging Face model for a job's task from a directory of files.

Only the class named by the model's config is imported, and no code from the model's files.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hypha.accelerate_executor.deferred_compiler import defer_compiler
from hypha.accelerate_executor.environment import LAUNCH_VARIABLES
from hypha.accelerate_executor.errors import JobError, ModelError
from hypha.accelerate_executor.modeling.quick_scan import scan_quickly

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# tasks whose Auto class is not simply `AutoModelFor` and the task's words
_AUTO_CLASSES: Final = {
    "auto": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2-seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2-seq": "AutoModelForSpeechSeq2Seq",
    "vision2-seq": "AutoModelForImageTextToText",
    "ctc": "AutoModelForCTC",
    "audio-x-vector": "AutoModelForAudioXVector",
    "audio-tokenization": "AutoModelForAudioTokenization",
    "masked-generation": "AutoModelForMaskGeneration",
    "backbone": "AutoBackbone",
    "pre-training": "AutoModelForPreTraining",
}
# transformers imports these if installed; models of these tasks do not use them, and they cost half a second
_NEEDLESS: Final = ("scipy", "sklearn", "torchvision", "tensorboard", "boto3")
# transformers uses these if installed, without being asked: for an adapter in the model's folder, or other kernels
_INTEGRATIONS: Final = {
    "peft": "peft",
    "kernels": "kernels",
    "apex": "apex",
    "mamba_ssm": "mamba_ssm",
    "mamba_2_ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
    "flash_linear_attention": "fla",
    "mambapy": "mambapy",
    "xlstm": "xlstm",
}
"""Names in transformers' `is_…_available`, and the packages."""
_LEAN_TASKS: Final = frozenset({"image-classification", "causal-lm", "masked-lm", "sequence-classification"})
_CONFIG: Final = "config.json"
TORCH: Final = "torch"
"""The task whose models are classes allowed by the worker's owner."""


def auto_class_name(task: str) -> str:
    """Return the name of transformers' Auto class for a task's wire name.

    Raises:
        JobError: the task is not supported.
    """
    if task == TORCH:
        raise JobError(
            "task 'torch' has no Auto class: its model's config.json names a class allowed by the worker's owner"
        )
    words = "".join(word.capitalize() for word in task.split("-"))
    return _AUTO_CLASSES.get(task, f"AutoModelFor{words}")


def auto_class(task: str) -> Any:
    """Import the Auto class of a task, without packages that its models do not need.

    Raises:
        JobError: the task is not supported by this version of transformers.
    """
    name = auto_class_name(task)
    import transformers

    try:
        return getattr(transformers, name)
    except AttributeError:
        raise JobError(f"task {task!r}: transformers {transformers.__version__} has no {name}") from None


def import_library(task: str) -> None:
    """Import what every model of a task needs, before the model is there: torch, and transformers for its tasks.

    Raises:
        JobError: the task is not supported.
    """
    defer_compiler()
    if task == TORCH:
        return
    with lean_imports(task):
        auto_class(task)
        importlib.import_module("transformers.modeling_utils")


@contextlib.contextmanager
def lean_imports(task: str) -> Iterator[None]:
    """Hide packages that models of this task do not use, and those that change results wherever they are installed."""
    defer_compiler()
    scan_quickly()
    needless = _NEEDLESS if task in _LEAN_TASKS else ()
    packages = {name: name for name in needless} | _INTEGRATIONS
    hidden = {each for name, each in packages.items() if each not in sys.modules and not _already_detected(name)}
    absent = dict.fromkeys(hidden)
    sys.modules.update(absent)  # type: ignore[arg-type]  # None is the documented way to refuse an import
    utils = importlib.import_module("transformers.utils.import_utils")
    for name in _INTEGRATIONS:
        getattr(utils, f"is_{name}_available", bool)()  # remembers what it finds first
    if needless:
        _leave_out_distributed()
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def _leave_out_distributed() -> None:
    """Let transformers find no torch.distributed in a process that trains alone: it imports its tensors, and sympy."""
    if any(name in os.environ for name in LAUNCH_VARIABLES):
        return
    import torch

    utils = importlib.import_module("transformers.utils.import_utils")
    detect = getattr(utils, "is_torch_distributed_available", None)
    if detect is None:
        return
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        detect()  # remembers what it finds first
    finally:
        torch.distributed.is_available = is_available


def _already_detected(name: str) -> bool:
    """Return whether transformers has already found a package and may import it later."""
    looked = getattr(sys.modules.get("transformers.utils.import_utils"), f"is_{name}_available", None)
    return looked is not None and hasattr(looked, "cache_info") and looked.cache_info().currsize > 0 and bool(looked())


def load_model(
    task: str, model_dir: Path, *, allowed: Collection[str] = (), device_map: str | None = None
) -> torch.nn.Module:
    """Load a model in float32, ready to train.

    Args:
        task: wire name of the task.
        model_dir: config.json and safetensors files.
        allowed: modules whose classes models of task `torch` may use.
        device_map: how transformers distributes the layers over several devices; None keeps the model on one.

    Raises:
        JobError: the task is not supported.
        ModelError: the files are not a complete model of that task. A missing head would be initialised differently on
            every worker, so it is refused.
    """
    module = _load(task, model_dir, allowed, device_map)
    parameters = dict(module.named_parameters())
    for name in getattr(module, "_keys_to_ignore_on_save", None) or ():  # the library computes them when it loads
        if name in parameters:
            parameters[name].requires_grad_(False)
    module.float()
    module.train()
    return module


def load_stored_model(
    task: str, model_dir: Path, *, allowed: Collection[str] = (), device_map: str | None = None
) -> torch.nn.Module:
    """Load a model in the dtype of its files and in evaluation mode, without gradients; arguments as `load_model`.

    Raises:
        JobError, ModelError: as `load_model`.
    """
    return _load(task, model_dir, allowed, device_map).eval().requires_grad_(False)


def _load(task: str, model_dir: Path, allowed: Collection[str], device_map: str | None) -> torch.nn.Module:
    if not (model_dir / _CONFIG).is_file():
        raise ModelError(f"the model has no {_CONFIG}")
    if task != TORCH:
        return _load_transformers(task, model_dir, device_map)
    from hypha.accelerate_executor.modeling.torch import load_torch_model

    if device_map is not None:
        raise JobError("--device-map needs a transformers model; task 'torch' has none")
    return load_torch_model(model_dir, allowed)


def _load_transformers(task: str, model_dir: Path, device_map: str | None) -> torch.nn.Module:
    with lean_imports(task):
        kind = auto_class(task)
        quieten_transformers()
        try:
            module, info = kind.from_pretrained(
                model_dir,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are named below
                output_loading_info=True,
                **dtype_argument("auto"),
                **({} if device_map is None else {"device_map": device_map}),
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelError(
                f"the model cannot be loaded for task {task!r}: {type(error).__name__}: {error}"
            ) from error
    remedy = f"`hypha-accelerate-executor create-model --from MODEL --task {task} --labels N --out DIR`"
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"the model's files hold {name!r} with the shape {list(stored)}, and {_CONFIG} says {list(expected)}: "
            f"correct {_CONFIG}, or make a head for other classes with {remedy}"
        )
    missing = sorted(name for name in info["missing_keys"] if not name.endswith("num_batches_tracked"))  # is 0 then
    if missing:
        raise ModelError(
            f"the model's files lack {len(missing)} tensors that task {task!r} needs, first {missing[0]!r}; add them "
            f"with {remedy}"
        )
    loaded: torch.nn.Module = module
    return loaded


def dtype_argument(dtype: torch.dtype | str) -> dict[str, Any]:
    """Return the argument of `from_pretrained` for a dtype, or "auto" for that of the files."""
    import transformers

    return {"torch_dtype" if transformers.__version__.startswith("4.") else "dtype": dtype}


def model_directory(paths: list[Path]) -> Path:
    """Return the directory of a model among fetched files: that of its config.json.

    Raises:
        ModelError: there is no config.json.
    """
    for path in paths:
        if path.name == _CONFIG:
            return path.parent
        if path.is_dir() and (path / _CONFIG).is_file():
            return path
    raise ModelError(f"the model's artifact has no {_CONFIG}, only {[path.name for path in paths]}")


def quieten_transformers() -> None:
    """Silence transformers' hints and progress bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
