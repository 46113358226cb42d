"""Sources that are no dataset: `prepare` says what they are, whatever their name promises."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_data.cli import main as command

ROWS = b'{"text": "a"}\n{"text": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("all.safetensors.gz", gzip.compress(ROWS, mtime=0), "it is compressed by gzip: unpack it with gunzip"),
        ("rows.parquet.gz", gzip.compress(ROWS, mtime=0), "not parquet: it is compressed by gzip"),
        ("rows.csv.gz", gzip.compress(pickle.dumps(ROWS), mtime=0), "not csv: it is a pickle"),
        ("rows.jsonl", gzip.compress(ROWS, mtime=0), "not jsonl: it is compressed by gzip"),
        ("rows.csv", gzip.compress(ROWS, mtime=0), "not csv: it is compressed by gzip"),
        ("rows.txt", pickle.dumps(ROWS), "not text: it is a pickle"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", "not parquet: it is a Git LFS pointer"),
        ("rows.jsonl", b"<!DOCTYPE html><html>", "it is an HTML or XML page, as a login or an error shows"),
        ("rows.json", b'[{"text": "a"}]', "it is a JSON array: write one object a line"),
        ("rows", ROWS, "it is JSON: name rows of one object a line *.jsonl"),
        ("rows.csv", b"GIF89a" + bytes(30), "not csv: it is an image"),
        ("rows.dat", b"text,label\na,1\n", "it is text; if it is of another format, name that by --format"),
        ("rows.dat", b'{ "text": "a"}\n', "it is JSON: name rows of one object a line *.jsonl"),
        ("weights.pt", pickle.dumps([1]), "it is a pickle: save its values with safetensors"),
    ],
)
def test_source_of_another_kind_is_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(command, ["prepare", str(tmp_path / name), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert words in done.output
    assert "header of" not in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["GGUF", "RIFF", "BZhang", "Object", "SQLite format"])
def test_text_may_begin_as_another_kind_does(word: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"{word},text\n0,a\n1,é\n")
    done = CliRunner().invoke(command, ["prepare", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
