"""Tokenizer of a model: a ``tokenizer.json``, from a folder or the hub. Needs the extra ``formats``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hypha_data.errors import DatasetError
from hypha_data.sources.reader import Arrays, SampleLayout, import_extra, read_object
from hypha_proto.texts import quote

_FILE: Final = "tokenizer.json"
_PAD_TOKENS: Final = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
MAX_LENGTH: Final = 1 << 20
"""Largest number of tokens of a row."""


class Tokenizer:
    """Converts texts to rows of token numbers.

    Attributes:
        length: tokens of a row.
    """

    def __init__(self, place: str, length: int | None) -> None:
        """Load a tokenizer.

        Args:
            place: a folder with a tokenizer.json, or a repository of the hub.
            length: tokens of a row; required.

        Raises:
            DatasetError: it cannot be loaded, or no length is given.
        """
        if length is None:
            raise DatasetError("--tokenizer needs --length: how many tokens a row has, at most what the model takes")
        if not 1 <= length <= MAX_LENGTH:
            raise DatasetError(f"--length {length}: 1 to {MAX_LENGTH} tokens")
        self.length = length
        library = import_extra("tokenizers", "--tokenizer")
        self._path = path = _find(place)
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
            raise DatasetError(
                f"--tokenizer {place}: {path.name} cannot be used: {quote(str(error))}; save it again with "
                "save_pretrained of a fast tokenizer"
            ) from None
        self._pad = self._padding()
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files that decide the token numbers."""
        return (self._path, self._config) if self._config.is_file() else (self._path,)

    @property
    def _config(self) -> Path:
        return self._path.with_name("tokenizer_config.json")

    def _padding(self) -> int:
        """Return the number of the token that fills rows: the tokenizer's own, or 0, which the mask covers."""
        given = self._tokenizer.padding
        if given:
            return int(given["pad_id"])
        found = self._pad_token()
        named = found.get("content") if isinstance(found, dict) else found
        for token in (named, *_PAD_TOKENS):
            number = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
            if number is not None:
                return int(number)
        return 0

    def _pad_token(self) -> Any:
        if not self._config.is_file():
            return None
        return read_object(self._config, "save the tokenizer again").get("pad_token")

    def tensors(self) -> dict[str, SampleLayout]:
        """Return the tensors of a sample."""
        return {
            "input_ids": SampleLayout(dtype="I32", shape=(self.length,)),
            "attention_mask": SampleLayout(dtype="U8", shape=(self.length,)),
        }

    def encode(self, texts: Sequence[str]) -> Arrays:
        """Return token numbers and mask of each text, cut off and padded to the length."""
        self._tokenizer.enable_truncation(max_length=self.length)
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        return self.fill(rows)

    def tokens(self, text: str) -> list[int]:
        """Return all tokens of a text, without those that mark beginning and end."""
        self._tokenizer.no_truncation()
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def fill(self, rows: Sequence[Sequence[int]]) -> Arrays:
        """Return token numbers and mask of rows, padded to the length."""
        numbers = np.full((len(rows), self.length), self._pad, "<i4")
        mask = np.zeros((len(rows), self.length), np.uint8)
        for row, found in enumerate(rows):
            numbers[row, : len(found)] = found
            mask[row, : len(found)] = 1
        return {"input_ids": numbers, "attention_mask": mask}


def _find(place: str) -> Path:
    folder = Path(place)
    if folder.is_dir():
        if (folder / _FILE).is_file():
            return folder / _FILE
        raise DatasetError(f"--tokenizer {place}: holds no {_FILE}; save it there with save_pretrained of a tokenizer")
    if folder.is_file():
        return folder
    hub = import_extra("huggingface_hub", "--tokenizer by the name of a repository")
    try:
        return Path(hub.hf_hub_download(place, _FILE))
    except (OSError, ValueError) as error:  # the hub's errors are OSError, those of names ValueError
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"--tokenizer {place}: neither a folder nor a repository that can be reached: {quote(reason)}; name a "
            f"folder with a {_FILE}"
        ) from None
