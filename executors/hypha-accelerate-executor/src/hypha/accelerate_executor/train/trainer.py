"""One step of training: a batch goes in, a loss comes out, the parameters have moved.

Before it stands `data`, which makes batches; after it `loop`, which reports each. Where a batch's tensors go in the
model is decided in `inputs`; how a batch is divided over processes and micro-batches in `pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hypha.accelerate_executor.data.batches import Arrays, Batch
from hypha.accelerate_executor.data.microbatches import MicroBatch, split_batch
from hypha.accelerate_executor.data.model_inputs import ModelInputs
from hypha.accelerate_executor.distributed.accelerator import Device
from hypha.accelerate_executor.distributed.process_group import lost_team
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer


class Trainer:
    """A model and its optimiser."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: ModelInputs,
        optimizer: InnerOptimizer,
        device: Device,
        preprocess: Callable[[Arrays], Arrays] | None = None,
    ) -> None:
        """Take a module that was placed on `device`; `inputs` says how batches become its arguments.

        Args:
            preprocess: applied to the columns of a batch before that.
        """
        self._module = module
        self._inputs = inputs
        self._optimizer = optimizer
        self._device = device
        self._preprocess = preprocess

    def divide(self, batch: Batch, processes: int = 1) -> list[list[MicroBatch]]:
        """Make the model's arguments of a batch and divide them: for each process the micro-batches it computes.

        Raises:
            DataError: the batch lacks a tensor.
        """
        arrays = batch.tensors if self._preprocess is None else self._preprocess(batch.tensors)
        arguments = self._inputs(arrays, torch.device("cpu"))
        return split_batch(arguments, processes, self._device.accumulation, self._inputs.shifted)

    def step(self, batch: Batch) -> float:
        """Train on one batch, all of it in this process.

        Returns:
            The batch's mean loss, before the step.

        Raises:
            DataError: the batch lacks a tensor or does not fit the model, or the loss is not finite.
        """
        [pieces] = self.divide(batch)
        return self.compute(pieces)

    def compute(self, pieces: Sequence[MicroBatch]) -> float:
        """Train on this process's part of a batch, together with the other processes.

        Returns:
            The whole batch's mean loss, before the step.

        Raises:
            DataError: the batch does not fit the model, or the loss is not finite.
            TeamBroken: another process has ended.
        """
        with lost_team():
            value = self._gradients(pieces)
        if value - value != 0.0:
            raise DataError(f"the loss is {value}: the learning rate may be too high, or a slice holds no numbers")
        self._optimizer.step(self._device.apply)
        return value

    def _gradients(self, pieces: Sequence[MicroBatch]) -> float:
        """Compute the gradients of the whole batch; gives its mean loss."""
        value = 0.0
        for number, piece in enumerate(pieces, 1):
            with self._device.synchronised(self._module, number == len(pieces)):
                loss = self._loss(piece.arguments)
                if piece.weight != 1.0:
                    loss = loss * piece.weight
                value += float(loss.detach())
                self._device.backward(loss)
        return self._device.total(value)

    def _loss(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        place = self._device.torch_device
        arguments = {name: value.to(place) for name, value in given.items()}
        try:
            with lost_team():
                return loss_of(self._module(**arguments))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = {name: list(value.shape) for name, value in arguments.items()}
            raise DataError(f"the model cannot take a batch of {shapes!r:.300}: {str(error)[:300]}") from error


def loss_of(output: object) -> torch.Tensor:
    """Find the loss in what a model gave: itself a scalar, its `loss`, or its entry ``"loss"``.

    Raises:
        TypeError: there is none.
    """
    if not isinstance(output, torch.Tensor):
        output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(output, torch.Tensor) or output.ndim != 0:
        raise TypeError("the model gives no loss; a model of task 'torch' returns a scalar, or something with a loss")
    return output
