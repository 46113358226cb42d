"""Sources other than safetensors files: tables, images, text and datasets become slices of tensors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from hypha_data.cli import main
from hypha_data.sources.formats import open_reader
from hypha_data.sources.options import ReadOptions


def prepare(source: Path, *options: object, out: str = "out") -> Any:
    """Run the command, with options or further sources; the dataset's folder lies beside the source."""
    folder = source.parent / out
    return CliRunner().invoke(main, ["prepare", *map(str, (source, "--out", folder, *options))])


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all samples of a folder of slices."""
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def prepared(source: Path, *options: object) -> dict[str, np.ndarray[Any, Any]]:
    done = prepare(source, *options)
    assert done.exit_code == 0, done.output
    return tensors(source.parent / "out")


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def texts(rows: np.ndarray[Any, Any]) -> list[str]:
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_tokenizer(folder: Path) -> Path:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "film": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


ROWS: Sequence[Mapping[str, object]] = [
    {"text": "good film", "mood": "happy", "stars": 5, "price": 1.5},
    {"text": 'b "a", d\nfilm', "mood": "sad", "stars": 1, "price": -2.0},
    {"text": "", "mood": "happy", "stars": 4, "price": 0.25},
]
CSV = 'text,mood,stars,price\ngood film,happy,5,1.5\n"b ""a"", d\nfilm",sad,1,-2\n,happy,4,0.25\n'


def write_rows(folder: Path, form: str) -> Path:
    path = folder / f"reviews.{form}"
    if form == "csv":
        return write(path, CSV)
    if form == "jsonl":
        return write(path, "".join(json.dumps(row) + "\n" for row in ROWS))
    pa.parquet.write_table(pa.Table.from_pylist([*ROWS]), path)
    return path


TABLES = pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])


@TABLES
def test_tables_become_the_same_tensors(tmp_path: Path, form: str) -> None:
    options = ("--text", "text", "--label", "mood", "--columns", "stars,price", "--slices", 2)
    found = prepared(write_rows(tmp_path, form), *options)
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "text": "uint8", "labels": "int64", "stars": "int64", "price": "float32"
    }  # fmt: skip
    rows = sorted(
        zip(texts(found["text"]), *(found[name].tolist() for name in ("labels", "stars", "price")), strict=True)
    )
    assert rows == [("", 0, 4, 0.25), ('b "a", d\nfilm', 1, 1, -2.0), ("good film", 0, 5, 1.5)]
    assert manifest(tmp_path / "out")["labels"] == ["happy", "sad"]
    assert manifest(tmp_path / "out")["columns"]["text"] == "uint8[13]"


@TABLES
def test_text_becomes_tokens(tmp_path: Path, form: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    options = ("--text", "text", "--label", "mood", "--tokenizer", tokenizer, "--length", 3, "--slices", 1)
    found = prepared(write_rows(tmp_path, form), *options)
    rows = sorted(zip(found["input_ids"].tolist(), found["attention_mask"].tolist(), strict=True))
    assert rows[0] == ([0, 0, 0], [0, 0, 0])
    assert rows[2] == ([2, 4, 0], [1, 1, 0])
    assert rows[1][1] == [1, 1, 1]


def test_all_columns_are_kept_if_none_is_named(tmp_path: Path) -> None:
    found = prepared(write(tmp_path / "a.csv", "zip,x\n01234,1\n99999,2\n"))
    assert sorted(texts(found["zip"])) == ["01234", "99999"]
    assert sorted(found["x"].tolist()) == [1, 2]


def test_the_command_prints_columns_labels_and_lines_of_a_job(tmp_path: Path) -> None:
    options = ("--text", "text", "--label", "mood", "--test", 0.4)
    done = prepare(write_rows(tmp_path, "csv"), *options)
    assert "dataset out, 2 samples in 2 slices" in done.stdout
    assert "dataset out-test, 1 samples in 1 slices" in done.stdout
    assert "labels: 0 happy, 1 sad" in done.stdout
    assert '\n[dataset]\ndataset = "out"\nevaluation = "out-test"\n' in done.stdout
    assert 'type = "sequence-classification"' in done.stdout
    assert '\n[preprocessor]\ntype = "tokenizer"' in done.stdout
    both = [*texts(tensors(tmp_path / "out")["text"]), *texts(tensors(tmp_path / "out-test")["text"])]
    assert sorted(both) == sorted(str(row["text"]) for row in ROWS)


def test_names_of_tensors_may_be_names_of_other_columns(tmp_path: Path) -> None:
    found = prepared(write(tmp_path / "a.csv", "labels,text\na,1\nb,2\n"))
    assert sorted(texts(found["labels"])) == ["a", "b"]
    assert sorted(found["text"].tolist()) == [1, 2]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_configuration_of_a_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    write(tokenizer / "tokenizer_config.json", content)
    done = prepare(write(tmp_path / "a.txt", "good"), "--length", 3, "--tokenizer", tokenizer)
    assert done.exit_code == 1
    assert "tokenizer_config.json: " in done.output
    assert "save the tokenizer again" in done.output


def test_a_reader_is_of_another_state_after_a_change_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    source = write(tmp_path / "a.txt", "good")
    for options in (ReadOptions(), ReadOptions(lines=True)):
        reader = open_reader([source], "text", replace(options, tokenizer=str(tokenizer), length=3))
        before = reader.state()
        (tokenizer / "tokenizer_config.json").unlink(missing_ok=True)
        write(tokenizer / "tokenizer_config.json", "{}" if not options.lines else "{ }")
        assert reader.state() != before


def test_csv_dialects(tmp_path: Path) -> None:
    semicolons = write(tmp_path / "a.csv", "\ufefftext;n\r\nä,b;1\r\n\r\nc;2\r\n")
    assert sorted(texts(prepared(semicolons)["text"])) == ["c", "ä,b"]
    latin = write(tmp_path / "b.csv", "text,n\nä,1\nb,2\n".encode("latin-1"))
    assert sorted(texts(prepared(latin, "--encoding", "latin-1", "--force")["text"])) == ["b", "ä"]


def test_length_cuts_raw_text_between_characters(tmp_path: Path) -> None:
    found = prepared(write(tmp_path / "a.csv", "text\naäb\nx\n"), "--text", "text", "--length", 2)
    assert sorted(texts(found["text"])) == ["a", "x"]


def write_images(folder: Path, mode: str = "L", size: tuple[int, int] = (4, 3)) -> Path:
    for number, name in enumerate(("cat", "dog")):
        for index in range(3):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.new(mode, size, (10 * number + index) if mode == "L" else (255, 0, 10 * number + index)).save(
                folder / name / f"{index}.png"
            )
    return folder


def test_a_folder_of_images_becomes_pixels_and_labels(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pets")
    (folder / "cat" / "._0.png").write_bytes(b"\0\5\x16\7")  # which macOS adds where its file system is another one
    found = prepared(folder, "--slices", 2)
    assert found["pixel_values"].shape == (6, 1, 3, 4)
    pixels = np.rint(found["pixel_values"][:, 0, 0, 0] * 255).astype(int).tolist()
    assert sorted(zip(pixels, found["labels"].tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (10, 1),
        (11, 1),
        (12, 1),
    ]
    assert manifest(tmp_path / "out")["labels"] == ["cat", "dog"]


def test_images_are_scaled_and_may_stay_bytes(tmp_path: Path) -> None:
    source = write_images(tmp_path / "pets", "RGB")
    Image.new("RGBA", (9, 9), (255, 0, 3, 0)).save(source / "cat" / "odd.png")
    refused = prepare(source)
    assert "odd.png: 9x9 pixels (height x width), and" in refused.output
    assert "--size HxW" in refused.output
    found = prepared(source, "--size", "2x5", "--raw-pixels")
    assert found["image"].dtype == np.uint8
    assert found["image"].shape == (7, 3, 2, 5)
    assert set(found["image"][:, 0].ravel().tolist()) == {255}


@pytest.mark.parametrize("mode", ["CMYK", "RGBA", "P", "LA", "YCbCr"])
def test_images_of_every_mode_of_8_bits_become_red_green_and_blue(tmp_path: Path, mode: str) -> None:
    folder = write_images(tmp_path / "pets", "RGB")
    plain = Image.new("RGB", (4, 3), (200, 200, 200))
    plain.convert(mode).save(folder / "cat" / ("0.tif" if mode in ("CMYK", "YCbCr") else "0.png"))
    (folder / "cat" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    found = prepared(folder)["pixel_values"]
    assert found.shape[1:] == (3, 3, 4)
    gray = np.abs(found - np.float32(200 / 255)).reshape(len(found), -1).max(axis=1)
    assert (gray < 0.02).sum() == 1


def test_a_size_is_height_and_width(tmp_path: Path) -> None:
    refused = prepare(write_images(tmp_path / "pets"), "--size", "3,4")
    assert refused.exit_code == 2
    assert "'3,4': expected height and width, such as 32x48" in refused.output


def test_text_becomes_rows_of_bytes(tmp_path: Path) -> None:
    write(tmp_path / "texts" / "a.txt", b"abcdefg")
    write(tmp_path / "texts" / "b.txt", b"\xffz")
    found = prepared(tmp_path / "texts", "--length", 3)
    rows = sorted(zip(found["input_ids"].tolist(), found["attention_mask"].tolist(), strict=True))
    full = [1, 1, 1]
    assert rows == [([97, 98, 99], full), ([100, 101, 102], full), ([103, 0, 0], [1, 0, 0]), ([255, 122, 0], [1, 1, 0])]


def test_text_becomes_rows_of_tokens_or_samples_of_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "good film\n\nbad film bad\n")
    tokens = prepared(source, "--tokenizer", write_tokenizer(tmp_path / "tokenizer"), "--length", 2)
    assert sorted(tokens["input_ids"].tolist()) == [[2, 4], [3, 0], [3, 4]]
    lines = prepared(source, "--lines", "--force")
    assert sorted(texts(lines["text"])) == ["bad film bad", "good film"]


def test_a_saved_dataset_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, 1]})
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    write(folder / "state.json", json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}, "text": {"dtype": "string"}}
    write(folder / "dataset_info.json", json.dumps({"features": features}))
    write(tmp_path / "saved" / "dataset_dict.json", json.dumps({"splits": ["train"]}))
    found = prepared(tmp_path / "saved", "--text", "text", "--label", "label")
    assert sorted(zip(texts(found["text"]), found["labels"].tolist(), strict=True)) == [("a", 1), ("b", 0), ("c", 1)]
    assert manifest(tmp_path / "out")["labels"] == ["neg", "pos"]


def test_a_folder_of_parquet_files_is_read_by_split(tmp_path: Path) -> None:
    for split, rows in (("train", [1, 2]), ("test", [3])):
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        pa.parquet.write_table(pa.table({"x": rows}), tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    assert sorted(prepared(tmp_path / "hub")["x"].tolist()) == [1, 2]
    assert prepared(tmp_path / "hub", "--split", "test", "--force")["x"].tolist() == [3]


# ------------------------------------------------------------------------------------- compressed and several files


def packed(path: Path, suffix: str) -> Path:
    """Return a compressed copy of a file, which is removed; of .gz in two members."""
    target, content = path.with_name(path.name + suffix), path.read_bytes()
    middle = len(content) // 2
    if suffix == ".gz":
        target.write_bytes(gzip.compress(content[:middle]) + gzip.compress(content[middle:]))
    else:
        with pa.CompressedOutputStream(str(target), "zstd") as file:
            file.write(content)
    path.unlink()
    return target


def digests(folder: Path) -> list[str]:
    return [entry["digest"] for entry in manifest(folder)["slices"]]


COMPRESSED = pytest.mark.parametrize("suffix", [".gz", ".zst"])


@COMPRESSED
@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.csv", CSV, ("--label", "mood")),
        ("a.csv", "x,name\n" + "".join(f"{n},name {n}\n" for n in range(90_000)), ()),  # more than a block
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS), ("--label", "mood")),
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS), ("--slices", 2)),  # rows that stay JSON
        ("a.txt", "good film\n\nbad film bad\n", ("--length", 3)),
        ("a.txt", "good film\n\nbad film bad\n", ("--lines",)),
    ],
)
def test_a_compressed_file_gives_the_slices_of_the_plain_one(
    tmp_path: Path, suffix: str, name: str, content: str, options: tuple[object, ...]
) -> None:
    plain = prepare(write(tmp_path / name, content), *options, out="plain")
    assert plain.exit_code == 0, plain.output
    done = prepare(packed(tmp_path / name, suffix), *options)
    assert done.exit_code == 0, done.output
    assert digests(tmp_path / "out") == digests(tmp_path / "plain")


@COMPRESSED
def test_a_fault_in_a_compressed_file_is_named_by_its_line(tmp_path: Path, suffix: str) -> None:
    rows = "x,y\n" + "".join(f"{n},{n}\n" for n in range(90_000)) + "1,2,3\n"
    done = prepare(packed(write(tmp_path / "a.csv", rows), suffix))
    assert f"a.csv{suffix}, line 90002: 3 cells, and the first line names 2 columns" in done.output
    broken = packed(write(tmp_path / "b.jsonl", '{"x": 1}\n{"x"\n'), suffix)
    assert f"b.jsonl{suffix}, line 2: not JSON" in prepare(broken).output


@COMPRESSED
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path: Path, suffix: str, name: str) -> None:
    file = packed(write(tmp_path / name, '{"x":1}\n' * 90_000), suffix)
    file.write_bytes(file.read_bytes()[:-20])
    form = ("--format", "csv") if name == "a.csv" else ("--length", 3) if name == "a.txt" else ()
    done = prepare(file, *form)
    assert done.exit_code == 1
    assert f"{name}{suffix}: damaged: " in done.output
    assert "fetch or compress the file again" in done.output


def write_parts(folder: Path, form: str) -> list[Path]:
    """Write four samples in three files, which are not in the order of their names."""
    paths = [folder / f"part-{number}.{form}" for number in (2, 1, 3)]
    for path, numbers in zip(paths, ([2, 3], [1], [4]), strict=True):
        rows = [{"x": number, "y": f"row {number}"} for number in numbers]
        if form == "csv":
            names = ("y", "x") if path is paths[0] else ("x", "y")
            lines = [names, *([str(row[name]) for name in names] for row in rows)]
            write(path, "".join(",".join(line) + "\n" for line in lines))
        elif form == "jsonl":
            write(path, "".join(json.dumps(row) + "\n" for row in rows))
        elif form == "parquet":
            pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        elif form == "txt":
            write(path, "".join(f"{row['y']}\n" for row in rows))
        else:
            save_file({"x": np.array(numbers), "y": np.array([[n, n] for n in numbers], np.float16)}, path)
    return paths


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "txt", "safetensors"])
def test_several_files_are_one_dataset_whatever_their_order(tmp_path: Path, form: str) -> None:
    first, *others = write_parts(tmp_path, form)
    options = ("--lines",) if form == "txt" else ("--columns", "x,y") if form == "jsonl" else ()
    found = prepared(first, *others, "--slices", 2, *options)
    assert sorted(found["x"].tolist() if "x" in found else texts(found["text"])) in (
        [1, 2, 3, 4],
        ["row 1", "row 2", "row 3", "row 4"],
    )
    if form == "safetensors":
        assert sorted(found["y"].tolist()) == [[1, 1], [2, 2], [3, 3], [4, 4]]
    if form == "csv":
        assert dict(zip(found["x"].tolist(), texts(found["y"]), strict=True))[2] == "row 2"
    by_pattern = prepare(tmp_path / f"part-*.{form}", "--slices", 2, *options, out="pattern")
    assert by_pattern.exit_code == 0, by_pattern.output
    assert digests(tmp_path / "pattern") == digests(tmp_path / "out")


def test_rows_of_several_files_stay_json(tmp_path: Path) -> None:
    first, *others = write_parts(tmp_path, "jsonl")
    done = prepare(packed(first, ".gz"), *others, "--slices", 2)
    assert done.exit_code == 0, done.output
    lines = b"".join(path.read_bytes() for path in sorted((tmp_path / "out").glob("*.jsonl"))).splitlines()
    assert sorted(json.loads(line)["x"] for line in lines) == [1, 2, 3, 4]


def test_hidden_files_of_a_folder_are_not_read(tmp_path: Path) -> None:
    for name in ("._train.csv", ".DS_Store", "._a.txt"):
        write(tmp_path / "table" / name, b"\0\5\x16\7")
        write(tmp_path / "texts" / name, b"\0\5\x16\7")
    write(tmp_path / "table" / "train.csv.gz", gzip.compress(b"x\n1\n2\n"))
    write(tmp_path / "texts" / "a.txt", "ab")
    assert sorted(prepared(tmp_path / "table")["x"].tolist()) == [1, 2]
    assert prepared(tmp_path / "texts", "--length", 2, "--force")["input_ids"].tolist() == [[97, 98]]


# ---------------------------------------------------------------------------------------------------------- bad input


def with_image(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Return a function that makes a folder of images, of which one is changed."""

    def make(folder: Path) -> Path:
        change(write_images(folder / "pets") / "dog" / "1.png")
        return folder / "pets"

    return make


