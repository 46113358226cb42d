"""Which files of a folder or repository belong to a model or a preprocessor.

The same rule holds for submission, downloads, executors, updates and results. Like the libraries that load models, it
looks only at names in the root. Weights are `WEIGHTS`, otherwise the files that `INDEX` names; other safetensors files
are copies in another format or precision, adapters, or states of an optimizer. Configuration, chat templates, and the
files of tokenizers and processors belong to a model. Hidden files, adapters, subfolders and code do not: a job names
them in `filenames`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.texts import quote

WEIGHTS: Final = "model.safetensors"
"""File of all weights."""
INDEX: Final = "model.safetensors.index.json"
"""Index that names the file of each tensor, if there are several files."""
CONFIG: Final = "config.json"
"""Configuration of the model: its architecture and sizes."""
ADAPTER: Final = "adapter_config.json"
"""Configuration of an adapter, which changes another model."""
INDEX_LIMIT: Final = 16 << 20
"""Maximum size of an index in bytes."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.+-]*")
"""Names that libraries write: no hidden files, and no copies such as ``config (1).json``."""
_SUFFIXES: Final = frozenset(
    {".json", ".jinja", ".txt", ".model", ".spm", ".tiktoken", ".bpe", ".codes", ".tokenizer", ".vocab"}
)
"""Suffixes of configurations, chat templates, vocabularies and merges, for every tokenizer in transformers 5.23."""
_OTHERS: Final = re.compile(
    r"adapter_\w+\.json|.*\.index\.json|(train|eval|all|test|predict)_results\.json|trainer_state\.json"
    r"|(readme|license|notice|requirements)\w*\.txt",
    re.IGNORECASE,
)
"""Names with such a suffix that belong to adapters, other weights, training runs or documentation."""


def list_weights(names: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the names of a model's weight files.

    Args:
        names: paths of the files, relative to the root.
        read: returns the content of a file in the root, at most `INDEX_LIMIT` bytes and one; called for `INDEX` only.

    Raises:
        TensorFileError: there are none, or the index is malformed or names a file that is missing.
    """
    present = set(names)
    if WEIGHTS in present:
        return [WEIGHTS]
    if INDEX not in present:
        raise TensorFileError(_missing_weights(present))
    named = _indexed_files(read(INDEX))
    if lacking := [name for name in named if name not in present]:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise TensorFileError(f"{lacking[0]}{more} is missing, which {INDEX} names: fetch it again")
    return named


def list_companions(names: Iterable[str]) -> list[str]:
    """Return the names of configuration, chat templates, tokenizer and processor; alone these are a preprocessor."""
    return sorted({name for name in names if _is_companion(name)})


def list_model(names: Iterable[str], read: Callable[[str], bytes], wanted: Iterable[str] = ()) -> list[str]:
    """Return the names of all files of a model.

    Args:
        names: as of `list_weights`.
        read: as of `list_weights`.
        wanted: those of `names` that a job names; they must be a whole model, and are used with what else they are.

    Raises:
        TensorFileError: as `list_weights`; or there is no `CONFIG`, or an adapter of another model and no model.
    """
    wanted = frozenset(wanted)
    present = wanted or frozenset(names)
    if ADAPTER in present and (wanted or not {WEIGHTS, INDEX} & present):
        raise TensorFileError(f"{ADAPTER} is that of an adapter: save the model that merge_and_unload makes of it")
    if CONFIG not in present:
        raise TensorFileError(f"there is no {CONFIG}, which says what the model is: save_pretrained writes it")
    weights = list_weights(present, read)
    index = [INDEX] if weights != [WEIGHTS] else []
    return sorted({*weights, *index, *list_companions(present), *wanted})


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, without those of its subfolders.

    Raises:
        OSError: it cannot be read.
    """
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def weights_of(folder: Path) -> list[Path]:
    """Return the weight files of a model in a folder.

    Raises:
        TensorFileError: see `list_weights`.
        OSError: the folder or its index cannot be read.
    """
    try:
        return [folder / name for name in list_weights(names_in(folder), reader_of(folder))]
    except TensorFileError as error:
        raise TensorFileError(f"{folder.name}: {error}") from None


def reader_of(folder: Path) -> Callable[[str], bytes]:
    """Return what `list_weights` reads an index of a folder with."""

    def read(name: str) -> bytes:
        with (folder / name).open("rb") as file:
            return file.read(INDEX_LIMIT + 1)

    return read


def _is_companion(name: str) -> bool:
    is_known = PurePosixPath(name).suffix.lower() in _SUFFIXES or re.fullmatch(r"tokenizer\.model\.v\d\w*", name)
    return bool(_NAME.fullmatch(name) and is_known and not _OTHERS.fullmatch(name))


def _missing_weights(present: set[str]) -> str:
    others = sorted(name for name in present if name.endswith(".safetensors") and _NAME.fullmatch(name))
    text = f"there is neither {WEIGHTS} nor {INDEX}"
    if len(others) == 1:
        return f"{text}: rename {others[0]} to {WEIGHTS} if these are the weights"
    pickled = next((name for name in sorted(present) if name.endswith((".bin", ".pt", ".pth", ".ckpt"))), None)
    if pickled is not None:
        return f"{text}, but {pickled}: pickled files are not loaded; save the model with save_pretrained"
    return f"{text}; save_pretrained writes them, and `hypha-accelerate-executor create-model` creates a model"


def _indexed_files(text: bytes) -> list[str]:
    if len(text) > INDEX_LIMIT:
        raise TensorFileError(f"{INDEX} is longer than {INDEX_LIMIT} bytes")
    try:
        named = sorted(set(parse_json(text)["weight_map"].values()))
    except (DecodeError, KeyError, TypeError, AttributeError):
        raise TensorFileError(f"{INDEX} is not an index with a weight_map of tensor to file name") from None
    for name in named:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.endswith(".safetensors"):
            raise TensorFileError(f"{INDEX} names the file {quote(name)}, no safetensors file beside it")
    if not named:
        raise TensorFileError(f"{INDEX} names no file")
    return named
