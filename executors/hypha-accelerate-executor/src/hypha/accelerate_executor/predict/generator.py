"""Generation of text: prompts from a template, tokens by a causal language model.

Rows are padded on the left and generated together by transformers' `generate`, or by its continuous batching
(`generate_batch`), where the next row takes the place of one that has ended. Continuous batching can neither sample
by row nor stop at strings, and without FlashAttention it computes the attention between all rows of a batch: on a CPU
it took 1.4 times as long as padded batches of equal lengths. Which of them computes is not left to what is installed.

Tokens are sampled by the Gumbel-max method: the token with the largest log probability plus Gumbel noise is a sample of
the distribution. The noise of a row comes from a generator that is seeded by (seed, slice, row) alone, so that its text
does not depend on its batch. A random number for the whole batch would do neither, and the inverse of the cumulative
distribution is sensitive to rounding in its long tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TopPLogitsWarper,
)

from hypha.accelerate_executor.data.model_inputs import longest_input, vocabulary_size
from hypha.accelerate_executor.data.preprocess import encode_prompt, fill_template, set_padding
from hypha.accelerate_executor.data.samples import Samples
from hypha.accelerate_executor.errors import RowError
from hypha.accelerate_executor.options import CONTINUOUS, PADDED
from hypha.accelerate_executor.predict.computation import Result, Sharing, find_sharing
from hypha.accelerate_executor.predict.settings import InferenceTask


class GumbelSampler(LogitsProcessor):
    """Adds each row's noise to its scores; the largest score is then a sample."""

    def __init__(self, streams: Sequence[np.random.Generator], temperature: float, top_p: float) -> None:
        """Store the generators of the rows of a batch.

        Args:
            streams: one generator for each row, which has produced nothing yet.
            temperature: divides the scores; above 0.
            top_p: samples from the most probable tokens that together have this probability.
        """
        self._streams = streams
        self._temperature = temperature
        self._warper = TopPLogitsWarper(top_p) if top_p < 1 else None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores of the next token of each row, with noise."""
        scaled = scores.float() / self._temperature
        if self._warper is not None:
            scaled = self._warper(input_ids, scaled)
        vocabulary = scores.shape[-1]
        waits = np.stack([stream.standard_exponential(vocabulary, dtype=np.float32) for stream in self._streams])
        noise = -torch.from_numpy(waits).clamp_(min=torch.finfo(torch.float32).tiny).log_()
        return scaled + noise.to(scaled.device)  # type: ignore[return-value]


def row_stream(seed: int, slice_index: int, row: int) -> np.random.Generator:
    """Return the random stream of a row."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, slice_index, row])))


_PAGE: Final = 256
"""Tokens of a page of the cache of continuous batching."""
_PREFILL: Final = 4096
"""Largest number of tokens that continuous batching computes at once."""

_BIAS: Final = 1e9
"""Makes one token the most likely one."""
_LENGTHS: Final = (3, 19, 19)
"""Tokens of the prompts that are compared alone and together."""
_KEPT: Final = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_eos_token_id")
"""Generation settings of a model that say which tokens a text never has, and which its last one is."""

