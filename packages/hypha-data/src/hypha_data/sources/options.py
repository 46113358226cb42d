"""Names of the formats of a source, and the options of reading it; apart, since the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypha_proto.datasets import JSONL, SAFETENSORS

CSV: Final = "csv"
PARQUET: Final = "parquet"
IMAGES: Final = "images"
TEXT: Final = "text"
HF: Final = "hf"
FORMATS: Final = (SAFETENSORS, CSV, JSONL, PARQUET, IMAGES, TEXT, HF)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a source; what does not concern its format is refused."""

    text: str | None = None
    """Column of the text."""
    label: str | None = None
    """Column of the label."""
    columns: tuple[str, ...] = ()
    """Further columns to keep."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or repository of the hub."""
    length: int | None = None
    """Tokens of a row with a tokenizer, else bytes."""
    lines: bool = False
    """Text files: each line is a sample."""
    size: tuple[int, int] | None = None
    """Height and width of images."""
    raw_pixels: bool = False
    """Keep pixels as bytes, for the image preprocessor of a job."""
    encoding: str = "utf-8"
    """Encoding of csv and text files."""
    delimiter: str | None = None
    """Character between the cells of a csv file."""
    split: str = "train"
    """Part of an hf dataset."""
