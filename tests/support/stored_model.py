"""Folders of small models that a scheduler accepts: a configuration, weights of zeros, and an index of shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save


def weights(names: Sequence[str] = ("w",), *, size: int = 3) -> bytes:
    """Return a safetensors file with float32 tensors of `size` zeros."""
    return save({name: np.zeros(size, np.float32) for name in names})


def write_model(folder: Path, *shards: Sequence[str], **config: object) -> Path:
    """Write a model whose files have these tensors each, by default one file with ``w``; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "plain", **config}))
    if len(shards) < 2:
        (folder / "model.safetensors").write_bytes(weights(shards[0] if shards else ("w",)))
        return folder
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        (folder / file).write_bytes(weights(names))
    shard_of = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
