"""Files of a model: which belong to it, what they are by their first bytes, and faults that are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.stored_model import weights, write_model

from hypha_proto.errors import TensorFileError
from hypha_proto.file_kinds import name_kind
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import INDEX, list_companions, list_model, list_weights, names_in, reader_of, weights_of
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo

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
        (change("config.json", quantization_config={"quant_method": "gptq"}), "has a quantization_config .'gptq'.*b"),
        (change("config.json", transformers_weights="x.safetensors"), "config.json has transformers_weights 'x.saf"),
        (keep_adapter_only, "adapter_config.json is that of an adapter.*merge_and_unload"),
        (remove("config.json"), "there is no config.json.*save_pretrained"),
        (put("config.json", b"[]"), "config.json is not a JSON object"),
        (put("config.json", b"\xef\xbb\xbf{}"), "config.json is not JSON .*BOM"),
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
        ("tokenizer.json", b"{}", True),
        ("merges.txt", b"", True),
    ],
)
def test_what_lies_beside_a_model_is_no_fault(tmp_path: Path, beside: str, content: bytes, used: bool) -> None:
    model = write_model(tmp_path, ["a"], ["b"])
    put(beside, content)(model)
    assert check(model) == sorted([*WHOLE, *([beside] if used else [])])


COMPANIONS = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "vocab-src.json", "qwen.tiktoken",
    "tekken.json", "bpe.codes", "vocab.bpe", "prophetnet.tokenizer", "tokenizer.model.v3", "entity_vocab.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "normalizer.json",
)  # fmt: skip
OTHERS = (
    "consolidated.safetensors", "._model.safetensors", "model.fp16.safetensors", "optimizer.safetensors",
    "model copy.safetensors", "adapter_model.safetensors", "adapter_config.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "model.fp16.safetensors.index.json", "training_args.bin", "trainer_state.json",
    "all_results.json", "._config.json", ".config.json.swp", "config (1).json", "config.json~", "README.md",
    "LICENSE.txt", "requirements.txt", "modeling_custom.py", ".gitattributes", "onnx/model.safetensors",
    "checkpoint-500/config.json", "../config.json", "/config.json",
)  # fmt: skip


def read_index(files: Sequence[str]) -> bytes:
    return json.dumps({"weight_map": {f"layer.{number}": name for number, name in enumerate(files)}}).encode()


def never_read(name: str) -> bytes:
    raise AssertionError(name)


@pytest.mark.parametrize("name", COMPANIONS)
def test_configuration_templates_tokenizers_and_processors_belong_to_a_model(name: str) -> None:
    files = {name, "config.json", "model.safetensors"}
    assert list_model(files, never_read) == sorted(files)
    assert list_companions([name, "model.safetensors"]) == [name]


@pytest.mark.parametrize("name", OTHERS)
def test_what_lies_beside_a_model_does_not_belong_to_it(name: str) -> None:
    files = [*SHARDS, INDEX, "config.json"]
    assert list_model([*files, name], lambda _: read_index(SHARDS)) == sorted(files)
    assert list_model([name, "config.json", "model.safetensors"], never_read) == ["config.json", "model.safetensors"]


def test_files_that_a_job_names_are_a_whole_model_and_used_with_what_else_they_are() -> None:
    files = ["config.json", "model.safetensors", "modeling_custom.py", "tokenizer.json"]
    assert list_model(files, never_read, files[:3]) == files[:3]
    for lacking, fault in ((files[1:], "no config.json"), (files[:1], "neither model.safetensors")):
        with pytest.raises(TensorFileError, match=fault):
            list_model(files, never_read, lacking)
    for wanted in ((), ("adapter_config.json", "config.json")):
        with pytest.raises(TensorFileError, match="that of an adapter: save the model that merge_and_unload makes"):
            list_model(["adapter_config.json", "adapter_model.safetensors", "config.json"], never_read, wanted)


def test_one_file_is_preferred_to_shards_as_the_library_does() -> None:
    files = [*SHARDS, INDEX, "model.safetensors", "config.json"]
    assert list_model(files, never_read) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ('{"weight_map": {"a": "../../etc/passwd"}}', "'../../etc/passwd', no safetensors file beside it"),
        ('{"weight_map": {"a": "sub/model.safetensors"}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": 1}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": [1]}}', "is not an index"),
        ('{"weight_map": []}', "is not an index"),
        ('{"weight_map": {}}', "names no file"),
        ("[]", "is not an index"),
        ("{", "is not an index"),
        ('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}', "x.safetensors and 1 more is missing"),
    ],
)
def test_malformed_index_is_rejected(tmp_path: Path, index: str, fault: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(TensorFileError, match=fault):
        weights_of(tmp_path)


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        ((), "save_pretrained writes them"),
        (("weights.safetensors",), "rename weights.safetensors to model.safetensors"),
        (("pytorch_model.bin",), "pickled files are not loaded"),
        (("._model.safetensors", "a.safetensors", "b.safetensors"), "save_pretrained writes them"),
    ],
)
def test_a_folder_without_weights_is_rejected_with_the_remedy(names: Sequence[str], remedy: str) -> None:
    with pytest.raises(TensorFileError, match=f"neither model.safetensors nor {INDEX}.*{remedy}"):
        list_weights(names, never_read)


def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("data.pkl", b"x")
    return made.getvalue()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model/config.json"))
    return made.getvalue()


def _numpy() -> bytes:
    made = io.BytesIO()
    np.save(made, np.ones(9))
    return made.getvalue()


KINDS = {
    "gunzip": gzip.compress(b"rows"),
    "unxz": lzma.compress(b"rows"),
    "bunzip2": bz2.compress(b"rows"),
    "unzstd": b"\x28\xb5\x2f\xfd" + bytes(20),
    "zip archive": _zip(),
    "tar archive": _tar(),
    "a pickle": pickle.dumps({"weights": [1.0]}),
    "numpy array": _numpy(),
    "Parquet": b"PAR1" + bytes(20),
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
    "HTML or XML page": b"\n <!DOCTYPE html><html><title>Login</title>",
    "UTF-16": "{}\n".encode("utf-16"),
    "JSON array": b'[{"text": "a"}]',
    "named? rows": b'{"text": "a"}\n',
    "it is empty": b"",
    "an Arrow file": b"\xff\xff\xff\xff" + bytes(20),
    "sound or video": b"\0\0\0\x18ftypisom" + bytes(20),
    "save its values": pickle.dumps(["weights"], protocol=0),
    "it is text": b"rows of something",
    "no known kind, and begins with b'(": b"(" + bytes(30),  # the length of a record, as in TFRecord
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(20),
}


@pytest.mark.parametrize("words", KINDS)
def test_file_that_holds_no_tensors_is_named(words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(KINDS[words])
    with pytest.raises(TensorFileError) as raised:
        TensorFile(path)
    assert words.removeprefix("named? ") in str(raised.value)
    assert str(raised.value).startswith("model.safetensors: it is ")
    assert "header" not in str(raised.value)


def test_tensors_and_what_is_unknown_have_no_name(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "x.safetensors", {"a": TensorInfo("F32", (2,))}) as writer:
        writer.write("a", np.ones(2, "f4"))
    assert name_kind((tmp_path / "x.safetensors").read_bytes()) is None
    assert name_kind(b"rows of something") is None
    assert name_kind(b'{"a": 1}', expected=(b"{",)) is None
