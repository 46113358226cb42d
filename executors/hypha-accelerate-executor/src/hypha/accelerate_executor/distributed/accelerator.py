"""Where the model computes: plainly on this machine's processor, or as Hugging Face Accelerate arranges it.

Accelerate takes seconds to start, so it is used only where it has something to do: when the process was started by
`accelerate launch`, or when there is an accelerator. What accelerate's configuration file says arrives as environment
variables of `accelerate launch`: mixed precision, gradient accumulation, FSDP, the number of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

import torch

from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer, clip_and_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

_ACCUMULATION: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_LAUNCH_VARIABLES: Final = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
_CPU_PRECISIONS: Final = ("no", "bf16")


class Device(Protocol):
    """Where the model computes."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of a batch go."""
        ...

    @property
    def accumulation(self) -> int:
        """Micro-batches that a batch is computed in, one after the other."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole model (FSDP)."""
        ...

    def prepare(
        self, module: torch.nn.Module, make: Callable[[list[torch.nn.Parameter]], InnerOptimizer]
    ) -> tuple[torch.nn.Module, InnerOptimizer]:
        """Place the module for training; give what is to be called, and the optimiser of its parameters."""
        ...

    def synchronised(self, module: torch.nn.Module, last: bool) -> AbstractContextManager[object]:
        """Where a micro-batch is computed: gradients are exchanged between processes after the last one only."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients; over processes they become the sum of each one's."""
        ...

    def total(self, value: float) -> float:
        """Sum a number over all processes."""
        ...

    def apply(self, optimizer: InnerOptimizer) -> None:
        """Clip gradients and have the optimiser step."""
        ...


class CpuBackend:
    """This machine's processor, without Accelerate."""

    accumulation = 1
    is_sharded = False

    @property
    def torch_device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def prepare(
        self, module: torch.nn.Module, make: Callable[[list[torch.nn.Parameter]], InnerOptimizer]
    ) -> tuple[torch.nn.Module, InnerOptimizer]:
        """Leave the module as it is."""
        return module, make(trained(module))

    def synchronised(self, module: torch.nn.Module, last: bool) -> AbstractContextManager[object]:
        """Nothing to exchange."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def total(self, value: float) -> float:
        """There is no other process."""
        return value

    def apply(self, optimizer: InnerOptimizer) -> None:
        """Clip gradients and have the optimiser step."""
        clip_and_step(optimizer)


class AccelerateBackend:
    """What Accelerate found: its devices, its processes, and mixed precision as it was launched with."""

    def __init__(self, accelerator: Accelerator, accumulation: int) -> None:
        """Use `accelerator`, which must not count accumulation itself: `trainer` divides batches."""
        self._accelerator = accelerator
        self.accumulation = accumulation

    @property
    def torch_device(self) -> torch.device:
        """This process's device."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def is_sharded(self) -> bool:
        """Whether it is FSDP that was launched."""
        return str(getattr(self._accelerator.distributed_type, "value", "")) == "FSDP"

    def prepare(
        self, module: torch.nn.Module, make: Callable[[list[torch.nn.Parameter]], InnerOptimizer]
    ) -> tuple[torch.nn.Module, InnerOptimizer]:
        """Move, wrap or shard the module; in mixed precision its forward computes so."""
        if getattr(self._accelerator, "is_fsdp2", False):  # shards parameters in place, in the optimiser too
            optimizer = make(trained(module))
            placed, wrapped = self._accelerator.prepare(module, optimizer.adamw)
            optimizer.adopt(wrapped.optimizer)
            return placed, optimizer
        placed = self._accelerator.prepare_model(module)
        return placed, make(trained(placed))

    def synchronised(self, module: torch.nn.Module, last: bool) -> AbstractContextManager[object]:
        """Exchange gradients after the last micro-batch only."""
        context: AbstractContextManager[object] = (
            contextlib.nullcontext() if last else self._accelerator.no_sync(module)
        )
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients: processes average theirs, so that the loss is multiplied by how many they are."""
        processes = self._accelerator.num_processes
        self._accelerator.backward(loss * processes if processes > 1 else loss)

    def total(self, value: float) -> float:
        """Sum over processes."""
        if self._accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float32, device=self.torch_device)
        return float(self._accelerator.reduce(tensor, reduction="sum"))

    def apply(self, optimizer: InnerOptimizer) -> None:
        """Clip gradients and have the optimiser step; with fp16 what was scaled is divided again first."""
        scaler = self._accelerator.scaler
        if scaler is not None:
            scaler.unscale_(optimizer.adamw)
        if optimizer.max_norm is not None:
            self._accelerator.clip_grad_norm_(optimizer.parameters, optimizer.max_norm)
        if scaler is None:
            optimizer.adamw.step()
        else:
            scaler.step(optimizer.adamw)
            scaler.update()


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that are trained, tied ones once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def choose_device(environment: Mapping[str, str] = os.environ) -> Device:
    """Give the processor, or Accelerate where it was asked for or an accelerator is at hand.

    With several processes this waits until all of them have come.

    Raises:
        JobError: it was launched with a precision that the device does not have.
    """
    launched = any(name in environment for name in _LAUNCH_VARIABLES)
    if not launched and not _has_accelerator():
        return CpuBackend()
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not _has_accelerator()
    if on_cpu and precision not in _CPU_PRECISIONS:
        raise JobError(
            f"mixed_precision: {precision!r} needs a GPU and there is none; accelerate's file may say 'bf16' or 'no'"
        )
    accumulation = environment.get(_ACCUMULATION, "1")
    if not accumulation.isdecimal() or int(accumulation) < 1:
        raise JobError(f"gradient_accumulation_steps: {accumulation!r} is not a number of micro-batches, 1 or more")
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-untyped]

    # Accelerate would count batches and let the optimiser rest meanwhile; here a batch is one step everywhere
    plugin = GradientAccumulationPlugin(num_steps=1)
    # without a GPU it must be told so: `accelerate launch` does not, and each process would then train by itself
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_plugin=plugin)
    launched_processes = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched_processes:
        raise JobError(
            f"{launched_processes} processes were launched but Accelerate sees {accelerator.num_processes}: check "
            "distributed_type in its file"
        )
    return AccelerateBackend(accelerator, int(accumulation))


def _has_accelerator() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()
