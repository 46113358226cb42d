"""`hypha-data prepare` as a process: memory, interruptions, full disks, and sources that are no dataset."""

from __future__ import annotations

import gzip
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from support.small_disk import small_disk

from hypha_data.cli import main as command
from hypha_data.errors import DatasetError
from hypha_data.prepare import prepare_dataset
from hypha_data.sources import formats
from hypha_data.sources.options import ReadOptions
from hypha_data.sources.reader import Arrays, Layout, OnProgress, SampleReader
from hypha_data.workspace import WORK

PEAK = """
import sys, threading
from hypha_data.cli import main
peak, ended = 0, threading.Event()
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
def watch():
    global peak
    while not ended.wait(0.005):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
try:
    main(sys.argv[1:], standalone_mode=False)
finally:
    ended.set()
    watcher.join()
    print(peak, file=sys.stderr)
"""


def peak_memory(*arguments: object) -> int:
    """Run the command in a process; return its peak of memory that no file backs, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) << 10


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is of Linux")
def test_memory_does_not_grow_with_the_slices_of_tensors(tmp_path: Path) -> None:
    save_file({"x": np.zeros((4000, 25_000), np.float32)}, tmp_path / "all.safetensors")  # 400 MB, one slice
    used = peak_memory("prepare", tmp_path / "all.safetensors", "--out", tmp_path / "out", "--slices", 1)
    assert used < 256 << 20


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is of Linux")
@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst", "parquet"])
def test_memory_does_not_grow_with_a_table(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"all.{form}"
    if form.startswith("csv"):
        line = f"{'some text ' * 90},1,2.5\n".encode()
        kind = {"csv.gz": "gzip", "csv.zst": "zstd"}.get(form)
        with pa.CompressedOutputStream(str(path), kind) if kind else path.open("wb") as file:
            file.write(b"text,label,x\n")
            for _ in range(400):
                file.write(line * 1000)  # 360 MB
    else:
        table = pa.table({"label": np.zeros(100_000, np.int64), "text": ["some text " * 400] * 100_000})  # 400 MB
        pa.parquet.write_table(table, path, use_dictionary=False, row_group_size=100_000)
        del table
    options = ("--text", "text", "--label", "label", "--test", 0.1)
    assert peak_memory("prepare", path, "--out", tmp_path / "out", *options) < 256 << 20


def write_table(path: Path, rows: int = 3000) -> Path:
    path.write_text("x,label\n" + "".join(f"{number},{number % 3}\n" for number in range(rows)))
    return path


def digests(folder: Path) -> bytes:
    return (folder / "manifest.json").read_bytes()


class _Interrupted(BaseException):
    """As a signal ends the process."""


def prepare(source: Path, out: Path, **options: Any) -> None:
    prepare_dataset(source, out, name="d", slices=5, seed=3, test=0.2, options=ReadOptions(label="label"), **options)


class _Counted:
    """A reader that counts the calls of `scan`, and the rows that it converts."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self.scans = 0
        self.first: int | None = None

    def state(self) -> str:
        return self._reader.state()

    def scan(self, on_progress: OnProgress) -> Layout:
        self.scans += 1
        return self._reader.scan(on_progress)

    def blocks(self, layout: Layout, first: int) -> Iterator[Arrays]:
        self.first = first
        return self._reader.blocks(layout, first)


def stop_at(what: str, count: int) -> Callable[[str, int], None]:
    def on_progress(done: str, number: int) -> None:
        if what in done and number >= count:
            raise _Interrupted

    return on_progress


