"""Formats of a source: which one it has, and its reader."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from hypha_data.errors import DatasetError
from hypha_data.sources.hf_dataset import SUFFIXES, DataFiles, find_data_files, find_files
from hypha_data.sources.options import CSV, HF, IMAGES, PARQUET, TEXT, ReadOptions
from hypha_data.sources.plain_bytes import open_plain, plain_suffix
from hypha_data.sources.reader import SampleReader
from hypha_proto import file_kinds
from hypha_proto.datasets import JSONL, SAFETENSORS

_MAGIC: Final = re.compile(r"[*?\[]")
_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", re.ASCII)
_SUFFIXES: Final[Mapping[str, str]] = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".txt": TEXT,
    ".text": TEXT,
}
_STARTS: Final[Mapping[str, tuple[bytes, ...]]] = {
    CSV: (b"[", b"{", *file_kinds.UTF_16),  # the readers of CSV and text name an encoding
    JSONL: (b"{", b"["),
    PARQUET: (file_kinds.PARQUET,),
    TEXT: (b"[", b"{", *file_kinds.UTF_16, *file_kinds.PAGES),
}
"""Starts of a file that are those of a format; see `hypha_proto.file_kinds`."""
_TABLE_OPTIONS: Final = frozenset({"text", "label", "columns", "tokenizer", "length"})
_OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    SAFETENSORS: frozenset(),
    CSV: _TABLE_OPTIONS | {"encoding", "delimiter"},
    JSONL: _TABLE_OPTIONS,
    PARQUET: _TABLE_OPTIONS,
    IMAGES: frozenset({"size", "raw_pixels"}),
    TEXT: frozenset({"tokenizer", "length", "lines", "encoding"}),
    HF: _TABLE_OPTIONS | {"split"},
}


def find_sources(named: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files and folders that are named, with those that a pattern such as ``part-*.csv`` matches, sorted.

    Raises:
        DatasetError: a pattern matches nothing, or a file is named twice.
    """
    found: list[Path] = []
    for each in named:
        matching = [each]
        if not each.exists() and _MAGIC.search(str(each)):
            matching = [Path(path) for path in glob.glob(str(each), recursive=True)]
            if not matching:
                raise DatasetError(f"{each}: no file matches this pattern; correct it, or name the files")
        found += matching
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise DatasetError(f"{path}: is named twice, so its samples would be used twice; name it once")
        seen.add(path.resolve())
    return tuple(sorted(found))


def find_format(sources: Sequence[Path], given: str | None) -> str:
    """Return the one format of all sources: the given one, or that which `detect_format` finds.

    Raises:
        DatasetError: they differ, or several are named where the format is that of one.
    """
    form = given or detect_format(sources[0])
    for source in sources[1:]:
        if given is None and (other := detect_format(source)) != form:
            raise DatasetError(
                f"{sources[0]} is {form}, and {source} is {other}; prepare them one by one, or set --format"
            )
        if form in (IMAGES, HF):
            raise DatasetError(f"{sources[0]} and {source}: the format {form} is of one folder; name one")
    return form


def detect_format(source: Path) -> str:
    """Return the format of a source by its name, or by what a folder holds; safetensors if nothing tells.

    Raises:
        DatasetError: a folder holds nothing that is known, or there is no such source.
    """
    if not source.exists():
        if plain_suffix(source) in (*_SUFFIXES, ".safetensors") or not _HUB_NAME.fullmatch(str(source)):
            raise DatasetError(f"{source}: no such file or folder; name an existing one, or a dataset of the hub")
        return HF
    if not source.is_dir():
        return _SUFFIXES.get(plain_suffix(source), SAFETENSORS)
    if any((source / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return HF
    if find_files(source, ".txt", deep=False):
        return TEXT
    if any(find_files(folder, suffix, deep=False) for folder in (source, source / "data") for suffix in SUFFIXES):
        return HF
    if any(path.is_dir() for path in source.iterdir()):
        return IMAGES
    raise DatasetError(
        f"{source}: a folder of no known format; images need one folder a class, text *.txt, and datasets *.parquet; "
        "or name the format by --format"
    )


def check_content(source: Path, form: str) -> None:
    """Check that the first bytes of a file are not those of another kind; one of safetensors tells that itself.

    Raises:
        DatasetError: they are.
        OSError: the file cannot be read.
    """
    if form not in _STARTS or not source.is_file():
        return
    with source.open("rb") if form == PARQUET else open_plain(source) as file:
        head = file.read(file_kinds.HEAD)
    if head and (kind := file_kinds.name_kind(head, _STARTS[form])):
        raise DatasetError(f"{source}: not {form}: {kind}")


def makes_rows(form: str, options: ReadOptions) -> bool:
    """Return whether JSON rows are kept as they are, for batch inference, rather than made tensors."""
    return form == JSONL and options == ReadOptions()


def check_options(form: str, options: ReadOptions) -> None:
    """Check that the options concern the format.

    Raises:
        DatasetError: one does not.
    """
    default = ReadOptions()
    for option in fields(options):
        if getattr(options, option.name) != getattr(default, option.name) and option.name not in _OPTIONS[form]:
            having = ", ".join(each for each, known in _OPTIONS.items() if option.name in known)
            flag = option.name.replace("_", "-")
            raise DatasetError(
                f"--{flag} does not concern the format {form}, but {having}; leave it out, or set --format"
            )


def open_reader(sources: Sequence[Path], form: str, options: ReadOptions) -> SampleReader:
    """Return the reader of sources whose samples become tensors; of any format but safetensors.

    Raises:
        DatasetError: a source or an option cannot be used.
    """
    from hypha_data.sources.table import TableReader

    first = sources[0]
    if form == HF:
        return _open_files(find_data_files(str(first), options.split), options)
    if form == IMAGES:
        from hypha_data.sources.image_folder import ImageFolder

        if not first.is_dir():
            raise DatasetError(f"{first}: images need a folder with one folder a class")
        return ImageFolder(first, options)
    if form == TEXT:
        from hypha_data.sources.text_files import TextLines, TextReader

        texts = [text for source in sources for text in (find_files(source, ".txt") if source.is_dir() else [source])]
        if not texts:
            raise DatasetError(f"{first}: holds no *.txt; name a file, or a folder that does")
        if options.lines:
            return TableReader(TextLines(texts, options.encoding), replace(options, text="text"))
        return TextReader(texts, options)
    for source in sources:
        if source.is_dir():
            raise DatasetError(f"{source}: a folder; {form} needs files, such as {source}/*.{form}")
    return _open_files(DataFiles(tuple(sources)), options, form)


def _open_files(data: DataFiles, options: ReadOptions, form: str | None = None) -> SampleReader:
    from hypha_data.sources.csv_file import CsvFile
    from hypha_data.sources.jsonl_file import JsonlFiles
    from hypha_data.sources.table import JoinedRows, TableReader

    files = data.paths
    form = form or _SUFFIXES.get(plain_suffix(files[0]), PARQUET)
    if form == JSONL:
        return TableReader(JsonlFiles(files), options)
    if form == CSV:
        return TableReader(JoinedRows([CsvFile(path, options.encoding, options.delimiter) for path in files]), options)
    from hypha_data.sources.arrow_files import ArrowFile

    rows = JoinedRows([ArrowFile(path) for path in files], data.descriptions)
    return TableReader(rows, options, data.classes)
