"""Tokens and labels of JSON lines for a causal language model: what is learnt is a completion, after a prompt if any.

A row's tokens are those of its prompt, as inference has them, then those of the completion and the token that ends a
text. The labels of the prompt and of padding are ignored by the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hypha.accelerate_executor.data.model_inputs import IGNORED_LABEL, longest_input
from hypha.accelerate_executor.data.preprocess import encode_prompt, fill_template, set_padding
from hypha.accelerate_executor.data.samples import JSON_ROWS, Arrays, JsonRow
from hypha.accelerate_executor.errors import DataError, JobError, RowError
from hypha_proto.job_spec import TextRows
from hypha_proto.prompt_template import columns_of

if TYPE_CHECKING:
    import torch


class RowTokenizer:
    """Turns rows of a batch into inputs of a causal language model."""

    def __init__(self, tokenizer: Any, rows: TextRows, module: torch.nn.Module) -> None:
        """Take a tokenizer of transformers.

        Args:
            tokenizer: of the model.
            rows: templates of prompt and completion.
            module: the model; its longest input bounds the tokens of a row.

        Raises:
            JobError: a template is malformed.
        """
        try:
            for template in filter(None, (rows.prompt, rows.completion)):
                columns_of(template)
        except ValueError as error:
            raise JobError(f"--job: settings.rows: {error}") from None
        self._prompt, self._completion = rows.prompt, rows.completion
        self._tokenizer = tokenizer
        self._is_chat = rows.chat_template and bool(getattr(tokenizer, "chat_template", None))
        self._end = tokenizer.eos_token_id
        self._padding = set_padding(tokenizer, module) or 0
        self._longest = longest_input(module)

    def __call__(self, arrays: Arrays) -> Arrays:
        """Return ``input_ids``, ``attention_mask`` and ``labels`` of the rows, int64 of shape (rows, longest row).

        Raises:
            DataError: the slice holds tensors, or a row lacks a column that a template names.
        """
        if JSON_ROWS not in arrays:
            raise DataError(f"a slice holds tensors, {sorted(arrays)}, and no JSON lines: leave rows out of the job")
        rows = [self._tokens(row) for row in arrays[JSON_ROWS]]
        shape = len(rows), max(len(tokens) for _, tokens in rows)
        made = {
            "input_ids": np.full(shape, self._padding, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "labels": np.full(shape, IGNORED_LABEL, np.int64),
        }
        for number, (begin, tokens) in enumerate(rows):
            made["input_ids"][number, : len(tokens)] = tokens
            made["attention_mask"][number, : len(tokens)] = 1
            made["labels"][number, begin : len(tokens)] = tokens[begin:]
        return made

    def _tokens(self, row: JsonRow) -> tuple[int, list[int]]:
        """Return the number of tokens of a row's prompt, and all its tokens, cut off where the model takes no more."""
        try:
            prompt = None if self._prompt is None else fill_template(self._prompt, row.value)
            text = fill_template(self._completion, row.value)
        except RowError as error:
            raise DataError(f"{row.place}: {error.detail}") from None
        before = [] if prompt is None else encode_prompt(self._tokenizer, prompt, is_chat=self._is_chat)
        learnt = list(self._tokenizer(text, add_special_tokens=prompt is None)["input_ids"])
        if self._end is not None and learnt[-1:] != [self._end]:
            learnt.append(self._end)
        if not before and not learnt:
            raise DataError(f"{row.place}: its text is empty")
        return len(before), [*before, *learnt][: self._longest]
