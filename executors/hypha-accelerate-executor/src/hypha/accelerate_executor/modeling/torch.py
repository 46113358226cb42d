"""Models of task `torch`: a class allowed by the worker's owner, with weights from safetensors. Nothing is unpickled.

The model's `config.json` names the class: ``{"torch_class": "module:Class", "kwargs": {...}}``. The module must be
installed where the executor runs and allowed by the worker's owner (`--allow-module`); it never comes with the job.
Its `forward` takes tensors of a slice by name and returns the loss: a scalar, or an object with a `loss`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model

from hypha.accelerate_executor.errors import JobError, ModelError
from hypha_proto.codec import parse_json
from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import weights_of

CONFIG: Final = "config.json"
_CLASS: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def load_torch_model(model_dir: Path, allowed: Collection[str]) -> torch.nn.Module:
    """Instantiate the class that a model directory names and load its weights.

    Args:
        model_dir: config.json and safetensors files.
        allowed: names of modules whose classes may be used.

    Raises:
        JobError: the module is not allowed, or not installed.
        ModelError: the class cannot be instantiated with its kwargs, or the files lack its tensors.
    """
    name, kwargs = read_class(model_dir / CONFIG)
    module = make_module(name, kwargs, allowed)
    _load_weights(module, model_dir)
    return module


def make_module(name: str, kwargs: Mapping[str, Any], allowed: Collection[str]) -> torch.nn.Module:
    """Instantiate a class given as ``module:Class``.

    Raises:
        JobError: the module is not allowed or not installed, or has no such class.
        ModelError: the class does not accept these kwargs.
    """
    if _CLASS.fullmatch(name) is None:
        raise JobError(f"torch_class: {name!r} is not of the form module:Class")
    module_name, _, class_name = name.partition(":")
    if module_name not in allowed:
        raise JobError(
            f"torch_class: module {module_name!r} is not allowed on this worker; its owner can allow it with "
            f"--allow-module {module_name} in the executor's args"
        )
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise JobError(f"torch_class: module {module_name!r} cannot be imported: {error}") from None
    except AttributeError:
        raise JobError(f"torch_class: module {module_name!r} has no {class_name!r}") from None
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        raise JobError(f"torch_class: {name!r} is not a subclass of torch.nn.Module")
    try:
        return kind(**kwargs)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"torch_class: {name} cannot be instantiated with kwargs {sorted(kwargs)}: {error}") from error


def write_torch_model(name: str, kwargs: Mapping[str, Any], seed: int, out: Path) -> int:
    """Write a model directory with random weights determined by a seed; return the number of parameters.

    Raises:
        JobError, ModelError: there is no such class, or it cannot be instantiated.
    """
    torch.manual_seed(seed)
    module = make_module(name, kwargs, {name.partition(":")[0]})
    out.mkdir(parents=True, exist_ok=True)
    save_model(module, str(out / "model.safetensors"), metadata={"format": "pt"})
    _sort_metadata(out / "model.safetensors")
    (out / CONFIG).write_text(json.dumps({"torch_class": name, "kwargs": dict(kwargs)}, indent=2) + "\n")
    return sum(parameter.numel() for parameter in module.parameters())


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, which has the names of tied tensors in an order that varies."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) != length:
            raise ModelError(f"{path.name}: its header cannot be written in {length} bytes")
        file.seek(8)
        file.write(text)


def read_class(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the class, as ``module:Class``, and its keyword arguments from the config.json of a model.

    Raises:
        ModelError: the file cannot be read or names none.
    """
    try:
        config = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"the model's {CONFIG} cannot be read: {error}") from None
    name = config.get("torch_class") if isinstance(config, dict) else None
    kwargs = config.get("kwargs", {}) if isinstance(config, dict) else None
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        raise ModelError(f'the model\'s {CONFIG} is not {{"torch_class": "module:Class", "kwargs": {{...}}}}')
    return name, kwargs


def _load_weights(module: torch.nn.Module, model_dir: Path) -> None:
    """Load every tensor; tied tensors may be in the files under one of their names only."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in weights_of(model_dir):
            tensors |= load_file(path)
        result = module.load_state_dict(tensors, strict=False)
    except (TensorFileError, SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"the model cannot be loaded for task 'torch': {error}") from error
    state = module.state_dict()
    loaded = {state[name].data_ptr() for name in tensors if name in state}
    missing = sorted(name for name in result.missing_keys if state[name].data_ptr() not in loaded)
    if missing or result.unexpected_keys:
        fault = f"lack the tensor {missing[0]!r}" if missing else f"hold the unknown {result.unexpected_keys[0]!r}"
        raise ModelError(f"the model's files {fault}, so that they do not fit {type(module).__name__}")
