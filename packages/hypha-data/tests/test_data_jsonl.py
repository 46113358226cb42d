"""JSONL datasets: every row once and unchanged, and every fault of a source named before anything is written."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_data.catalog import open_dataset
from hypha_data.cli import main
from hypha_data.digest_cache import ignore_progress
from hypha_data.errors import DatasetError
from hypha_data.jsonl import MAX_LINE, ColumnTable, RowFile
from hypha_data.prepare import prepare_dataset
from hypha_proto.codec import to_json
from hypha_proto.datasets import JSONL, MANIFEST, Manifest, SliceEntry

ROWS = [
    '{"id": 7, "text": "Grüße \\u00e9", "score": 1}',
    '{"id":8,"text":"a\\nb","score":2.50,"tags":["x"]}',
    '{"text": "", "id": 9, "score": -1e3, "more": {"a": null}, "ok": true}',
]


def source(folder: Path, rows: list[str] | None = None, name: str = "all.jsonl", end: str = "\n") -> Path:
    path = folder / name
    path.write_bytes("".join(row + end for row in (ROWS if rows is None else rows)).encode())
    return path


def prepare(path: Path, out: Path, slices: int = 1, seed: int = 0, **options: Any) -> Manifest:
    return prepare_dataset(path, out, name="d", slices=slices, seed=seed, **options)


def lines(folder: Path, manifest: Manifest) -> list[list[str]]:
    return [(folder / entry.file).read_text().split("\n")[:-1] for entry in manifest.slices]


@given(count=st.integers(1, 40), slices=st.integers(1, 12), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_slices_contain_every_row_once_and_unchanged(
    tmp_path_factory: pytest.TempPathFactory, count: int, slices: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    path = source(folder, rows := [f'{{"id":  {number}}}' for number in range(count)])
    if slices > count:
        with pytest.raises(DatasetError, match=f"--slices {slices}: .* holds {count} samples, so 1 to {count}"):
            prepare(path, folder / "out", slices, seed)
        return
    manifest = prepare(path, folder / "out", slices, seed)
    parts = lines(folder / "out", manifest)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert [len(part) for part in parts] == [entry.samples for entry in manifest.slices]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for entry in manifest.slices:
        content = (folder / "out" / entry.file).read_bytes()
        assert (entry.size, entry.digest) == (len(content), f"blake3:{blake3(content).hexdigest()}")
    assert prepare(path, folder / "again", slices, seed) == manifest


def test_the_manifest_names_the_format_and_the_columns(tmp_path: Path) -> None:
    manifest = prepare(source(tmp_path), tmp_path / "out", 2)
    assert [entry.file for entry in manifest.slices] == ["slice-00000.jsonl", "slice-00001.jsonl"]
    assert manifest.format == JSONL
    assert manifest.columns == {
        "id": "integer",
        "text": "text",
        "score": "number",
        "tags": "list",
        "more": "object",
        "ok": "boolean",
    }
    assert open_dataset("d", tmp_path / "out").manifest == manifest
    assert json.loads((tmp_path / "out" / MANIFEST).read_bytes())["format"] == "jsonl"
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("end", ["\n", "\r\n", " \t\n"])
def test_line_ends_and_the_absence_of_the_last_one_change_nothing(tmp_path: Path, end: str) -> None:
    expected = prepare(source(tmp_path), tmp_path / "expected")
    path = source(tmp_path, name="other.ndjson", end=end)
    assert prepare(path, tmp_path / "whole") == expected
    path.write_bytes(path.read_bytes().rstrip())
    assert prepare(path, tmp_path / "cut") == expected


def test_rows_are_split_at_line_feeds_alone(tmp_path: Path) -> None:
    names = ["a\u2028b", "\u2029", "c\u0085", "\x0b\x0c", "\x1c\x1d\x1e", "a\rb"]
    rows = [json.dumps({"name": name}, ensure_ascii=False) for name in names]
    manifest = prepare(source(tmp_path, rows), tmp_path / "out", 2)
    found = [json.loads(line) for entry in manifest.slices for line in (tmp_path / "out" / entry.file).open("rb")]
    assert sorted(row["name"] for row in found) == sorted(names)
    assert [entry.samples for entry in manifest.slices] == [3, 3]


GOOD = b'{"a": 1}\n'
FAULTS: list[tuple[bytes, str]] = [
    (b"", ": holds no rows; write one JSON object a line"),
    (b"\n", ", line 1: is empty; remove it"),
    (GOOD + b"\n" + GOOD, ", line 2: is empty; remove it"),
    (GOOD + b"[1]\n", ", line 2: is of kind list ([1]), and a row is an object; write one object a line"),
    (b"null\n", ", line 1: is of kind null (None), and a row is an object"),
    (GOOD + b'{"a": 1, "b": 2, "a": 3}', ", line 2: the key 'a' occurs twice; remove one of them"),
    (b'{"a": {"b": 1, "b": 2}}', ", line 1: the key 'b' occurs twice"),
    (b'{"a": NaN}', ", line 1: NaN is not a JSON number; write null, or leave the key out"),
    (b'{"a": [-Infinity]}', ", line 1: -Infinity is not a JSON number"),
    (b'{"a": 1e999}', ", line 1: '1e999' is beyond the range of a number; write a smaller one, or text"),
    (b'{"a": 1' + b"0" * 5000 + b"}", ", line 1: an integer of thousands of digits; write it as text"),
    (GOOD + b'  {"a": 1 "b": 2}', ", line 2: not JSON at column 11 (Expecting ',' delimiter), near '  {\"a\": 1 \"b\""),
    (GOOD * 2 + b'{"a": 1', ", line 3: not JSON at column 8"),
    (b'{"a": 1}{"a": 2}', ", line 1: not JSON at column 9 (Extra data)"),
    (b'{"a":\r1}\n', ", line 1: has a carriage return within the row"),
    (GOOD + b'{"a": "\xff"}', ", line 2: not UTF-8: byte 0xff at 8; save the file as UTF-8"),
    ('{"a": 1}'.encode("utf-16"), ": not jsonl: it is text in UTF-16: save it as UTF-8"),
    (b"\xef\xbb\xbf" + GOOD, ", line 1: begins with a byte order mark; save the file as UTF-8 without one"),
    (b'{"a": "\\ud83d"}', ", line 1: '\\ud83d' is half of a surrogate pair; write the whole character"),
    (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", ", line 1: nested more than 64 levels deep; make it flatter"),
    (b"[" * 100_000, ", line 1: nested too deeply; make it flatter"),
    (b'{"": 1}', ", line 1: the key '' has 0 characters; a column's name has 1 to 256"),
    (b'{"a": "%s"}' % (b"x" * MAX_LINE), f", line 1: longer than {MAX_LINE} bytes: "),
    (GOOD + b'{"a": "b"}', ", line 2: column 'a' is of kind text here ('b') and of kind integer in all.jsonl, line 1"),
    (b'{"a": 1}\n{"a": 1.5}\n{"a": []}', ", line 3: column 'a' is of kind list here ([]) and of kind number in all"),
    (b'{"a": null}\n{"a": true}\n{"a": 1}', ", line 3: column 'a' is of kind integer here (1) and of kind boolean in"),
    (json.dumps({f"k{n}": n for n in range(1025)}).encode(), ", line 1: the key 'k1024' is column 1025, and a dataset"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), FAULTS, ids=[f"{n}" for n in range(len(FAULTS))])
def test_a_fault_is_named_with_its_line_and_nothing_is_written(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as fault:
        prepare(path, tmp_path / "out")
    assert str(fault.value).startswith(f"{path}{message}")
    assert len(str(fault.value)) < len(str(path)) + 300
    assert not (tmp_path / "out").exists()


def test_the_longest_line_is_accepted(tmp_path: Path) -> None:
    row = json.dumps({"a": "x" * (MAX_LINE - len('{"a": ""}'))})
    assert len(row) == MAX_LINE
    manifest = prepare(source(tmp_path, [row], end="\r\n"), tmp_path / "out")
    assert manifest.slices[0].size == MAX_LINE + 1


def test_columns_that_rows_lack_are_allowed_and_named(tmp_path: Path) -> None:
    rows = ['{"a": 1}', '{"a": 2, "b": null, "c": null}', '{"a": 3, "b": "x"}', "{}"]
    notices: list[str] = []
    manifest = prepare(source(tmp_path, rows), tmp_path / "out", on_notice=notices.append)
    assert manifest.columns == {"a": "integer", "b": "text", "c": "null"}
    assert notices == [
        "column 'a' has no value in 1 of 4 rows; the first is in all.jsonl, line 4",
        "column 'b' has no value in 3 of 4 rows; the first is in all.jsonl, line 1",
        "column 'c' has no value in 4 of 4 rows; the first is in all.jsonl, line 1",
    ]


def test_a_failed_replacement_leaves_the_dataset_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prepare(source(tmp_path), tmp_path / "out", 3)
    with pytest.raises(DatasetError, match=r"holds 3 slices already.*--force"):
        prepare(source(tmp_path, ROWS[:2]), tmp_path / "out")
    content = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    read = RowFile.row

    def change_source(self: RowFile, index: int) -> bytes:
        with self.path.open("ab") as file:
            file.write(b"{}\n")
        return read(self, index)

    monkeypatch.setattr(RowFile, "row", change_source)
    with pytest.raises(DatasetError, match="changed while it was read; run the command again"):
        prepare(source(tmp_path, ROWS[:2]), tmp_path / "out", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == content
    monkeypatch.undo()
    after = prepare(source(tmp_path, ROWS[:2]), tmp_path / "out", force=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MANIFEST, "slice-00000.jsonl"]
    assert after != before


def test_a_source_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    with pytest.raises(DatasetError, match="not a regular file; write the rows to a file first"):
        prepare(path, tmp_path / "out")


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    path = source(tmp_path, [json.dumps({"id": number, "text": "x" * 2000}) for number in range(10_000)])
    tracemalloc.start()
    try:
        prepare(path, tmp_path / "out", 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 19 << 20
    assert peak < 4 << 20


# ------------------------------------------------------------------------------------------------------------- serving


def write_results(folder: Path, **fields: Any) -> Manifest:
    """Write a folder as batch inference does."""
    folder.mkdir()
    entries = []
    for number in range(2):
        content = b'{"slice": %d, "row": 0, "label": 3}\n{"slice": %d, "row": 1, "error": {}}\n' % (number, number)
        (folder / f"part-{number}.jsonl").write_bytes(content)
        digest = f"blake3:{blake3(content).hexdigest()}"
        entries.append(SliceEntry(file=f"part-{number}.jsonl", samples=2, size=len(content), digest=digest))
    columns = {"slice": "integer", "row": "integer", "label": "integer", "error": "object"}
    known: dict[str, Any] = {"format": JSONL, "columns": columns, **fields}
    manifest = Manifest(dataset="results", slices=tuple(entries), **known)
    (folder / MANIFEST).write_bytes(to_json(Manifest, manifest))
    return manifest


def test_a_folder_that_another_program_wrote_is_opened_as_its_manifest_says(tmp_path: Path) -> None:
    manifest = write_results(tmp_path / "results")
    opened = open_dataset("results", tmp_path / "results")
    assert opened.manifest == manifest
    assert opened.manifest_json == (tmp_path / "results" / MANIFEST).read_bytes()
    assert opened.slice_path(1) == tmp_path / "results" / "part-1.jsonl"
    renamed = open_dataset("inputs", tmp_path / "results").manifest
    assert (renamed.dataset, renamed.format, renamed.columns) == ("inputs", JSONL, manifest.columns)


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("parquet", "format 'parquet' is not known here, but safetensors, jsonl; update hypha-data"),
        (None, "'part-0.jsonl' is not a *.safetensors; set `format` to safetensors or jsonl"),
    ],
)
def test_a_manifest_of_another_format_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str | None, fault: str
) -> None:
    manifest = write_results(tmp_path / "results", format=form, columns=None)
    measured = open_dataset("results", tmp_path / "results")
    assert not measured.is_prepared
    assert (measured.manifest.format, measured.manifest.slices) == (JSONL, manifest.slices)
    assert fault in caplog.text


def test_rows_without_a_manifest_are_measured(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    source(tmp_path / "rows", ROWS[:1], "a.jsonl")
    path = source(tmp_path / "rows", ROWS[1:], "b.jsonl")
    manifest = open_dataset("d", tmp_path / "rows").manifest
    assert [(entry.file, entry.samples) for entry in manifest.slices] == [("a.jsonl", 1), ("b.jsonl", 2)]
    assert manifest.columns is not None
    assert list(manifest.columns) == ["id", "text", "score", "tags", "more", "ok"]
    path.write_bytes(b'{"id": "x"}\n')
    with pytest.raises(DatasetError, match=r"b\.jsonl, line 1: column 'id' is of kind text .* in a\.jsonl, line 1"):
        open_dataset("d", tmp_path / "rows")


# ---------------------------------------------------------------------------------------------------------- the command


def invoke(*args: object) -> Any:
    return CliRunner().invoke(main, ["prepare", *map(str, args)])


def test_the_command_prepares_rows_and_notes_what_they_lack(tmp_path: Path) -> None:
    done = invoke(source(tmp_path, name="ROWS.JSONL"), "--out", tmp_path / "out", "--slices", 3, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["format"], result["samples"], result["slices"]) == ("jsonl", 3, 3)
    assert result["columns"]["text"] == "text"
    assert "note: column 'tags' has no value in 2 of 3 rows; the first is in ROWS.JSONL, line 1" in done.stderr


def test_rows_with_another_suffix_are_prepared_if_their_format_is_named(tmp_path: Path) -> None:
    path = source(tmp_path, name="rows.dat")
    done = invoke(path, "--out", tmp_path / "out", "--slices", 1, "--format", "jsonl")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "slice-00000.jsonl").exists()


# -------------------------------------------------------------------------------------------------------------- fuzzing

Mutation = Callable[[random.Random, bytes], bytes]
TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\r", b"\\", b"\\u", b"\\ud800", b"null", b"NaN", b"1e400",
          b"-", b"0", b"\x00", b"\xff", b"\xc3", b'"a":1,', b'"":', b"9" * 5000, b"[" * 200]  # fmt: skip


def _replace(pick: random.Random, data: bytes) -> bytes:
    start = pick.randrange(len(data) + 1)
    return data[:start] + pick.choice(TOKENS) + data[start + pick.randrange(4) :]


def _flip(pick: random.Random, data: bytes) -> bytes:
    at = pick.randrange(len(data) + 1)
    return data[:at] + bytes([pick.randrange(256)]) + data[at + 1 :]


def _cut(pick: random.Random, data: bytes) -> bytes:
    start, end = sorted(pick.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _repeat(pick: random.Random, data: bytes) -> bytes:
    start, end = sorted(pick.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:]


MUTATIONS: list[Mutation] = [_replace, _flip, _cut, _repeat]


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_mutated_sources_are_refused_by_line_or_read_as_json_reads_them(count: int, tmp_path: Path) -> None:
    pick, path = random.Random(5), tmp_path / "fuzz.jsonl"
    original = ("\n".join(ROWS) + "\n").encode()
    accepted = 0
    for _ in range(count):
        data = original
        for _ in range(pick.randrange(1, 4)):
            data = pick.choice(MUTATIONS)(pick, data)
        path.write_bytes(data)
        try:
            with RowFile(path, ColumnTable(), ignore_progress) as rows:
                read = [json.loads(rows.row(number)) for number in range(len(rows))]
        except DatasetError as error:
            assert str(error).startswith((f"{path}, line ", f"{path}: holds no rows"))  # noqa: PT017
            continue
        accepted += 1
        assert read == [json.loads(line) for line in data.decode().split("\n") if line.strip()]
        assert all(isinstance(row, dict) for row in read)
    assert count / 20 < accepted < 0.9 * count
