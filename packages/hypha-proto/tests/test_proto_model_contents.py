"""Faults in a model's files: what a job is refused for, and with which words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stored_model import weights, write_model

from hypha_proto.errors import TensorFileError
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import INDEX, list_model, names_in, reader_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WHOLE = ["config.json", *SHARDS, INDEX]


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes(content)


def change(name: str, **keys: object) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **keys}))


def remove(*names: str) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return spoil


def cut(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:-4])


def keep_adapter_only(model: Path) -> None:
    remove(*WHOLE)(model)
    put("adapter_config.json", b"{}")(model)
    put("adapter_model.safetensors", weights())(model)


def hold_float8(model: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    put(SHARDS[0], len(header).to_bytes(8, "little") + header + bytes(8))(model)


VOCABULARY = json.dumps({"model": {"vocab": {str(number): number for number in range(1 << 17)}}}).encode()


def check(model: Path) -> list[str] | str:
    """Return what a model's files are, or what is wrong with them."""
    try:
        names = list_model(names_in(model), reader_of(model))
    except TensorFileError as error:
        return str(error)
    return find_fault(model, names) or names


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (put(SHARDS[0], POINTER), f"{SHARDS[0]} is a Git LFS pointer.*run `git lfs pull`"),
        (put("config.json", POINTER), "config.json is a Git LFS pointer"),
        (put("spiece.model", POINTER), "spiece.model is a Git LFS pointer"),
        (cut(SHARDS[1]), f"{SHARDS[1]}: .*damaged, incomplete.*fetch it again"),
        (put(SHARDS[0], b""), f"{SHARDS[0]}: it is empty.*fetch it again"),
        (put(SHARDS[0], b"<!DOCTYPE html><html>"), f"{SHARDS[0]}: it is an HTML or XML page.*fetch the file again"),
        (remove(SHARDS[1]), f"{SHARDS[1]} is missing, which {INDEX} names: fetch it again"),
        (hold_float8, f"{SHARDS[0]} holds F8_E4M3 tensors, .*save it in bfloat16 or float32"),
        (change("config.json", quantization_config={"quant_method": "gptq"}), "has a quantization_config .gptq.*b"),
        (change("config.json", transformers_weights="x.safetensors"), "config.json has transformers_weights 'x.saf"),
        (keep_adapter_only, "adapter_config.json is that of an adapter.*merge_and_unload"),
        (remove("config.json"), "there is no config.json.*save_pretrained"),
        (put("config.json", b"[]"), "config.json is not a JSON object"),
        (put("config.json", b"\xef\xbb\xbf{}"), "config.json is not JSON .*BOM"),
        (put("tokenizer.json", VOCABULARY[:-5]), "tokenizer.json is not JSON, or cut off: fetch it again"),
        (put("tokenizer_config.json", b'{"a": '), "tokenizer_config.json is not JSON .*filenames"),
        (change(INDEX, weight_map={"a": SHARDS[0], "c": SHARDS[1]}), f"{SHARDS[1]} holds 'c', and it does not"),
        (change(INDEX, weight_map={"a": SHARDS[1], "b": SHARDS[1]}), f"{SHARDS[1]} holds 'a', and it does not"),
        (change(INDEX, metadata=None), f'{INDEX} has no object "metadata".*add "metadata": {{}}'),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_file_and_remedy(tmp_path: Path, spoil: Callable[[Path], object], fault: str) -> None:
    model = write_model(tmp_path, ["a"], ["b"])
    spoil(model)
    found = check(model)
    assert isinstance(found, str)
    assert re.search(fault, found), found


@pytest.mark.parametrize(
    ("beside", "content", "used"),
    [
        ("._model.safetensors", b"\0\5\x16\7", False),
        ("consolidated.safetensors", POINTER, False),
        ("notes (1).json", b"{", False),
        ("tokenizer.json", VOCABULARY, True),
        ("merges.txt", b"", True),
    ],
)
def test_what_lies_beside_a_model_is_no_fault(tmp_path: Path, beside: str, content: bytes, used: bool) -> None:
    model = write_model(tmp_path, ["a"], ["b"])
    put(beside, content)(model)
    assert check(model) == sorted([*WHOLE, *([beside] if used else [])])
