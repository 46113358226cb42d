"""Slices of an inference task: the names that `predict.loop` uses for those of `data.samples`."""

from __future__ import annotations

from hypha.accelerate_executor.data.samples import Samples as SliceRows
from hypha.accelerate_executor.data.samples import open_samples as open_slice

__all__ = ["SliceRows", "open_slice"]
