"""Finds how many samples of a batch this process can compute at once, with the memory that its lease has.

The job's batch stays one step of the optimizer whatever is found: `data.microbatches` splits it. On processors the
number is computed from the memory of the lease and the activations of one sample, and the memory is never filled to
find it. On a CUDA device, which the lease has to itself, it is doubled until the memory ends. Called once by
`diloco.loop`, with the first batch.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hypha.accelerate_executor.data.batches import Batch
from hypha.accelerate_executor.distributed.accelerator import Device
from hypha.accelerate_executor.errors import DataError, is_out_of_memory
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer
from hypha.accelerate_executor.train.trainer import Trainer

logger = logging.getLogger(__name__)

RESERVED_SHARE: Final = 0.1
"""Share of the lease's memory that is left for slices, files that are written, and what the allocator cannot use."""
ACTIVATION_FACTOR: Final = 2
"""Memory of a sample in forward and backward pass, compared with what the forward pass keeps for the backward pass."""
_MOMENTS: Final = 2
"""Tensors of AdamW's state for each parameter."""
_STATM: Final = Path("/proc/self/statm")
_MEBIBYTE: Final = 1 << 20

Arguments = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatchSizer:
    """Finds the largest number of samples that a model can train on at once; leaves model and optimizer unchanged."""

    trainer: Trainer
    """Computes the loss of `module`."""
    module: torch.nn.Module
    """The model on its device."""
    optimizer: InnerOptimizer
    """Its optimizer, which has not stepped."""
    device: Device
    """Where the model is; no other process computes it."""
    memory: int | None
    """Bytes of main memory that this process may have; None to fill the device's memory to find its end."""
    weight_copies: int = 0
    """Further copies of the weights that this process makes in main memory."""

    def find(self, batch: Batch, at_most: int) -> int:
        """Return how many samples to compute at once: from 1 to `at_most`.

        Moves the random generators: seed them again afterwards.

        Args:
            batch: the first batch.
            at_most: number of samples that is never exceeded.

        Raises:
            DataError: the batch lacks a tensor, or a label or token is out of range.
        """
        if at_most <= 1:
            return at_most
        arguments = self.trainer.arguments(batch)
        with _unchanged_buffers(self.module):
            least = self._least(arguments)
            if least is None or least >= at_most:
                return at_most  # if the model cannot take the batch, training says so
            if self.memory is None:
                return self._try_sizes(arguments, least, at_most)
            return self._compute_size(arguments, least, at_most, self.memory)

    def _least(self, arguments: Arguments) -> int | None:
        """Return the smallest number of samples that the model takes; None if neither one nor two.

        Batch normalization over single values, for example, cannot train on one sample.
        """
        for samples in (1, 2):
            try:
                with torch.no_grad():
                    self.trainer.loss(_rows(arguments, samples))
            except DataError as error:
                if _ran_out(error):
                    raise
                continue
            return samples
        return None

    def _compute_size(self, arguments: Arguments, least: int, at_most: int, memory: int) -> int:
        per_sample = ACTIVATION_FACTOR * self._saved_bytes(_rows(arguments, least)) // least
        free = int(memory * (1 - RESERVED_SHARE)) - resident_bytes() - self._bytes_to_come()
        found = fitting_samples(free, per_sample, least, at_most)
        if found * per_sample > free:
            logger.warning(
                "the lease has %d MiB of memory, of which %d MiB are left for activations, and %d samples need about "
                "%d MiB: request more",
                memory // _MEBIBYTE,
                max(0, free) // _MEBIBYTE,
                found,
                found * per_sample // _MEBIBYTE,
            )
        return found

    def _bytes_to_come(self) -> int:
        """Return how much more memory the process takes when it has trained: gradients, AdamW's state, copies."""
        trained = sum(parameter.nbytes for parameter in self.optimizer.parameters)
        whole = sum(parameter.nbytes for parameter in self.module.parameters())
        return (1 + _MOMENTS) * trained + self.weight_copies * whole

    def _saved_bytes(self, arguments: Arguments) -> int:
        """Return how much memory a forward pass keeps for the backward pass, apart from parameters and buffers."""
        own = (*self.module.parameters(), *self.module.buffers())
        known = {tensor.untyped_storage().data_ptr() for tensor in own if _has_storage(tensor)}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if _has_storage(tensor) and (address := tensor.untyped_storage().data_ptr()) not in known:
                saved[address] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.trainer.loss(arguments)
        del loss
        return sum(saved.values())

    def _try_sizes(self, arguments: Arguments, least: int, at_most: int) -> int:
        moments = [torch.empty_like(parameter) for parameter in self.optimizer.parameters for _ in range(_MOMENTS)]
        try:
            return double_while(lambda samples: self._fits(arguments, samples), least, at_most)
        finally:
            del moments
            torch.cuda.empty_cache()

    def _fits(self, arguments: Arguments, samples: int) -> bool:
        """Return whether memory suffices for the gradients of some samples."""
        ran_out = False
        try:
            with self.device.synchronised(self.module, True):
                self.device.backward(self.trainer.loss(_rows(arguments, samples)))
        except (DataError, MemoryError, RuntimeError) as error:
            if not _ran_out(error):
                raise
            ran_out = True
        finally:
            self.optimizer.adamw.zero_grad(set_to_none=True)
        if ran_out:
            torch.cuda.empty_cache()  # only now: the error's frames have held the tensors
        return not ran_out


def fitting_samples(free: int, per_sample: int, least: int, at_most: int) -> int:
    """Return how many samples fit into `free` bytes: `at_most`, else a power of two times `least`, at least `least`.

    Powers of two divide the usual batches evenly, and differ less from run to run than the memory that is free.
    """
    if free >= at_most * per_sample:
        return at_most
    found = least
    while 2 * found <= at_most and 2 * found * per_sample <= free:
        found *= 2
    return found


def double_while(fits: Callable[[int], bool], least: int, at_most: int) -> int:
    """Return the largest of `least`, twice, four times as much, …, and `at_most`, up to which every one fits.

    `least` is returned even if it does not fit: there is nothing smaller.
    """
    found, tried = least, least
    while fits(tried):
        found = tried
        if tried == at_most:
            break
        tried = min(2 * tried, at_most)
    return found


def resident_bytes() -> int:
    """Return the physical memory of this process; where there is no procfs, the largest amount so far."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore the module's buffers at the end, such as statistics of batch normalization."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before:
                    buffer.copy_(before[name])


def _rows(arguments: Arguments, samples: int) -> dict[str, torch.Tensor]:
    """Return some samples of a batch, from its beginning again where it has fewer."""
    return {name: value[torch.arange(samples) % len(value)] for name, value in arguments.items()}


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own; sparse ones, which models seldom keep, have several."""
    return tensor.layout is torch.strided


def _ran_out(error: BaseException) -> bool:
    """Return whether an error, or the one that it translates, says that memory is exhausted."""
    return is_out_of_memory(error) or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
