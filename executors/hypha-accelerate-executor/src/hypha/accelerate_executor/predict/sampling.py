"""Sampling of tokens by a random stream of each row, so that a row's text does not depend on its batch.

The Gumbel-max method: the token with the largest log probability plus Gumbel noise is a sample of the distribution.
The noise of a row comes from a generator that is seeded by (seed, slice, row) alone. A random number for the whole
batch would do neither, and the inverse of the cumulative distribution is sensitive to rounding in its long tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor, TopPLogitsWarper


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
