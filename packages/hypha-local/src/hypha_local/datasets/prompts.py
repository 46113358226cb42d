"""Prompts for a language model of Python source: the first definition in files that it was not trained on."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from hypha_local.datasets.text import library_files, split

COUNT: Final = 48
MAX_BYTES: Final = 64
_STARTS: Final = ("def ", "class ", "    def ")


def write_prompts(out: Path, files: Sequence[Path] | None = None) -> int:
    """Write prompts as JSON lines with the columns ``prompt`` and ``source``; return their number."""
    root = Path(sysconfig.get_path("stdlib"))
    lines: list[str] = []
    for path in split(library_files() if files is None else files)[1]:
        prompt = next(_definitions(path), None)
        if prompt is not None and len(lines) < COUNT:
            source = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
            lines.append(json.dumps({"prompt": prompt, "source": source}))
    out.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def _definitions(path: Path) -> Iterator[str]:
    """Yield the beginnings of definitions up to their parameters, if they are ASCII and short."""
    for line in path.read_bytes().splitlines():
        text, bracket, _ = line.decode(errors="replace").partition("(")
        if bracket and text.startswith(_STARTS) and text.isascii() and len(text) < MAX_BYTES:
            yield text + bracket
