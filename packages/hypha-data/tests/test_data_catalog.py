"""Datasets prepared, measured and served: every sample exactly once, and only announced content."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from hypha_data.catalog import open_dataset
from hypha_data.config import DataConfig
from hypha_data.digest_cache import CACHE
from hypha_data.errors import DatasetError
from hypha_data.prepare import prepare_dataset
from hypha_proto.datasets import MANIFEST


def source(folder: Path, samples: int = 23) -> Path:
    path = folder / "all.safetensors"
    images = np.arange(samples * 6, dtype=np.float32).reshape(samples, 2, 3)
    save_file({"pixel_values": images, "labels": np.arange(samples, dtype=np.int64)}, path)
    return path


@given(samples=st.integers(1, 40), slices=st.integers(1, 12), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_slices_contain_every_sample_once(
    tmp_path_factory: pytest.TempPathFactory, samples: int, slices: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    path = source(folder, samples)
    if slices > samples:
        with pytest.raises(DatasetError, match=f"holds {samples} samples"):
            prepare_dataset(path, folder / "out", name="d", slices=slices, seed=seed)
        return
    manifest = prepare_dataset(path, folder / "out", name="d", slices=slices, seed=seed)
    parts = [load_file(folder / "out" / entry.file) for entry in manifest.slices]
    labels = np.concatenate([part["labels"] for part in parts])
    assert sorted(labels) == list(range(samples))
    lengths = [entry.samples for entry in manifest.slices]
    assert [len(part["labels"]) for part in parts] == lengths
    assert max(lengths) - min(lengths) <= 1
    rows = np.concatenate([part["pixel_values"] for part in parts])
    np.testing.assert_array_equal(rows[:, 0, 0], labels * 6.0)  # the rows of all tensors keep the same order


def test_slices_are_determined_by_the_seed(tmp_path: Path) -> None:
    path = source(tmp_path)
    digests = [
        [s.digest for s in prepare_dataset(path, tmp_path / str(i), name="d", slices=4, seed=seed).slices]
        for i, seed in enumerate((5, 5, 6))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_columns_are_dtype_and_shape_of_one_sample(tmp_path: Path) -> None:
    dtypes = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"]
    columns = {**{name: f"{name}[]" for name in dtypes}, "bool": "bool[2,3]"}
    tensors = {name: np.zeros(4, name) for name in dtypes}
    save_file({**tensors, "bool": np.zeros((4, 2, 3), bool)}, tmp_path / "all.safetensors")
    prepare_dataset(tmp_path / "all.safetensors", tmp_path / "out", name="d", slices=2, seed=0)
    opened = open_dataset("d", tmp_path / "out").manifest
    assert (opened.format, opened.columns) == (None, columns)


@pytest.mark.parametrize("force", [False, True])
def test_source_is_not_removed_as_an_old_slice(tmp_path: Path, force: bool) -> None:
    path = source(tmp_path)
    before = path.read_bytes()
    with pytest.raises(DatasetError, match="choose another folder"):
        prepare_dataset(path, tmp_path / "." / "x" / "..", name="d", slices=2, seed=0, force=force)
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", ["/", "data/..", "x" * 256])
def test_dataset_folder_must_have_a_name(path: str) -> None:
    with pytest.raises(ValidationError, match=r"gives no name: add \[\[datasets\]\]"):
        DataConfig(
            cert_pem="c",
            key_pem="k",
            trust_pem="t",
            gateway_addresses=["/ip4/192.0.2.1/tcp/4001"],
            dataset_path=path,
        )


def test_the_manifest_says_what_the_slices_must_be(tmp_path: Path) -> None:
    prepare_dataset(source(tmp_path), tmp_path / "out", name="d", slices=3, seed=0)
    before = open_dataset("d", tmp_path / "out")
    slice_path = tmp_path / "out" / before.manifest.slices[0].file
    content = bytearray(slice_path.read_bytes())
    content[-1] ^= 1
    slice_path.write_bytes(content)
    later = (tmp_path / "out" / MANIFEST).stat().st_mtime_ns + 1_000_000_000
    os.utime(slice_path, ns=(later, later))
    assert open_dataset("d", tmp_path / "out").digest == before.digest
    (tmp_path / "out" / MANIFEST).unlink()
    after = open_dataset("d", tmp_path / "out")
    assert after.manifest.slices[0].digest != before.manifest.slices[0].digest
    assert after.manifest.slices[1:] == before.manifest.slices[1:]


@pytest.mark.parametrize("file", ["../all.safetensors", "", "sub/slice", "slice\\u0000"])
def test_a_manifest_that_names_files_elsewhere_is_not_used(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    written = prepare_dataset(source(tmp_path), tmp_path / "out", name="d", slices=1, seed=0)
    path = tmp_path / "out" / MANIFEST
    path.write_text(path.read_text().replace("slice-00000.safetensors", file))
    assert open_dataset("d", tmp_path / "out").manifest.slices == written.slices
    assert "is not the name of a file in its folder" in caplog.text


def test_a_manifest_without_digests_is_replaced_by_measuring_the_slices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = prepare_dataset(source(tmp_path), tmp_path / "out", name="d", slices=2, seed=0)
    slices = [{"file": entry.file, "samples": entry.samples, "size": entry.size} for entry in written.slices]
    (tmp_path / "out" / MANIFEST).write_text(json.dumps({"dataset": "d", "slices": slices}))
    assert open_dataset("d", tmp_path / "out").manifest.slices == written.slices
    assert caplog.text.count("slices[0].digest: is missing") == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "file": st.just("all.safetensors") | _JSON,
        "samples": _JSON,
        "size": _JSON,
        "inode": _JSON,
        "digest": _JSON,
    },
)
_LISTS = st.fixed_dictionaries(
    {}, optional={"dataset": _JSON, "slices": st.lists(_ENTRIES) | _JSON, "files": st.lists(_ENTRIES) | _JSON}
)


@given(st.binary() | (_LISTS | _JSON).map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_any_manifest_and_digest_cache_is_used_or_ignored(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("data")
    source(folder)
    expected = open_dataset("d", folder).manifest
    for name in (CACHE, MANIFEST):
        (folder / name).write_bytes(content)
        assert open_dataset("d", folder).manifest == expected


@pytest.mark.parametrize("has_manifest", [False, True])
@pytest.mark.parametrize("form", ["safetensors", "jsonl"])
def test_files_beside_the_slices_are_not_served(tmp_path: Path, form: str, has_manifest: bool) -> None:
    """Hidden files never, others only where there is no manifest, and then no copy of a slice."""
    rows = tmp_path / "all.jsonl"
    rows.write_text("".join(f'{{"number": {number}}}\n' for number in range(9)))
    path, out = source(tmp_path) if form == "safetensors" else rows, tmp_path / "out"
    expected = prepare_dataset(path, out, name="d", slices=2, seed=0).slices
    if not has_manifest:
        (out / MANIFEST).unlink()
    for hidden in ("._slice-00000", ".slice-00001", ""):
        (out / f"{hidden}.{form}").write_bytes(b"\0\5\x16\7")
    assert open_dataset("d", out).manifest.slices == expected
    (out / f"slice-00000 copy.{form}").write_bytes((out / f"slice-00000.{form}").read_bytes())
    if has_manifest:
        assert open_dataset("d", out).manifest.slices == expected
        return
    with pytest.raises(DatasetError, match=rf"slice-00000\.{form} is a copy of slice-00000 copy\.{form}: remove one"):
        open_dataset("d", out)


def test_invalid_datasets_are_refused_with_the_file_name(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no \*\.safetensors"):
        open_dataset("d", tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"rubbish")
    with pytest.raises(DatasetError, match=r"bad\.safetensors"):
        open_dataset("d", tmp_path)
    save_file({"a": np.zeros(3), "b": np.zeros(4)}, tmp_path / "bad.safetensors")
    with pytest.raises(DatasetError, match="first dimension"):
        open_dataset("d", tmp_path)
