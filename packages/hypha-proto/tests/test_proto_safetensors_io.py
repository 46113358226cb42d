"""Safetensors files: compatible with the reference library and safe against malicious headers."""

from __future__ import annotations

import json
import random
import resource
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.small_disk import limited

from hypha_proto.errors import ProtoError, TensorFileError
from hypha_proto.safetensors_io import HEADER_LIMIT, TensorFile, TensorFileWriter, TensorInfo, from_float, to_float32

NUMPY_NAMES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


def _file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


arrays = st.sampled_from(sorted(NUMPY_NAMES)).flatmap(
    lambda name: hnp.arrays(NUMPY_NAMES[name], hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
names = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.dictionaries(names, arrays, max_size=5), metadata=st.dictionaries(st.text(), st.text(), max_size=3))
def test_reads_files_of_the_reference_library(
    tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "a.safetensors"
    # `or None`: the reference library writes broken JSON for no tensors and empty metadata
    safetensors.numpy.save_file({name: value.copy() for name, value in tensors.items()}, path, metadata or None)
    with TensorFile(path) as file:
        assert file.metadata == metadata
        assert file.tensors.keys() == tensors.keys()
        for name, value in tensors.items():
            assert file.tensors[name].shape == value.shape
            np.testing.assert_array_equal(file.stored(name), value)
            with np.errstate(over="ignore"):
                expected = value.astype(np.float32)
            np.testing.assert_array_equal(file.tensor(name), expected)
            pieces = list(file.blocks(name, 7))
            assert all(0 < piece.size <= 7 for piece in pieces)
            np.testing.assert_array_equal(np.concatenate([np.empty(0, "f4"), *pieces]), expected.reshape(-1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.dictionaries(names, arrays, max_size=5), data=st.data())
def test_reference_library_reads_written_files(
    tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    path = tmp_path / "b.safetensors"
    codes = {np.dtype(code): name for name, code in NUMPY_NAMES.items()}
    infos = {name: TensorInfo(codes[value.dtype], value.shape) for name, value in tensors.items()}
    with TensorFileWriter(path, infos, {"round": "3"}) as writer:
        for name in data.draw(st.permutations(sorted(tensors))):
            cut = data.draw(st.integers(0, tensors[name].size))
            flat = tensors[name].reshape(-1)
            writer.write_stored(name, flat[:cut])
            writer.write_stored(name, flat[cut:])
    back = safetensors.numpy.load_file(path)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"round": "3"}


def test_bfloat16_rounds_to_nearest_even_and_keeps_non_finite_values() -> None:
    # 1 + 2^-8 is half way between two bfloat16 numbers and rounds to even; with one more bit set it rounds up
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001], dtype=np.uint32).view(np.float32)
    assert from_float(halfway, "BF16").tolist() == [0x3F80, 0x3F82, 0x3F81]
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype=np.float32)
    assert np.array_equal(to_float32(from_float(special, "BF16"), "BF16"), special, equal_nan=True)
    nan_of_low_bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(to_float32(from_float(nan_of_low_bits, "BF16"), "BF16")).all()


@given(hnp.arrays(np.uint16, 16))
def test_every_bfloat16_round_trips_through_float32(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
    floats = to_float32(bits, "BF16")
    number = ~np.isnan(floats)
    assert np.array_equal(from_float(floats, "BF16")[number], bits[number])


def test_integers_are_rounded_and_clipped() -> None:
    values = np.array([1.5, 2.5, -3.7, 1e30, -1e30, np.nan], dtype=np.float32)
    assert from_float(values, "I64").tolist() == [2, 2, -4, 2**63 - 1, -(2**63), 0]
    assert from_float(values, "U8").tolist() == [2, 2, 0, 255, 0, 0]
    assert from_float(values, "I32").tolist() == [2, 2, -4, 2**31 - 1, -(2**31), 0]
    scalar = from_float(np.array(2.4), "I64")
    assert (scalar.shape, int(scalar)) == ((), 2)


HOSTILE: dict[str, tuple[Any, bytes]] = {
    "gap": ({"a": _entry(0, 4), "b": _entry(8, 12)}, bytes(12)),
    "overlap": ({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12)),
    "same bytes": ({"a": _entry(0, 4), "b": _entry(0, 4)}, bytes(4)),
    "trailing bytes": ({"a": _entry(0, 4)}, bytes(5)),
    "too short": ({"a": _entry(0, 4)}, bytes(3)),
    "trailing bytes without tensors": ({}, bytes(1)),
    "does not start at 0": ({"a": _entry(4, 8)}, bytes(8)),
    "shape larger than span": ({"a": _entry(0, 4, [2])}, bytes(4)),
    "shape overflows": ({"a": _entry(0, 4, [1 << 62, 1 << 62, 4])}, bytes(4)),
    "shape of nothing overflows": ({"a": _entry(0, 0, [0, 1 << 62])}, b""),
    "negative size": ({"a": _entry(0, 4, [-1])}, bytes(4)),
    "bool as size": ({"a": _entry(0, 4, [True])}, bytes(4)),
    "float as size": ({"a": _entry(0, 4, [1.0])}, bytes(4)),
    "huge size": ({"a": _entry(0, 4, [10**30])}, bytes(4)),
    "rank": ({"a": _entry(0, 4, [1] * 1000)}, bytes(4)),
    "end before begin": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    "negative offset": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "unknown dtype": ({"a": _entry(0, 4, dtype="F31")}, bytes(4)),
    "dtype no text": ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "extra key": ({"a": _entry(0, 4) | {"x": 1}}, bytes(4)),
    "missing key": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "entry no map": ({"a": 1}, b""),
    "empty name": ({"": _entry(0, 4)}, bytes(4)),
    "long name": ({"x" * 5000: _entry(0, 4)}, bytes(4)),
    "metadata no map": ({"__metadata__": []}, b""),
    "metadata no text": ({"__metadata__": {"a": 1}}, b""),
    "header no map": ([], b""),
    "not json": (b"{", b""),
    "not utf-8": (b'{"\xff":1}', b""),
    "duplicate name": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "duplicate metadata": (b'{"__metadata__":{"a":"1","a":"2"}}', b""),
    "deeply nested": (b'{"a":' * 50_000, b""),
    "nested lists": (b"[" * 200_000, b""),
    "nested in a tensor": (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", b""),
    "NaN": (b'{"a":NaN}', b""),
    "endless digits": (b'{"a":' + b"9" * 10_000 + b"}", b""),
    "trailing json": (b"{}{}", b""),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malicious_header_is_rejected(tmp_path: Path, kind: str) -> None:
    header, data = HOSTILE[kind]
    with pytest.raises(TensorFileError) as caught:
        TensorFile(_file(tmp_path / "evil.safetensors", header, data))
    assert "evil.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, b"\0" * 8, struct.pack("<Q", 1 << 63) + b"{}", struct.pack("<Q", HEADER_LIMIT + 1) + b"{}"],
)
def test_malicious_header_length_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "evil.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError):
        TensorFile(path)


def test_mutated_files_are_either_read_or_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.arange(6, dtype="f4"), "b": np.arange(4, dtype="i8")}, path, {"round": "1"})
    original = path.read_bytes()
    chance = random.Random(7)
    refused = 0
    for _ in range(1500):
        content = bytearray(original)
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content) - 56)] = chance.randrange(256)
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            with TensorFile(path) as file:
                assert sum(file.tensor(name).size for name in file.tensors) <= len(content)
        except ProtoError:
            refused += 1
    assert refused > 750