STOP: Final = "stop"
LENGTH: Final = "length"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt."""

    text: str
    tokens: tuple[int, ...]
    alike: int | None = None
    """Number of tokens, where only prompts of equal length share a batch."""


class Generator:
    """A causal language model with its tokenizer.

    Attributes:
        rows_at_once: most rows that `compute` takes; None means that it divides them itself.
    """

    def __init__(
        self, task: InferenceTask, module: Any, tokenizer: Any, device: torch.device, engine: str = PADDED
    ) -> None:
        """Prepare the generation settings, and find which rows the model can compute together.

        Of the model's own generation settings those are used that say which tokens end a text, or are excluded.

        Args:
            task: its template and sampling are used.
            module: the model, in evaluation mode.
            tokenizer: its tokenizer.
            device: where its inputs go.
            engine: one of `hypha.accelerate_executor.options.ENGINES`.
        """
        settings = task.inference
        self._sampling = settings
        self._module, self._tokenizer, self._device = module, tokenizer, device
        self._ends = _end_tokens(module, tokenizer)
        self._padding = set_padding(tokenizer, module) or 0
        self._longest = longest_input(module)
        self._vocabulary = vocabulary_size(module)
        self._has_chat_template = settings.chat_template and bool(getattr(tokenizer, "chat_template", None))
        kept = {name: getattr(module.generation_config, name, None) for name in _KEPT}
        module.generation_config = self._settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=self._padding,
            use_cache=True,
            **kept,
        )
        self._is_continuous = engine == CONTINUOUS and not settings.temperature and not settings.stop
        self.rows_at_once = None if self._is_continuous else settings.batch_size
        self._sharing = Sharing.ANY
        if not self._is_continuous and settings.batch_size > 1:
            self._sharing = find_sharing(self._first_logits, self._random_prompts(), len)
        if self._sharing is Sharing.NONE:
            self.rows_at_once = 1

    def prepare(self, rows: Samples, row: int) -> Prompt:
        """Return the prompt of a row."""
        text = fill_template(self._sampling.prompt or "", lambda column: rows.value(row, column))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowError("wrong-value", "the prompt holds half of a surrogate pair, which is no text") from None
        tokens = encode_prompt(self._tokenizer, text, is_chat=self._has_chat_template)
        if not tokens:
            raise RowError("wrong-value", "the prompt is empty")
        longest, new = self._longest, self._sampling.max_new_tokens
        wanted = len(tokens) + new
        if longest is not None and wanted > longest:
            raise RowError(
                "too-long",
                f"{len(tokens)} tokens of the prompt and max_new_tokens = {new} make {wanted}; "
                f"the model takes {longest}",
            )
        if self._vocabulary is not None and max(tokens) >= self._vocabulary:
            raise RowError("wrong-value", f"token {max(tokens)} of the prompt; the model has {self._vocabulary}")
        return Prompt(text, tuple(tokens), None if self._sharing is Sharing.ANY else len(tokens))

    def compute(self, rows: Samples, slice_index: int, prepared: Sequence[tuple[int, Prompt]]) -> list[Result]:
        """Generate the texts of some rows."""
        prompts = [prompt for _, prompt in prepared]
        if self._is_continuous:
            generated = self._generate_continuously(prompts)
        else:
            generated = self._generate_padded(prompts, slice_index, [number for number, _ in prepared])
        return [self._result(prompt, tokens) for prompt, tokens in zip(prompts, generated, strict=True)]

    def _generate_padded(
        self, prompts: Sequence[Prompt], slice_index: int, numbers: Sequence[int]
    ) -> list[Sequence[int]]:
        sampling = self._sampling
        inputs = self._padded([prompt.tokens for prompt in prompts])
        width = inputs["input_ids"].shape[1]
        processors = LogitsProcessorList()
        if sampling.temperature:
            streams = [row_stream(sampling.seed, slice_index, number) for number in numbers]
            processors.append(GumbelSampler(streams, sampling.temperature, sampling.top_p))
        stops = _StopStrings(self._tokenizer, sampling.stop, width) if sampling.stop else None
        with torch.inference_mode():
            output = self._module.generate(
                **inputs,
                generation_config=self._settings,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([stops] if stops else []),
            )
        lines: list[list[int]] = output[:, width:].tolist()
        return [self._until_end(line, stops.length(number) if stops else None) for number, line in enumerate(lines)]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return tokens and mask of prompts, padded on the left."""
        width = max(map(len, prompts))
        inputs = torch.full((len(prompts), width), self._padding, dtype=torch.long)
        mask = torch.zeros_like(inputs)
        for line, tokens in enumerate(prompts):
            inputs[line, width - len(tokens) :] = torch.tensor(tokens)
            mask[line, width - len(tokens) :] = 1
        return {"input_ids": inputs.to(self._device), "attention_mask": mask.to(self._device)}

    def _random_prompts(self) -> list[list[int]]:
        """Return prompts of random tokens, of different lengths that the model takes."""
        random = np.random.default_rng(0)
        most = max(1, (self._longest or max(_LENGTHS) + 2) - 2)
        tokens = [token for token in range(self._vocabulary or 1) if token != self._padding] or [0]
        return [random.choice(tokens, size=min(length, most)).tolist() for length in _LENGTHS]

    def _first_logits(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits of the first two tokens, (rows, 2, vocabulary), of which the first is the same for all."""
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=self._padding,
            sequence_bias=[[[0 if self._padding else 1], _BIAS]],
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode():
            output = self._module.generate(**self._padded(prompts), generation_config=settings)
        return torch.stack(output.logits, dim=1)

    def _generate_continuously(self, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        rows = min(self._sampling.batch_size, len(prompts))
        longest = max(len(prompt.tokens) for prompt in prompts)
        settings = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=rows * -(-(longest + self._sampling.max_new_tokens) // _PAGE) + 1,  # by default all free memory
            max_batch_tokens=max(rows, min(_PREFILL, sum(len(prompt.tokens) for prompt in prompts))),
            max_requests_per_batch=rows,
        )
        outputs = self._module.generate_batch(
            [list(prompt.tokens) for prompt in prompts],
            generation_config=self._settings,
            continuous_batching_config=settings,
        )
        found = list(outputs.values())
        failed = next((each.error for each in found if each.error), None)
        if failed is not None or len(found) != len(prompts):
            raise RuntimeError(f"continuous batching failed: {failed or 'it returned too few rows'}")
        return [each.generated_tokens for each in found]

    def _until_end(self, tokens: list[int], stopped: int | None) -> list[int]:
        """Return the tokens up to the end of the row; padding follows where other rows of the batch are longer."""
        tokens = tokens[:stopped]
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        return tokens if end is None else tokens[: end + 1]

    def _result(self, prompt: Prompt, tokens: Sequence[int]) -> Result:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        cuts = [place for each in self._sampling.stop if (place := text.find(each)) >= 0]
        is_over = bool(cuts) or len(tokens) < self._sampling.max_new_tokens or tokens[-1] in self._ends
        values = {
            "prompt": prompt.text,
            "text": text[: min(cuts)] if cuts else text,
            "tokens": len(tokens),
            "finish": STOP if is_over else LENGTH,
        }
        return Result(values, len(tokens))


class _StopStrings(StoppingCriteria):
    """Ends the rows whose text contains one of some strings."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], begin: int) -> None:
        self._tokenizer, self._strings, self._begin = tokenizer, strings, begin
        self._lengths: dict[int, int] = {}
        # a token that is shown has at least one byte, and the first ones may be part of a character
        self._window = max(len(each.encode()) for each in strings) + 4

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        """Return for each row whether it has ended."""
        length = input_ids.shape[1] - self._begin
        tails = input_ids[:, max(self._begin, input_ids.shape[1] - self._window) :].tolist()
        for number, tail in enumerate(tails):
            if number not in self._lengths:
                text = self._tokenizer.decode(tail, skip_special_tokens=True)
                if any(each in text for each in self._strings):
                    self._lengths[number] = length
        ended = [number in self._lengths for number in range(len(tails))]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def length(self, number: int) -> int | None:
        """Return how many tokens a row has; None if no string ended it."""
        return self._lengths.get(number)


def _end_tokens(module: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text: those of the model's generation settings, else the tokenizer's."""
    ends = getattr(module.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
