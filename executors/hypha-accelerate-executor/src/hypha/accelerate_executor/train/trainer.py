"""One training step: forward, backward and optimizer step for a batch.

Called by `diloco.loop` with batches of `data.batches`. `data.model_inputs` maps a batch's tensors to arguments of the
model; `data.microbatches` splits a batch over processes and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hypha.accelerate_executor.data.batches import Arrays, Batch
from hypha.accelerate_executor.data.microbatches import MicroBatch, split_batch
from hypha.accelerate_executor.data.model_inputs import ModelInputs
from hypha.accelerate_executor.data.value_ranges import check_values
from hypha.accelerate_executor.distributed.accelerator import Device
from hypha.accelerate_executor.distributed.process_group import translate_lost_process
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer


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

    def split(self, batch: Batch, processes: int = 1) -> list[list[MicroBatch]]:
        """Split a batch into the model's arguments: for each process the micro-batches it computes.

        Raises:
            DataError: the batch lacks a tensor, or a label or token is out of range.
        """
        arguments = self.arguments(batch)
        return split_batch(arguments, processes, self._device.accumulation, self._inputs.shifted, self.micro_batch)

    def arguments(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a batch, on the CPU.

        Raises:
            DataError: the batch lacks a tensor, or a label or token is out of range.
        """
        arrays = batch.tensors if self._preprocess is None else self._preprocess(batch.tensors)
        arguments = self._inputs(arrays, torch.device("cpu"))
        check_values(arguments, self._limits, self._inputs.columns, batch)
        return arguments

    def step(self, batch: Batch) -> float:
        """Train on one batch in this process.

        Returns:
            The batch's mean loss, before the step.

        Raises:
            DataError: the batch lacks a tensor or does not fit the model, or the loss is not finite.
        """
        [micro_batches] = self.split(batch)
        return self.compute(micro_batches)

    def compute(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Train on this process's part of a batch, together with the other processes.

        Returns:
            The whole batch's mean loss, before the step.

        Raises:
            DataError: the batch does not fit the model, or the loss is not finite.
            ProcessGroupError: another process has exited.
        """
        with translate_lost_process():
            value = self._gradients(micro_batches)
        if value - value != 0.0:
            raise DataError(f"the loss is {value}: the learning rate may be too high, or a slice contains NaN")
        self._optimizer.step(self._device.apply)
        return value

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
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = {name: list(value.shape) for name, value in arguments.items()}
            raise DataError(f"the model cannot take a batch of {shapes!r:.300}: {str(error)[:300]}") from error


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
