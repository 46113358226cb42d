"""Where the model computes: plainly on this machine's processor, or as Hugging Face Accelerate arranges it.

Accelerate takes seconds to start, so it is used only where it has something to do: when the process was started by
`accelerate launch`, or when there is an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

import torch

from hypha.accelerate_executor.errors import JobError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

_LAUNCH_VARIABLES: Final = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")


class Device(Protocol):
    """Where the model computes."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of a batch go."""
        ...

    def place(self, module: torch.nn.Module) -> torch.nn.Module:
        """Place the module for training and give what is to be called."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        ...


class Processor:
    """This machine's processor, without Accelerate."""

    @property
    def torch_device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def place(self, module: torch.nn.Module) -> torch.nn.Module:
        """Leave the module as it is."""
        return module

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]


class Accelerated:
    """What Accelerate found: its device, and mixed precision as it was launched with."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Use `accelerator`, which must be of one process."""
        self._accelerator = accelerator

    @property
    def torch_device(self) -> torch.device:
        """The accelerator's device."""
        device: torch.device = self._accelerator.device
        return device

    def place(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the module to the device; in mixed precision its forward computes so."""
        placed: torch.nn.Module = self._accelerator.prepare_model(module)
        return placed

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        self._accelerator.backward(loss)


def choose_device(environment: Mapping[str, str] = os.environ) -> Device:
    """Give the processor, or Accelerate where it was asked for or an accelerator is at hand.

    Raises:
        JobError: several processes were launched for one job.
    """
    launched = any(name in environment for name in _LAUNCH_VARIABLES)
    if not launched and not torch.cuda.is_available():
        return Processor()
    if environment.get("WORLD_SIZE", "1") != "1":
        raise JobError("an executor of several processes is not supported yet; launch it with --num_processes 1")
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.mixed_precision == "fp16":
        raise JobError("mixed precision fp16 is not supported: launch with --mixed_precision bf16 or no")
    return Accelerated(accelerator)
