"""Creates the start model of a job: random weights determined by a seed.

Run by `create-model`. The directory is given to a scheduler as `[scheduler.job.model] path`, or uploaded to a hub.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.modeling.hf import auto_class, lean_imports, quieten_transformers
from hypha_proto.codec import parse_json

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
            raise JobError(f"no {task} model of this configuration: {str(error).splitlines()[0][:300]}") from error
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
        raise JobError(f"--config-json {config_json}: module {module!r:.200} is not allowed; name it in --allow-module")
    return write_torch_model(name, kwargs, seed, out)


def check_out(out: Path) -> None:
    """Check that a model can be written to a directory.

    Raises:
        JobError: it exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"--out {out} exists and is not an empty directory")
