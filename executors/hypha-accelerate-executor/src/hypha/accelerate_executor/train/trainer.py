"""One training step: forward, backward and optimizer step for a batch.

`data.model_inputs` maps a batch's tensors to arguments of the model; `data.microbatches` splits a batch over processes
and micro-batches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from hypha.accelerate_executor.data.batches import Batch
from hypha.accelerate_executor.data.microbatches import MicroBatch, split_batch
from hypha.accelerate_executor.data.model_inputs import ModelInputs, check_values
from hypha.accelerate_executor.data.samples import Arrays
from hypha.accelerate_executor.distributed.accelerator import Device
from hypha.accelerate_executor.distributed.process_group import translate_lost_process
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer, NotFiniteGradient

logger = logging.getLogger(__name__)

_WRAPPERS: Final = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
"""Parts of a parameter's name that wrappers of processes and compilers add."""


class Trainer:
    """A model and its optimizer.

    Attributes:
        micro_batch: largest number of samples that are computed at once; None means no limit.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: ModelInputs,
        optimizer: InnerOptimizer,
        device: Device,
        preprocess: Callable[[Arrays], Arrays] | None = None,
        limits: Mapping[str, int] | None = None,
        micro_batch: int | None = None,
    ) -> None:
        """Take a module placed on `device`; `inputs` maps batches to its arguments.

        Args:
            preprocess: applied to the columns of a batch first.
            limits: number of classes or tokens, by argument; labels and tokens are checked against it.
            micro_batch: see the class.
        """
        self.micro_batch = micro_batch
        self._limits = limits or {}
        self._module = module
        self._inputs = inputs
        self._optimizer = optimizer
        self._device = device
        self._preprocess = preprocess
        self._has_noted_unlabelled = False

    def split(self, batch: Batch, processes: int = 1) -> list[list[MicroBatch]]:
        """Split a batch into the model's arguments: for each process the micro-batches it computes.

        None of a batch without labels: there is nothing to learn from it.

        Raises:
            DataError: the batch lacks a tensor, or a label or token is out of range.
        """
        arguments = self.arguments(batch)
        shifted, ignored = self._inputs.shifted, self._inputs.ignored_label
        parts = split_batch(arguments, processes, self._device.accumulation, shifted, self.micro_batch, ignored)
        if not parts[0] and not self._has_noted_unlabelled:
            self._has_noted_unlabelled = True
            logger.warning("no sample of a batch has a label, and it is skipped, as others will be: %s", _place(batch))
        return parts

    def arguments(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a batch, on the CPU.

        Raises:
            DataError: the batch lacks a tensor, or a label or token is out of range.
        """
        arrays = batch.tensors if self._preprocess is None else self._preprocess(batch.tensors)
        arguments = self._inputs(arrays, torch.device("cpu"))
        check_values(arguments, self._limits, self._inputs.columns, batch)
        return arguments

    def step(self, batch: Batch) -> float | None:
        """Train on one batch in this process.

        Returns:
            The batch's mean loss, before the step; None if it has no labels.

        Raises:
            DataError: the batch lacks a tensor or does not fit the model, or the loss or a gradient is not finite.
        """
        [micro_batches] = self.split(batch)
        return self.compute(micro_batches, batch)

    def compute(self, micro_batches: Sequence[MicroBatch], batch: Batch | None = None) -> float | None:
        """Train on this process's part of a batch, together with the other processes.

        Args:
            micro_batches: the part; empty for all processes if the batch has no labels.
            batch: the whole batch, for errors; None if it is not known.

        Returns:
            The whole batch's mean loss, before the step; None if it has no labels.

        Raises:
            DataError: the batch does not fit the model, or the loss or a gradient is not finite.
            ProcessGroupError: another process has exited.
        """
        if not micro_batches:
            self._optimizer.skip_step()
            return None
        with translate_lost_process():
            value = self._gradients(micro_batches)
        if value - value != 0.0:
            raise DataError(
                f"the loss is {value}: the learning rate may be too high, or a slice contains NaN; {_place(batch)}"
            )
        try:
            self._optimizer.step(self._device.apply)
        except NotFiniteGradient as error:
            raise DataError(
                f"the gradient of {self._name_of(error.parameter)!r} is not finite, and the loss is {value:.6g}: "
                f"correct these rows, or lower the learning rate; {_place(batch)}"
            ) from None
        return value

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        found = next((name for name, each in self._module.named_parameters() if each is parameter), "?")
        return _WRAPPERS.sub("", found).removeprefix(".")

    def _gradients(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Compute the gradients of the whole batch; return its mean loss."""
        value = 0.0
        for number, micro_batch in enumerate(micro_batches, 1):
            with self._device.synchronised(self._module, number == len(micro_batches)):
                loss = self.loss(micro_batch.arguments)
                if micro_batch.weight != 1.0:
                    loss = loss * micro_batch.weight
                value += float(loss.detach())
                self._device.backward(loss)
        return self._device.total(value)

    def loss(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the mean loss of samples, given as arguments of the model.

        Raises:
            DataError: they do not fit the model.
        """
        place = self._device.torch_device
        arguments = {name: value.to(place) for name, value in given.items()}
        try:
            with translate_lost_process():
                return loss_of(self._module(**arguments))
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            shapes = {name: list(value.shape) for name, value in arguments.items()}
            raise DataError(f"the model cannot take a batch of {shapes}: {error}") from error


def _place(batch: Batch | None) -> str:
    return "the first process names the rows" if batch is None else batch.describe_rows()


def loss_of(output: object) -> torch.Tensor:
    """Return the loss of a model output: the output itself if scalar, its `loss`, or its entry ``"loss"``.

    Raises:
        TypeError: there is none.
    """
    if not isinstance(output, torch.Tensor):
        output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(output, torch.Tensor) or output.ndim != 0:
        raise TypeError(
            "the model returns no loss; a model of task 'torch' must return a scalar or an object with a loss"
        )
    return output
