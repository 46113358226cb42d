"""Hugging Face datasets: a folder that ``save_to_disk`` wrote, or a folder or repository of data files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypha_data.errors import DatasetError
from hypha_data.sources.plain_bytes import COMPRESSED, is_compressed
from hypha_data.sources.reader import import_extra, read_object
from hypha_proto.texts import quote

SUFFIXES: Final = (".parquet", ".jsonl", ".csv")
_REMEDY: Final = "save the dataset again"
_SPLIT_NAMES: Final = re.compile(r"(?:^|[^a-z])(?:train|test|validation|valid|val|dev)(?:[^a-z]|$)")


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files of one split of a dataset."""

    paths: tuple[Path, ...]
    """Files with rows, which have one format."""
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the classes by column."""
    descriptions: tuple[Path, ...] = ()
    """Files that list those with rows, or name the classes."""


def find_data_files(place: str, split: str) -> DataFiles:
    """Return the files of one split of a dataset.

    Args:
        place: a folder, or the name of a repository of the hub, which is downloaded into the hub's cache.
        split: name of the split.

    Raises:
        DatasetError: there are none, or the dataset cannot be reached.
    """
    folder = Path(place)
    if not folder.is_dir():
        folder = _download(place)
    if (folder / "dataset_dict.json").is_file():
        names = read_object(folder / "dataset_dict.json", _REMEDY).get("splits")
        if not isinstance(names, list) or split not in names:
            raise DatasetError(f"{folder}: has no split {quote(split)}; there are {quote(names)}: name one by --split")
        folder = folder / split
    if (folder / "state.json").is_file():
        info = folder / "dataset_info.json"
        descriptions = (folder / "state.json", *([info] if info.is_file() else []))
        return DataFiles(tuple(_saved_files(folder)), _class_names(info), descriptions)
    return DataFiles(tuple(_split_files(folder, split)))


def _saved_files(folder: Path) -> Sequence[Path]:
    """Return the Arrow files that the state of a saved dataset lists."""
    listed = read_object(folder / "state.json", _REMEDY).get("_data_files")
    names = [each.get("filename") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DatasetError(f"{folder / 'state.json'}: lists no data files of its folder; {_REMEDY}")
    return [folder / name for name in names if isinstance(name, str)]


def _class_names(path: Path) -> Mapping[str, Sequence[str]]:
    features = read_object(path, _REMEDY).get("features") if path.is_file() else None
    found: dict[str, Sequence[str]] = {}
    for name, feature in features.items() if isinstance(features, dict) else ():
        names = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            found[name] = names
    return found


def find_files(folder: Path, suffix: str, *, deep: bool = True) -> list[Path]:
    """Return the files whose names have a suffix, also compressed ones; without hidden files, such as ``._a.csv``.

    Args:
        folder: where to look.
        suffix: of the format, such as ``.csv``.
        deep: whether folders in it are looked into.
    """
    patterns = _patterns(suffix)
    found = (path for pattern in patterns for path in (folder.rglob(pattern) if deep else folder.glob(pattern)))
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _patterns(suffix: str) -> list[str]:
    return [f"*{suffix}{packed}" for packed in ("", *(() if suffix == ".parquet" else COMPRESSED))]


def _split_files(folder: Path, split: str) -> Sequence[Path]:
    """Return the data files whose name or folder names the split, or the only one if it names no split."""
    named_split = re.compile(rf"(?:^|[^A-Za-z0-9_]){re.escape(split)}(?:[^A-Za-z0-9_]|$)")
    for suffix in SUFFIXES:
        files = find_files(folder, suffix)
        names = [_plain_name(path.relative_to(folder), suffix) for path in files]
        named = [path for path, name in zip(files, names, strict=True) if named_split.search(name)]
        folders = sorted({str(path.parent) for path in named})
        if len(folders) > 1:
            raise DatasetError(
                f"{folder}: the split {quote(split)} is in several folders: {', '.join(folders[:5])}; name one of them"
            )
        if named:
            return named
        if len(files) == 1 and not _SPLIT_NAMES.search(names[0].lower()):
            return files
        if files:
            shown = ", ".join(path.name for path in files[:5])
            raise DatasetError(f"{folder}: no file of the split {quote(split)} among {shown}; name one by --split")
    raise DatasetError(
        f"{folder}: holds no dataset of save_to_disk and no *{', *'.join(SUFFIXES)}; name another folder"
    )


def _plain_name(path: Path, suffix: str) -> str:
    return str(path.with_suffix("") if is_compressed(path) else path).removesuffix(suffix)


def _download(name: str) -> Path:
    hub = import_extra("huggingface_hub", "a dataset by its name")
    try:
        patterns = [pattern for suffix in SUFFIXES for pattern in _patterns(suffix)]
        return Path(hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's errors are OSError, those of names ValueError
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"{name}: neither a folder nor a dataset of the hub that can be reached: {quote(reason)}; download it and "
            "name its folder"
        ) from None
