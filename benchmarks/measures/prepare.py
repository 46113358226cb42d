"""`hypha-data prepare` against the library that reads the same file, in one process and in turns.

The reference reads all rows once and makes arrays of numbers, classes and texts of them, where the library has such
arrays; it writes nothing. Ours reads the source twice, writes and shuffles the samples, and computes their digests.
Where Hugging Face's `datasets` is installed, it reads each file too, as a stream: ``uv run --with datasets``.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from PIL import Image

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row
from hypha_data.prepare import prepare_dataset
from hypha_data.sources.options import ReadOptions

_WORDS: Final = ["good", "bad", "film", "seen", "it", "was", "the", "actor", "plot", "music", "boring", "great", "long"]
_LIBRARY: Final = "datasets"
_Case = tuple[str, str, ReadOptions, str, Callable[[Path], object]]
_TABLE: Final = ReadOptions(text="text", label="mood", columns=("stars", "price"))


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure each format in turns with its reference."""
    rows = _make_rows(min(run.size >> 10, 100_000))
    places = _write(run.folder, rows)
    cases: list[_Case] = [
        ("csv of text and numbers", "text.csv", _TABLE, "module csv and numpy", _read_csv),
        ("csv of numbers", "numbers.csv", ReadOptions(label="label"), "module csv and numpy", _read_numbers),
        ("csv of numbers", "numbers.csv", ReadOptions(label="label"), "pyarrow.csv", _read_numbers_by_arrow),
        ("jsonl as a table", "rows.jsonl", _TABLE, "json.loads a line", _read_json),
        ("jsonl as rows", "rows.jsonl", ReadOptions(), "json.loads a line", _read_json),
        ("parquet", "rows.parquet", _TABLE, "pyarrow.parquet to lists", _read_parquet),
        ("images", "images", ReadOptions(), "Pillow to float32", _read_images),
        ("text as rows of 128 bytes", "text.txt", ReadOptions(length=128), "read, numpy", _read_text),
        ("text, a sample a line", "text.txt", ReadOptions(lines=True), "read, split lines", _read_lines),
    ]
    if find_spec("datasets") is not None:
        cases += [(what, name, options, _LIBRARY, _read_by_datasets) for what, name, options, *_ in cases]
    try:
        return [
            _compare(run, f"prepare, {what}", places / name, options, reference, read)
            for what, name, options, reference, read in cases
        ]
    finally:
        shutil.rmtree(places)


def _compare(
    run: BenchmarkRun, what: str, source: Path, options: ReadOptions, reference: str, read: Callable[[Path], object]
) -> Row:
    out = source.with_name("out")
    pairs = []
    for _ in range(run.repeat):
        began = time.perf_counter()
        prepare_dataset(source, out, name="d", slices=None, seed=0, options=options)
        ended = time.perf_counter()
        read(source)
        pairs.append((ended - began, time.perf_counter() - ended))
        shutil.rmtree(out)
    ours, others = (statistics.median(each) * 1000 for each in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    return Row(what, "ms", ours, others, reference, ratio, "<= 2" if reference == _LIBRARY else "")


def _make_rows(count: int) -> list[dict[str, Any]]:
    random.seed(0)
    return [
        {
            "text": " ".join(random.choices(_WORDS, k=random.randint(8, 16))) + (', "ä"' if number % 50 == 0 else ""),
            "mood": random.choice(["happy", "sad"]),
            "stars": random.randint(1, 5),
            "price": round(random.random() * 100, 3),
        }
        for number in range(count)
    ]


def _write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    places = folder / "sources"
    places.mkdir()
    with (places / "text.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    numbers = np.random.default_rng(0).normal(size=(len(rows), 8)).tolist()
    with (places / "numbers.csv").open("w") as file:
        file.write(",".join(f"c{column}" for column in range(8)) + ",label\n")
        for number, row in enumerate(numbers):
            file.write(",".join(f"{value:.8f}" for value in row) + f",{number % 10}\n")
    (places / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (places / "text.txt").write_text("".join(f"{row['text']}\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), places / "rows.parquet")
    for number in range(max(8, len(rows) // 100)):
        place = places / "images" / f"class-{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.{'png' if number % 8 < 4 else 'jpg'}")
    return places


def _read_by_datasets(path: Path) -> object:
    from datasets import load_dataset  # not installed by default

    kinds = {".csv": "csv", ".jsonl": "json", ".parquet": "parquet", ".txt": "text", "": "imagefolder"}
    where = {"data_dir": str(path)} if path.is_dir() else {"data_files": str(path)}
    rows = load_dataset(kinds[path.suffix], split="train", streaming=True, **where)
    return [np.asarray(row["image"].convert("RGB"), np.float32) if "image" in row else row for row in rows]


def _read_csv(path: Path) -> object:
    with path.open(newline="") as file:
        texts, moods, stars, prices = zip(*list(csv.reader(file))[1:], strict=True)
    names = {name: number for number, name in enumerate(sorted(set(moods)))}
    encoded = np.array([text.encode() for text in texts])
    numbers = np.array([int(star) for star in stars]), np.array([float(price) for price in prices], np.float32)
    return encoded, np.array([names[mood] for mood in moods]), numbers


def _read_numbers(path: Path) -> object:
    with path.open(newline="") as file:
        columns = list(zip(*list(csv.reader(file))[1:], strict=True))
    return [np.array([float(cell) for cell in column], np.float32) for column in columns]


def _read_numbers_by_arrow(path: Path) -> object:
    return [column.to_numpy() for column in pyarrow.csv.read_csv(path).columns]


def _read_json(path: Path) -> object:
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


def _read_parquet(path: Path) -> object:
    return pyarrow.parquet.read_table(path).to_pydict()


def _read_images(path: Path) -> object:
    found = []
    for place in sorted(path.glob("*/*")):
        with Image.open(place) as image:
            found.append(np.asarray(image.convert("RGB"), np.float32) / 255)
    return np.stack(found)


def _read_text(path: Path) -> object:
    data = np.frombuffer(path.read_bytes(), np.uint8)
    return data[: len(data) // 128 * 128].reshape(-1, 128).astype(np.int16)


def _read_lines(path: Path) -> object:
    return np.array([line.encode() for line in path.read_text().splitlines()])
