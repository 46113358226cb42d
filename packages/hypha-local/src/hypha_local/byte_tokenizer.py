"""Tokenizer of a language model whose tokens are bytes, such as that of the task `text`.

Written by hand in the format of the library `tokenizers`: byte-level BPE without merges, where token n is byte n.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hypha_local.errors import ModelUnusableError
from hypha_proto.codec import parse_json

_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_BYTES: Final = 256


def add_byte_tokenizer(model: Path) -> bool:
    """Add a tokenizer to a model directory that has none; return whether it was added.

    Raises:
        ModelUnusableError: there is no tokenizer, and the model's tokens are not bytes.
    """
    if any((model / name).exists() for name in _FILES):
        return False
    config: Any = parse_json((model / "config.json").read_text())
    size = config.get("vocab_size") if isinstance(config, dict) else None
    if size != _BYTES:
        raise ModelUnusableError(
            f"--model: it has no tokenizer, and {size} tokens, which are not bytes; name a directory with a "
            "tokenizer.json, or the model of `hypha-local demo --task text`"
        )
    (model / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return True


def _tokenizer() -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {_symbol(byte): byte for byte in range(_BYTES)}, "merges": []},
    }


def _symbol(byte: int) -> str:
    """Return the printable character for a byte, as byte-level BPE of GPT-2 defines it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if byte in printable:
        return chr(byte)
    return chr(_BYTES + sum(other not in printable for other in range(byte)))