@pytest.mark.parametrize(
    ("what", "count", "rest"),
    [
        ("checked", 2000, (1, 0)),
        ("converted", 2048, (0, 2048)),
        ("slices of 1", 1, (0, None)),
        ("slices of 5", 3, (0, None)),
    ],
)
def test_interrupted_work_is_continued_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, count: int, rest: tuple[int, int | None]
) -> None:
    source = write_table(tmp_path / "a.csv")
    prepare(source, tmp_path / "whole")
    monkeypatch.setattr("hypha_data.staging._SYNC_BYTES", 1)  # every block is on disk
    with pytest.raises(_Interrupted):
        prepare(source, tmp_path / "out", on_progress=stop_at(what, count))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK]
    finished = {path: path.stat().st_ino for path in (tmp_path / "out" / WORK).glob("*.safetensors")}
    readers: list[_Counted] = []

    def open_counted(*arguments: Any) -> _Counted:
        readers.append(_Counted(formats.open_reader(*arguments)))
        return readers[-1]

    monkeypatch.setattr("hypha_data.prepare.open_reader", open_counted)
    prepare(source, tmp_path / "out")
    assert (readers[0].scans, readers[0].first) == rest
    for part in ("", "-test"):
        assert digests(tmp_path / f"out{part}") == digests(tmp_path / f"whole{part}")
        assert not (tmp_path / f"out{part}" / WORK).exists()
    kept = [path for path, inode in finished.items() if (tmp_path / "out" / path.name).stat().st_ino == inode]
    assert len(kept) >= (3 if what == "slices of 5" else 0)


def test_a_killed_process_is_continued(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.csv")
    prepare(source, tmp_path / "whole")
    child = os.fork()
    if child == 0:
        try:
            prepare(
                source,
                tmp_path / "out",
                on_progress=lambda what, n: os.kill(os.getpid(), 9) if "of 5" in what else None,
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    prepare(source, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_fault_leaves_the_work_of_an_interrupted_run(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.csv")
    prepare(source, tmp_path / "whole")
    prepare(source, tmp_path / "out")
    with pytest.raises(_Interrupted):
        prepare(source, tmp_path / "out", force=True, on_progress=stop_at("of 5", 1))
    with pytest.raises(DatasetError, match="slices already"):
        prepare(source, tmp_path / "out")
    assert (tmp_path / "out" / WORK).exists()
    prepare(source, tmp_path / "out", force=True)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_slices_that_were_moved_in_part_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, moved = write_table(tmp_path / "a.csv"), 0
    prepare(source, tmp_path / "whole")
    replace = Path.replace

    def interrupt(self: Path, target: Any) -> Path:
        nonlocal moved
        if self.name.startswith("slice-") and self.parent.parent.name == "out":
            moved += 1
            if moved == 3:
                raise _Interrupted
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(_Interrupted):
            prepare(source, tmp_path / "out")
    prepare(source, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5


def test_other_work_does_not_use_what_is_left(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.csv")
    with pytest.raises(_Interrupted):
        prepare(source, tmp_path / "out", on_progress=stop_at("slices of 5", 3))
    write_table(source, 2000)
    prepare(source, tmp_path / "out")
    prepare(source, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("what", ["checked", "converted", "slices of 5"])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, what: str) -> None:
    source = write_table(tmp_path / "a.csv")

    def change(done: str, _count: int) -> None:
        if what in done:
            with source.open("a") as file:
                file.write("1\n")

    with pytest.raises(DatasetError, match=r"a\.csv: changed while it was read; run the command again"):
        prepare(source, tmp_path / "out", on_progress=change)
    assert not (tmp_path / "out").exists()


def test_two_processes_do_not_prepare_one_dataset(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.csv")
    with pytest.raises(DatasetError, match="another hypha-data prepare writes this dataset"):
        prepare(source, tmp_path / "out", on_progress=lambda _what, _count: prepare(source, tmp_path / "out"))


def test_a_full_disk_is_named_and_the_work_continues(tmp_path: Path) -> None:
    source, out = write_table(tmp_path / "a.csv", 20_000), tmp_path / "disk"
    out.mkdir()
    with small_disk(tmp_path / "disk", 400_000):
        with pytest.raises(DatasetError, match="no space left on the disk; free some and run the same command again"):
            prepare(source, out / "d")
        assert [path.name for path in (out / "d").iterdir()] == [WORK]
        subprocess.run(["mount", "-o", "remount,size=20M", str(out)], check=True, timeout=60)
        prepare(source, out / "d")
        assert len(list((out / "d").glob("*.safetensors"))) == 5


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
        ("rows.dat", b'{ "text": "a"}\n', "a line *.jsonl; if it is of another format, name that by --format"),
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