deep_image = with_image(lambda path: Image.new("I;16", (4, 3), 30_000).save(path))
broken_image = with_image(lambda path: path.write_bytes(path.read_bytes()[:45]))


def parquet(**columns: list[Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        pa.parquet.write_table(pa.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return make


def written(name: str, content: str | bytes) -> Callable[[Path], Path]:
    return lambda folder: write(folder / name, content)


NAN = float("nan")
csv, jsonl, text = (partial(written, f"a.{suffix}") for suffix in ("csv", "jsonl", "txt"))
BAD = {
    "empty csv": (csv(""), (), "a.csv: holds no rows; its first line must have"),
    "no file": (lambda at: at / "none.csv", (), "none.csv: no such file or folder"),
    "no file of a format": (lambda at: at / "none.csv", ("--format", "csv"), "none.csv: no such file or folder"),
    "only names": (csv("x,y\n"), (), "a.csv: holds no rows; add them"),
    "missing column": (csv("x,y\n1,2\n"), ("--label", "z"), "a.csv: has no column 'z'; there are x, y"),
    "encoding": (csv(b"x\na\n\xe4\n"), (), "line 3: not utf-8: byte 0xe4 at 1; save the file as UTF-8"),
    "utf-16": (csv("x\na\n".encode("utf-16")), (), "line 1: the file is UTF-16; save it as UTF-8"),
    "ragged": (csv("x,y\n1,2\n1,2,3\n"), (), "line 3: 3 cells, and the first line names 2 columns"),
    "too few cells": (
        csv("x,y\n1,2\n1\n"),
        (),
        "line 3: 1 cells, and the first line names 2 columns; add or remove cells",
    ),
    "missing column of json": (jsonl('{"x": 1}\n'), ("--label", "z"), "a.jsonl: has no column 'z'; there are x"),
    "missing column of parquet": (parquet(x=[1.0]), ("--columns", "y"), "a.parquet: has no column 'y'; there are x"),
    "open quotes": (csv('x,y\n1,"2\n'), (), "double the quotes in it"),
    "name twice": (csv("x,x\n1,2\n"), (), "the name of column 2 ('x') occurs twice; rename it"),
    "nan label": (csv("x,y\n1,0\n1,nan\n"), ("--label", "y"), "line 3, column 'y': 'nan' is not a label"),
    "empty label": (
        csv("x,y\n1,a\n1,\n"),
        ("--label", "y"),
        "line 3, column 'y': is empty, and each row needs a label",
    ),
    "negative label": (
        csv("x,y\n1,-1\n1,1\n"),
        ("--label", "y"),
        "line 2, column 'y': the label -1 is no class; number the classes from 0",
    ),
    "large label": (
        jsonl('{"x": 1, "y": 1}\n{"x": 1, "y": 3000000000}\n'),
        ("--label", "y"),
        "a.jsonl, line 2, column 'y': the label 3000000000 is no class",
    ),
    "nan among names": (
        csv("x,y\n1,good\n1,NaN\n"),
        ("--label", "y"),
        "a.csv, line 3, column 'y': 'NaN' is not a label; correct it or remove the row",
    ),
    "nan label in parquet": (
        parquet(y=[0.0, NAN]),
        ("--label", "y"),
        "a.parquet, row 2, column 'y': nan is not a label; correct it or remove the row",
    ),
    "too many labels": (
        csv("x,y\n" + "".join(f"1,n{n}\n" for n in range(10_001))),
        ("--label", "y"),
        "a.csv, column 'y': more than 10000 different labels; name another column by --label",
    ),
    "byte order mark": (
        jsonl('\ufeff{"x": 1}\n'),
        ("--columns", "x"),
        "a.jsonl, line 1: begins with a byte order mark; save the file as UTF-8 without one",
    ),
    "encoding of json": (
        jsonl(b'{"x": 1}\n{"x": "\xe4"}\n'),
        ("--columns", "x"),
        "a.jsonl, line 2: not UTF-8: byte 0xe4 at 8; save the file as UTF-8",
    ),
    "large number": (csv("x\n1.5\n1e39\n"), (), "line 3, column 'x': '1e39' is not a number"),
    "empty number": (csv("x,y\n1,2\n,2\n"), (), "line 3, column 'x': is empty, and each row needs a number"),
    "kinds": (jsonl('{"x": 1}\n{"x": "a"}\n'), ("--columns", "x"), "line 2, column 'x': 'a' is of kind text, and"),
    "nested json": (jsonl('{"x": [1]}\n'), ("--columns", "x"), "line 1, column 'x': [1] is nested"),
    "broken json": (jsonl('{"x": 1}\n{"x"\n'), ("--columns", "x"), "line 2: not JSON"),
    "16-bit png": (deep_image, (), "dog/1.png: pixels of more than 8 bits (mode I;16): convert it to 8 bits first"),
    "broken png": (broken_image, (), "dog/1.png: a damaged image, or none: "),
    "no classes": (
        lambda at: (at / "pets").mkdir() or at / "pets",
        ("--format", "images"),
        "pets: has 0 folders; make one for each class",
    ),
    "nested parquet": (parquet(x=[1], tags=[["a"]]), (), "a.parquet, column 'tags': its type"),
    "nan parquet": (parquet(x=[1.0, NAN]), (), "a.parquet, row 2, column 'x': nan is not a number"),
    "no parquet": (lambda at: write(at / "a.parquet", "PAR1 no"), (), "a.parquet: damaged, or another format"),
    "no text": (text(""), ("--length", 3), "a.txt: holds no text"),
    "no length": (text("a"), (), "a.txt: text needs --length"),
    "no tokenizer": (text("a"), ("--length", 3, "--tokenizer", "/"), "--tokenizer /: holds no tokenizer.json"),
    "huge integer": (jsonl('{"x": 1}\n{"x": 1' + "0" * 400 + "}\n"), ("--columns", "x"), "line 2, column 'x': 10000"),
    "reserved name": (
        csv("x,__metadata__\n1,2\n"),
        (),
        "a.csv: no tensor can have the name of the column '__metadata__'; rename it",
    ),
    "only file of another split": (
        lambda at: write(at / "d" / "test.csv", "x\n1\n").parent,
        ("--format", "hf"),
        "no file of the split 'train' among test.csv",
    ),
    "part of a split's name": (
        lambda at: write(at / "d" / "train_gen.csv", "x\n1\n").parent,
        ("--format", "hf"),
        "no file of the split 'train' among train_gen.csv",
    ),
    "several configurations": (
        lambda at: write(
            write(at / "d" / "a" / "train.csv", "x\n1\n").parents[1] / "b" / "train.csv", "x\n1\n"
        ).parents[1],
        ("--format", "hf"),
        "the split 'train' is in several folders: ",
    ),
    "option": (text("a"), ("--size", "3x3"), "--size does not concern the format text, but images"),
    "all for testing": (csv("x\n1\n"), ("--test", 0.9), "1 samples are too few to keep some for testing"),
}


def other_parts(folder: Path, name: str, *contents: str) -> Path:
    """Return a pattern that files of these contents match."""
    for number, content in enumerate(contents):
        write(folder / f"{number}-{name}", content)
    return folder / f"*{name}"


@pytest.mark.parametrize(
    ("make", "options", "fault"),
    [
        (
            lambda at: other_parts(at, "a.csv", "x,y\n1,2\n", "x,z\n1,2\n"),
            (),
            "1-a.csv: has no column 'y', and {0}/0-a.csv has one; give all files the same columns",
        ),
        (lambda at: other_parts(at, "a.csv", "x\n1\n", "x\n1\n2,3\n"), (), "1-a.csv, line 3: 2 cells"),
        (
            lambda at: other_parts(at, "a.jsonl", '{"x": 1}\n', '{"y": "a"}\n'),
            ("--columns", "x"),
            "1-a.jsonl, line 1, column 'x': is empty, and each row needs a number; fill it in or remove the row",
        ),
        (
            lambda at: write(write(at / "a.csv", "x\n1\n").with_name("a.jsonl"), '{"x": 1}\n').with_name("a.*"),
            (),
            "a.csv is csv, and {0}/a.jsonl is jsonl; prepare them one by one, or set --format",
        ),
        (lambda at: at / "*.csv", (), "*.csv: no file matches this pattern; correct it, or name the files"),
        (
            lambda at: write(at / "a.csv", "x\n1\n"),
            (lambda at: at / "b" / ".." / "a.csv",),
            "a.csv: is named twice, so its samples would be used twice; name it once",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, make: Callable[[Path], Path], options: tuple[Any, ...], fault: str
) -> None:
    (tmp_path / "b").mkdir()
    done = prepare(make(tmp_path), *(option(tmp_path) if callable(option) else option for option in options))
    assert done.exit_code == 1, done.output
    assert fault.format(tmp_path) in done.output


def test_tensors_of_several_files_must_agree(tmp_path: Path) -> None:
    save_file({"x": np.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"x": np.zeros((2, 3))}, tmp_path / "b.safetensors")
    done = prepare(tmp_path / "*.safetensors")
    assert "b.safetensors: the tensor 'x' is float64[3], and float64[] in " in done.output


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_place_and_remedy(tmp_path: Path, case: str) -> None:
    make, options, fault = BAD[case]
    done = prepare(make(tmp_path), *options)
    assert done.exit_code == 1, done.output
    assert done.output.startswith("Error: ")
    assert fault in done.output
    assert not (tmp_path / "out").exists()  # and nothing is left


def test_a_missing_library_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    done = prepare(write(tmp_path / "a.parquet", "PAR1"))
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "needs pyarrow, of the extra formats: uv pip install 'hypha-data[formats]'" in done.output


# ------------------------------------------------------------------------------------------------------- inspection


def test_inspect_prints_what_a_folder_holds_and_what_is_wrong(tmp_path: Path) -> None:
    prepared(write_images(tmp_path / "pets"), "--slices", 2)
    found = CliRunner().invoke(main, ["inspect", str(tmp_path / "out"), "--verify"])
    assert found.exit_code == 0
    for line in (
        "column pixel_values: float32[1,3,4]",
        "labels: 0 cat, 1 dog",
        "samples by label: 0: 3 (50.0%), 1: 3 (50.0%)",
    ):
        assert line in found.stdout
    assert re.search(r"^  row 1: pixel_values \[(0\.\d+ )+…\], labels [01] (cat|dog)$", found.stdout, re.MULTILINE)
    path = tmp_path / "out" / "slice-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    damaged = CliRunner().invoke(main, ["inspect", str(tmp_path / "out"), "--verify", "--format", "json"])
    assert damaged.exit_code == 1
    [fault] = json.loads(damaged.stdout)["faults"]
    assert "slice-00001.safetensors: digest blake3:" in fault


@pytest.mark.parametrize(
    ("options", "row"),
    [
        (("--text", "text", "--label", "mood", "--columns", "stars"), "text 'good film', labels 0 happy, stars 5"),
        (("--columns", "price,text"), "price 1.5, text 'good film'"),
        ((), "text 'good film', mood 'happy', stars 5, price 1.5"),  # rows that stay JSON
    ],
)
def test_inspect_shows_the_first_rows(tmp_path: Path, options: tuple[str, ...], row: str) -> None:
    source = write(tmp_path / "a.jsonl", json.dumps(ROWS[0]) + "\n")
    assert prepare(source, *options, "--slices", 1).exit_code == 0
    found = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")])
    assert f"  row 1: {row}\n" in found.stdout


# ------------------------------------------------------------------------------------------- columns as Arrow arrays


CELLS = {
    "integers": ["0", "-7", "9223372036854775807"],
    "large integers": ["1", "9223372036854775808"],
    "numbers": ["1", "-0.5", ".5", "2.", "1e3", "-1E-3"],
    "signs": ["+5", "-6"],
    "postal codes": ["01234", "10115"],
    "signed postal codes": ["-01", "1"],
    "hexadecimal": ["0x1f", "2"],
    "words after numbers": ["1"] * 3 + ["two"],
    "spaces": [" 1", "2 "],
    "only a sign": ["-", "1"],
    "exponents": ["1e", "2"],
    "gaps in text": ["a", "", "bb"],
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("case", CELLS)
def test_a_column_is_the_same_without_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, line_end: str
) -> None:
    rows = ["x;y", *(f"{cell};{number}" for number, cell in enumerate(CELLS[case]))]
    source = write(tmp_path / "a.csv", line_end.join(rows))
    found = prepared(source, "--slices", 1)
    monkeypatch.setattr("hypha_data.sources.csv_file.import_arrow", lambda: None)
    plain = prepared(source, "--slices", 1, "--force")
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in plain.items()
    }


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1,2,3", "line 90002: 3 cells, and the first line names 2 columns"),
        ("nan,a", "line 90002, column 'x': 'nan' is not a number"),
        ('"a"b,1', "line 90002: ',' expected after '\"'"),
        ("1\r,2", "line 90002: "),
        ("\udce4,1", "line 90002: not utf-8: byte 0xe4 at 1"),
        ('"1",a\n"b', "line 90003: unexpected end of data"),
    ],
)
def test_a_fault_far_in_a_file_is_named_by_its_line(tmp_path: Path, row: str, fault: str) -> None:
    content = "x,name\n" + "".join(f"{number},name {number}\n" for number in range(90_000)) + row
    done = prepare(write(tmp_path / "a.csv", content.encode(errors="surrogateescape")))
    assert done.exit_code == 1
    assert fault in done.output


def test_cells_of_several_lines_between_plain_ones_keep_their_rows(tmp_path: Path) -> None:
    rows = [f"{number}\nend" if number % 5000 == 0 else f"{number} end" for number in range(60_000)]
    cells = (f'"{row}"' if "\n" in row else row for row in rows)
    source = write(tmp_path / "a.csv", "text\n" + "".join(f"{cell}\n" for cell in cells))
    assert sorted(texts(prepared(source)["text"])) == sorted(rows)


def test_images_are_upright_as_their_orientation_says(tmp_path: Path) -> None:
    turned = Image.new("L", (3, 4))
    turned.putpixel((0, 3), 255)
    orientation = Image.Exif()
    orientation[0x0112] = 6  # turn it by 90 degrees clockwise
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    turned.save(tmp_path / "pets" / "cat" / "0.png", exif=orientation)
    found = prepared(tmp_path / "pets")["pixel_values"]
    assert found.shape == (1, 1, 3, 4)
    assert found[0, 0, 0].tolist() == [1, 0, 0, 0]


def test_too_many_slices_are_refused_before_the_source_is_read(tmp_path: Path) -> None:
    done = prepare(write(tmp_path / "a.csv", "x\n1\n2,3\n"), "--slices", 100_000)
    assert done.exit_code == 1
    assert "--slices 100000: a dataset has 1 to 99999 slices" in done.output