def test_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    info = {"a": TensorInfo("F32", (2,))}
    with pytest.raises(RuntimeError), TensorFileWriter(path, info):
        raise RuntimeError
    with pytest.raises(TensorFileError, match="lacks data"), TensorFileWriter(path, info) as writer:
        writer.write("a", np.zeros(1, "f4"))
    with pytest.raises(TensorFileError, match="more than"), TensorFileWriter(path, info) as writer:
        writer.write("a", np.zeros(3, "f4"))
    with pytest.raises(TensorFileError, match="no tensor"), TensorFileWriter(path, info) as writer:
        writer.write("b", np.zeros(2, "f4"))
    for bad in ({"a": TensorInfo("F3", (1,))}, {"": TensorInfo("F32", (1,))}, {"__metadata__": TensorInfo("F32", ())}):
        with pytest.raises(TensorFileError):
            TensorFileWriter(path, bad)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"), TensorFileWriter(tmp_path / "folder", info) as writer:
        writer.write("a", np.zeros(2, "f4"))
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "folder"]


def test_blocks_are_written_at_their_place_by_several_threads(tmp_path: Path) -> None:
    values, size = np.arange(100_003, dtype="f4"), 1000
    infos = {"a": TensorInfo("F32", values.shape), "b": TensorInfo("I64", (2,))}
    with TensorFileWriter(tmp_path / "a", infos) as writer, ThreadPoolExecutor(4) as pool:
        places = range(0, values.size, size)
        done = [pool.submit(writer.write_stored_at, "a", at, values[at : at + size]) for at in reversed(places)]
        for future in done:
            future.result(timeout=60)
        writer.write_stored_at("b", 1, np.array([7]))
        writer.write_stored_at("b", 0, np.array([5]))
    with TensorFile(tmp_path / "a") as file:
        np.testing.assert_array_equal(file.stored("a"), values)
        assert file.stored("b").tolist() == [5, 7]
        found = [block.tolist() for block in file.blocks("a", 2, begin=99_999, end=100_002)]
        assert found == [[99_999.0, 100_000.0], [100_001.0]]


@pytest.mark.parametrize("begin", [-1, 2])
def test_elements_outside_a_tensor_are_refused(tmp_path: Path, begin: int) -> None:
    path, info, beyond = tmp_path / "a", {"a": TensorInfo("F32", (3,))}, "more than the 12 bytes"
    with pytest.raises(TensorFileError, match=beyond), TensorFileWriter(path, info) as writer:
        writer.write_stored_at("a", begin, np.zeros(2, "f4"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [1, 500], ids=["at the last bytes", "in the header"])
def test_full_disk_leaves_only_the_old_file(tmp_path: Path, names: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    info = {f"{number:0200d}": TensorInfo("F32", (1,)) for number in range(names)}

    def write() -> None:
        with TensorFileWriter(path, info) as writer:
            for name in info:
                writer.write(name, np.zeros(1, "f4"))

    with limited(resource.RLIMIT_FSIZE, 64), pytest.raises(OSError, match="File too large"):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write()
    with TensorFile(path) as file:
        assert len(file.tensors) == names


def test_unknown_tensor_error_names_the_tensor(tmp_path: Path) -> None:
    with TensorFile(_file(tmp_path / "a.safetensors", {})) as file, pytest.raises(TensorFileError, match="weight"):
        file.tensor("weight")
