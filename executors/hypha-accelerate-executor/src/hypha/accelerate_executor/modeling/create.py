"""Creates the start model of a job: random weights determined by a seed, or a trained model with a new head.

Run by `create-model`. The directory is given to a scheduler as `[scheduler.job.model] path`, or uploaded to a hub. A
job refuses a model without a head, as each worker would start from another.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.errors import JobError, ModelError, reason_of
from hypha.accelerate_executor.modeling.hf import TORCH, auto_class, lean_imports, quieten_transformers
from hypha_proto.codec import parse_json
from hypha_proto.model_listing import list_companions, names_in
from hypha_proto.texts import one_line

ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    # images of 1x8x8 and 10 classes: 20,522 parameters, batch norm, 2 ms per batch of 16 on a CPU. One stage: with two
    # the image shrinks to a single pixel, trains half as fast and costs half as much again
    "resnet-digits": {
        "model_type": "resnet",
        "num_channels": 1,
        "embedding_size": 32,
        "hidden_sizes": [32],
        "depths": [1],
        "layer_type": "basic",
        "num_labels": 10,
    },
    # rows of 128 bytes, each byte a token: 1,033,488 parameters, 0.12 s per batch of 8 on one core
    "llama-bytes": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 144,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}
"""Named configurations of `create-model`."""


def read_config(arch: str | None, config_json: Path | None) -> dict[str, Any]:
    """Return a model's configuration as in config.json.

    Args:
        arch: one of `ARCHITECTURES`.
        config_json: a file, instead of `arch`.

    Raises:
        JobError: neither or both are given, or there is no such configuration.
    """
    if (arch is None) == (config_json is None):
        raise JobError("give either --arch or --config-json")
    if arch is not None:
        if arch not in ARCHITECTURES:
            raise JobError(f"--arch {arch!r} is unknown; known are {', '.join(ARCHITECTURES)}")
        return dict(ARCHITECTURES[arch])
    assert config_json is not None
    try:
        config = parse_json(config_json.read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(f"--config-json {config_json}: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise JobError(f"--config-json {config_json}: expected an object with a model_type")
    return config


def create_model(task: str, config: Mapping[str, Any], seed: int, out: Path) -> int:
    """Write a model with random weights: config.json and safetensors, identical for equal seeds.

    Args:
        task: wire name of the task, which selects the head.
        config: contents of config.json, with `model_type`.
        seed: decides the weights.
        out: directory to create; must be empty or absent.

    Returns:
        The number of parameters.

    Raises:
        JobError: the directory is not empty, or transformers has no such model for the task.
    """
    check_out(out)
    with lean_imports(task):
        kind = auto_class(task)
        import torch
        from transformers import AutoConfig

        quieten_transformers()
        settings = dict(config)
        try:
            made = AutoConfig.for_model(settings.pop("model_type"), **settings)
            torch.manual_seed(seed)
            model = kind.from_config(made)
        except (ValueError, TypeError, KeyError) as error:
            raise JobError(f"no {task} model of this configuration: {one_line(error, 300)}") from error
        model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def create_torch_model(name: str, kwargs: str, seed: int, out: Path) -> int:
    """Write a model of task `torch`; return its number of parameters.

    Args:
        name: ``module:Class``.
        kwargs: keyword arguments of the class, a JSON object.
        seed: decides the weights.
        out: directory to create; must be empty or absent.

    Raises:
        JobError, ModelError: the directory is not empty, or the class cannot be instantiated.
    """
    check_out(out)
    try:
        given = parse_json(kwargs)
    except ValueError as error:
        raise JobError(f"--kwargs is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise JobError("--kwargs is not a JSON object")
    from hypha.accelerate_executor.modeling.torch import write_torch_model

    return write_torch_model(name, given, seed, out)


def create_allowed_torch_model(config_json: Path, allowed: Collection[str], seed: int, out: Path) -> int:
    """Write a model of task `torch` from the config.json of one; return its number of parameters.

    Args:
        config_json: names the class, as in a model directory.
        allowed: modules whose classes may be used.
        seed: decides the weights.
        out: directory to create; must be empty or absent.

    Raises:
        JobError, ModelError: the directory is not empty, or the class is not allowed or cannot be instantiated.
    """
    check_out(out)
    from hypha.accelerate_executor.modeling.torch import read_class, write_torch_model

    name, kwargs = read_class(config_json)
    module = name.partition(":")[0]
    if module not in allowed:
        raise JobError(f"--config-json {config_json}: module {module!r} is not allowed; name it in --allow-module")
    return write_torch_model(name, kwargs, seed, out)


def check_out(out: Path) -> None:
    """Check that a model can be written to a directory.

    Raises:
        JobError: it exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"--out {out} exists and is not an empty directory")


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
            reason = reason_of(error)
            raise ModelError(f"--from {source}: cannot be loaded for task {task!r}: {reason}") from error
    changed = {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]}
    return module, tuple(sorted({*info["missing_keys"], *changed}))
