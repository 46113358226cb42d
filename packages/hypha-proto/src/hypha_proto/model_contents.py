"""Checks the content of a model's files by headers, index and configuration, in milliseconds.

Schedulers call it before a job has leases, executors before they load a folder or archive. Needs the extra `update`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import CONFIG, INDEX, WEIGHTS, reader_of
from hypha_proto.texts import quote

_LFS_POINTER: Final = b"version https://git-lfs.github.com/"
_LOW_PRECISION: Final = re.compile(r"has dtype '((?:F8|F6|F4)\w*)'")
_REMEDY: Final = "fetch it again, or let filenames list the files without it"


def find_fault(directory: Path, names: list[str]) -> str | None:
    """Return what makes a model or preprocessor unusable, with the file and the remedy; None if nothing is found.

    Args:
        directory: of the model.
        names: its files, which exist.

    Raises:
        OSError: a file cannot be read.
    """
    for name in names:
        with (directory / name).open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull` where it is from"
        if name.endswith(".json") and (fault := _find_json_fault(directory / name)):
            return f"{name} {fault}"
    return _find_weights_fault(directory, names)


def _find_json_fault(path: Path) -> str | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}): {_REMEDY}"
    return _find_config_fault(found) if path.name == CONFIG else None


def _find_config_fault(config: Any) -> str | None:
    if not isinstance(config, dict):
        return "is not a JSON object, as the configuration of a model is: fetch it again"
    if (named := config.get("transformers_weights")) is not None:
        return f"has transformers_weights {quote(named)}, only {WEIGHTS} is read: save it with save_pretrained"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return (
            f"has a quantization_config ({quote(method)}); quantized weights are not supported: save the model in "
            "bfloat16 or float32"
        )
    return None


def _find_weights_fault(directory: Path, names: list[str]) -> str | None:
    from hypha_proto.safetensors_io import TensorFile  # imports numpy, a tenth of the time of most commands

    held: set[tuple[str, str]] = set()
    for name in names:
        if not name.endswith(".safetensors"):
            continue
        try:
            with TensorFile(directory / name) as file:
                held |= {(tensor, name) for tensor in file.tensors}
        except TensorFileError as error:
            if found := _LOW_PRECISION.search(str(error)):
                return f"{name} holds {found[1]} tensors, which are not supported: save it in bfloat16 or float32"
            return f"{error}: it is damaged, incomplete or no safetensors file: fetch it again"
    if INDEX not in names:
        return None
    index = parse_json(reader_of(directory)(INDEX))
    if not isinstance(index.get("metadata"), dict):
        return f'{INDEX} has no object "metadata", without which transformers does not load it: add "metadata": {{}}'
    for tensor, name in index["weight_map"].items():
        if (tensor, name) not in held:
            return f"{INDEX} says that {name} holds {quote(tensor)}, and it does not: fetch both again"
    return None
