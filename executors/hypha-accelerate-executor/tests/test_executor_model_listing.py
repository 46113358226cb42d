"""The files of a model, compared with the names that the installed transformers reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
import transformers.utils as names
from support.stored_model import write_model

from hypha_proto.model_listing import (
    ADAPTER,
    CONFIG,
    INDEX,
    WEIGHTS,
    list_companions,
    list_weights,
    names_in,
    reader_of,
)

LIBRARY = Path(transformers.__file__).parent
OTHERS = {INDEX, ADAPTER, "pytorch_model.bin.index.json"}
"""Names of files that belong to no tokenizer, processor or configuration."""


def names_in_library() -> set[str]:
    """Return the names of all tokenizers' files, and of the files of which a constant has the name."""
    found: set[str] = set()
    for path in LIBRARY.glob("models/*/tokenization_*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES = \{([^}]*)\}", path.read_text()):
            found |= set(re.findall(r':\s*"([^"]+)"', table))
    for path in (
        *LIBRARY.glob("tokenization_*.py"),
        *LIBRARY.glob("utils/*.py"),
        *LIBRARY.glob("integrations/**/*.py"),
    ):
        found |= set(re.findall(r'^[A-Z_]+_(?:FILE|NAME) = "(\w+\.\w+)"$', path.read_text(), re.MULTILINE))
    return {name for name in found if not name.endswith((".bin", ".safetensors", ".py", ".md"))} - OTHERS


def test_files_that_the_library_reads_belong_to_a_model() -> None:
    found = names_in_library()
    assert len(found) > 30
    assert {"vocab.json", "sentencepiece.bpe.model", "source.spm", "bpe.codes", "tekken.json", "chat_template.jinja",
            "preprocessor_config.json", "generation_config.json"} <= found  # fmt: skip
    assert found - set(list_companions(found)) == set()
    assert (names.SAFE_WEIGHTS_NAME, names.SAFE_WEIGHTS_INDEX_NAME, names.CONFIG_NAME) == (WEIGHTS, INDEX, CONFIG)


@pytest.mark.parametrize("is_whole", [False, True])
def test_weights_are_those_that_the_library_would_load(is_whole: bool, tmp_path: Path) -> None:
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    write_model(tmp_path, ["a"], ["b"])
    if is_whole:
        write_model(tmp_path)
    loaded, _ = _get_resolved_checkpoint_files(
        str(tmp_path), variant=None, gguf_file=None, use_safetensors=True, user_agent=None, is_remote_code=False
    )
    assert [Path(path).name for path in loaded or ()] == list_weights(names_in(tmp_path), reader_of(tmp_path))
