"""Generate text with transformers' continuous batching alone, as a script that somebody writes for one machine.

Arguments: model directory, rows at once, new tokens of a row, slices. Prints ``<seconds> <tokens>`` for all rows of the
slices, after a first batch that does not count. Imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

THREADS = 2
PAGE = 256
"""Tokens of a page of the cache."""


def main(model_dir: str, rows: str, new_tokens: str, *slices: str) -> None:
    """Generate a text for every row of the slices."""
    torch.set_num_threads(THREADS)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = [json.loads(line)["text"] for path in slices for line in Path(path).read_bytes().splitlines()]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    _generate(model, prompts[: int(rows)], int(rows), int(new_tokens))
    began = time.perf_counter()
    tokens = _generate(model, prompts, int(rows), int(new_tokens))
    print(time.perf_counter() - began, tokens, flush=True)


def _generate(model: Any, prompts: Sequence[list[int]], rows: int, new_tokens: int) -> int:
    """Generate greedily; return the number of tokens."""
    longest = max(map(len, prompts))
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=rows * -(-(longest + new_tokens) // PAGE) + 1,
            max_batch_tokens=rows * longest,
            max_requests_per_batch=rows,
        ),
    )
    return sum(len(each.generated_tokens) for each in outputs.values())


main(*sys.argv[1:])
