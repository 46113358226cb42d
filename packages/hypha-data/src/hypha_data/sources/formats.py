"""Formats of a source: which one it has, and its reader. Called by `hypha_data.prepare`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from hypha_data.errors import DatasetError
from hypha_data.sources.hf_dataset import DataFiles, find_data_files
from hypha_data.sources.options import CSV, HF, IMAGES, PARQUET, TEXT, ReadOptions
from hypha_data.sources.reader import SampleReader
from hypha_proto import file_kinds
from hypha_proto.datasets import JSONL, SAFETENSORS

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


def detect_format(source: Path) -> str:
    """Return the format of a source by its name, or by what a folder holds; safetensors if nothing tells.

    Raises:
        DatasetError: a folder holds nothing that is known, or there is no such source.
    """
    if not source.exists():
        if source.suffix.lower() in (*_SUFFIXES, ".safetensors") or not _HUB_NAME.fullmatch(str(source)):
            raise DatasetError(f"{source}: no such file or folder; name an existing one, or a dataset of the hub")
        return HF
    if not source.is_dir():
        return _SUFFIXES.get(source.suffix.lower(), SAFETENSORS)
    if any((source / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return HF
    if any(source.glob("*.txt")):
        return TEXT
    if any(next(source.glob(pattern), None) for pattern in ("*.parquet", "data/*.parquet", "*.jsonl", "*.csv")):
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
    with source.open("rb") as file:
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


def open_reader(source: Path, form: str, options: ReadOptions) -> SampleReader:
    """Return the reader of a source whose samples become tensors; of any format but safetensors.

    Raises:
        DatasetError: the source or an option cannot be used.
    """
    from hypha_data.sources.table import TableReader

    if form == HF:
        return _open_files(find_data_files(str(source), options.split), options)
    if form == IMAGES:
        from hypha_data.sources.image_folder import ImageFolder

        if not source.is_dir():
            raise DatasetError(f"{source}: images need a folder with one folder a class")
        return ImageFolder(source, options)
    if form == TEXT:
        from hypha_data.sources.text_files import TextLines, TextReader

        texts = sorted(path for path in source.rglob("*.txt") if path.is_file()) if source.is_dir() else [source]
        if not texts:
            raise DatasetError(f"{source}: holds no *.txt; name a file, or a folder that does")
        if options.lines:
            return TableReader(TextLines(texts, options.encoding), replace(options, text="text"))
        return TextReader(texts, options)
    if source.is_dir():
        raise DatasetError(f"{source}: a folder; {form} needs a file, or --format hf for a folder of several")
    return _open_files(DataFiles((source,)), options, form)


def _open_files(data: DataFiles, options: ReadOptions, form: str | None = None) -> SampleReader:
    from hypha_data.sources.csv_file import CsvFile
    from hypha_data.sources.jsonl_file import JsonlFile
    from hypha_data.sources.table import RowSource, TableReader

    files = data.paths
    form = form or _SUFFIXES.get(files[0].suffix, PARQUET)
    source: RowSource
    if form in (CSV, JSONL) and len(files) > 1:
        raise DatasetError(f"{files[0]} and {len(files) - 1} other {form} files; prepare them one by one, or join them")
    if form == CSV:
        source = CsvFile(files[0], options.encoding, options.delimiter)
    elif form == JSONL:
        source = JsonlFile(files[0])
    else:
        from hypha_data.sources.arrow_files import ArrowFiles

        source = ArrowFiles(files, data.classes, data.descriptions)
    return TableReader(source, options)
