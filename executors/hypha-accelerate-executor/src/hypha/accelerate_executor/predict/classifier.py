"""Classification of rows: the probabilities of the classes, as the softmax of a model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hypha.accelerate_executor.data.batches import Arrays
from hypha.accelerate_executor.data.model_inputs import ModelInputs
from hypha.accelerate_executor.data.preprocess import Preprocessor
from hypha.accelerate_executor.data.value_ranges import value_limits
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.predict.computation import Result, longest_input
from hypha.accelerate_executor.predict.row_errors import RowError
from hypha.accelerate_executor.predict.settings import SCORES, InferenceTask
from hypha.accelerate_executor.predict.slices import SliceRows, join_rows

_TOKENS = "input_ids"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked row."""

    columns: frozenset[str]
    arrays: Arrays | None = None
    """Its values as a batch of one row; None where they are read with those of other rows."""


class Classifier:
    """A model with a classification head."""

    def __init__(
        self, task: InferenceTask, module: torch.nn.Module, device: torch.device, preprocessor: Preprocessor | None
    ) -> None:
        """Store the model.

        Args:
            task: its model's input names and columns are used.
            module: the model, in evaluation mode.
            device: where its inputs go.
            preprocessor: applied to batches first.
        """
        self.rows_at_once: int | None = task.batch_size
        self._module = module
        self._device = device
        self._preprocessor = preprocessor
        self._inputs = ModelInputs(task.model.type, task.model.input_names, module, labelled=False)
        self._raw = frozenset(preprocessor.columns if preprocessor else ())
        self._gives_scores = SCORES in task.columns
        self._vocabulary = value_limits(task.model.type, module).get("input_ids")
        self._longest = longest_input(module)
        takes_tokens = _TOKENS in self._inputs.columns and preprocessor is None
        self._checks_values = takes_tokens or (preprocessor is not None and preprocessor.is_text)
        self._dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)

    def prepare(self, rows: SliceRows, row: int) -> Prepared:
        """Return a row's columns, and its values where they have to be checked one by one."""
        present = rows.columns_of(row)
        columns = self._columns_of(frozenset(present))
        if rows.is_uniform and columns <= set(present) and not self._checks_values:
            return Prepared(columns)
        arrays = rows.arrays([row], columns, self._raw)
        self._check_text(arrays)
        self._check_tokens(arrays)
        return Prepared(columns, arrays)

    def _columns_of(self, present: frozenset[str]) -> frozenset[str]:
        """Return the columns that the model takes of a row with these."""
        wanted = frozenset(self._inputs.columns.values()) - self._raw
        required = frozenset(self._inputs.required) if self._preprocessor is None else frozenset[str]()
        return self._raw | required | (wanted & present)

    def compute(
        self, rows: SliceRows, slice_index: int, prepared: Sequence[tuple[int, Prepared]]
    ) -> list[Result | RowError]:
        """Return label, score and, if asked for, all scores of some rows."""
        columns = prepared[0][1].columns
        if any(each.columns != columns for _, each in prepared):
            raise DataError("rows have different columns")
        read = [each.arrays for _, each in prepared if each.arrays is not None]
        arrays = join_rows(read) if read else rows.arrays([number for number, _ in prepared], columns, self._raw)
        return self._results(self._probabilities(self._preprocessor(arrays) if self._preprocessor else arrays))

    def _probabilities(self, arrays: Arrays) -> NDArray[np.float32]:
        arguments = {
            name: value.to(self._dtype) if value.is_floating_point() else value
            for name, value in self._inputs(arrays, self._device).items()
        }
        with torch.inference_mode():
            output = self._module(**arguments)
            logits = output if isinstance(output, torch.Tensor) else _logits_of(output)
            samples = len(next(iter(arguments.values())))
            if logits.ndim != 2 or len(logits) != samples or logits.shape[1] < 2:
                raise DataError(
                    f"the model's logits have the shape {list(logits.shape)}; a classifier gives (rows, classes), "
                    "with two classes or more"
                )
            result: NDArray[np.float32] = torch.softmax(logits.float(), dim=-1).cpu().numpy()
        return result

    def _results(self, probabilities: NDArray[np.float32]) -> list[Result | RowError]:
        labels: list[int] = probabilities.argmax(axis=1).tolist()
        finite: list[bool] = np.logical_and.reduce(np.isfinite(probabilities), axis=1).tolist()
        best: list[float] = probabilities.max(axis=1).tolist()
        found = [{"label": label, "score": score} for label, score in zip(labels, best, strict=True)]
        if self._gives_scores:
            scores = probabilities.tolist()
            found = [values | {SCORES: row} for values, row in zip(found, scores, strict=True)]
        error = RowError("not-finite", "the model's logits are not finite")
        return [Result(values) if is_finite else error for values, is_finite in zip(found, finite, strict=True)]

    def _check_text(self, arrays: Arrays) -> None:
        """Refuse text that the preprocessor would cut off."""
        processor = self._preprocessor
        if processor is None or not processor.is_text or processor.longest is None:
            return
        try:
            tokens = processor.count_tokens(arrays)[0]
        except TypeError as error:
            raise RowError("wrong-type", str(error)) from None
        if tokens > processor.longest:
            raise RowError("too-long", f"{tokens} tokens; the model takes {processor.longest}")

    def _check_tokens(self, arrays: Arrays) -> None:
        """Refuse tokens that the model does not have: on a GPU they would end the process."""
        column = self._inputs.columns.get(_TOKENS, _TOKENS)
        values = arrays.get(column)
        if values is None or column in self._raw:
            return
        if self._longest is not None and values.ndim == 2 and values.shape[1] > self._longest:
            raise RowError("too-long", f"{values.shape[1]} tokens; the model takes {self._longest}")
        if self._vocabulary is not None and values.size and not 0 <= values.min() <= values.max() < self._vocabulary:
            wrong = int(values.max() if values.max() >= self._vocabulary else values.min())
            raise RowError(
                "wrong-value", f"column {column!r}: {wrong} is no token; they are 0 to {self._vocabulary - 1}"
            )


def _logits_of(output: Any) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise DataError("the model returns no logits; a classifier returns (rows, classes) as a tensor or as 'logits'")
    return logits
