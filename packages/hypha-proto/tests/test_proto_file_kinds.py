"""What a file is by its first bytes, and how it is named where tensors are expected."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hypha_proto.errors import TensorFileError
from hypha_proto.file_kinds import name_kind
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo


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
