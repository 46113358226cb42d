"""Compute backends: the CPU, or Hugging Face Accelerate.

Accelerate takes seconds to start, so it is used only when needed: if the process was started by `accelerate launch`,
or if there is an accelerator. Its configuration file arrives as environment variables of `accelerate launch`: mixed
precision, gradient accumulation, FSDP, the number of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import torch

from hypha.accelerate_executor.environment import LAUNCH_VARIABLES
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.train.inner_optimizer import (
    InnerOptimizer,
    are_gradients_finite,
    check_gradients,
    clip_and_step,
    raise_not_finite,
)

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

_ACCUMULATION: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_CPU_PRECISIONS: Final = ("no", "bf16")
_PRECISIONS: Final = (*_CPU_PRECISIONS, "fp16")
_UNSUPPORTED: Final = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config (tensor, context or sequence parallelism)",
    "FORK_LAUNCHED": "a launcher that calls a function, as that of TPUs does,",
}
"""Variables with which `accelerate launch` says how processes share a model, and what they stand for."""


class CpuBackend:
    """The CPU, without Accelerate."""

    accumulation = 1
    """Micro-batches per batch, computed in sequence."""
    is_sharded = False
    """Whether the model is sharded over processes (FSDP)."""
    torch_device = torch.device("cpu")
    """Device of batch tensors."""

    def prepare(
        self, module: torch.nn.Module, make: Callable[[list[torch.nn.Parameter]], InnerOptimizer]
    ) -> tuple[torch.nn.Module, InnerOptimizer]:
        """Return the module unchanged, with a new optimizer."""
        return module, make(trained_parameters(module))

    def synchronised(self, module: torch.nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch: processes exchange gradients only after the last one, here nothing."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def total(self, value: float) -> float:
        """Return the value: there is no other process."""
        return value

    def apply(self, optimizer: InnerOptimizer) -> None:
        """Check and clip gradients, and step the optimizer.

        Raises:
            NotFiniteGradient: a gradient is not finite.
        """
        clip_and_step(optimizer)


class AccelerateBackend:
    """Accelerate's device, processes and mixed precision, as launched."""

    def __init__(self, accelerator: Accelerator, accumulation: int) -> None:
        """Use `accelerator`, which must not count accumulation itself: `train.trainer` splits batches."""
        self._accelerator = accelerator
        self.accumulation = accumulation

    @property
    def torch_device(self) -> torch.device:
        """Return this process's device."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP is in use."""
        return str(getattr(self._accelerator.distributed_type, "value", "")) == "FSDP"

    def prepare(
        self, module: torch.nn.Module, make: Callable[[list[torch.nn.Parameter]], InnerOptimizer]
    ) -> tuple[torch.nn.Module, InnerOptimizer]:
        """Move, wrap or shard the module; its forward uses mixed precision if launched so."""
        if getattr(self._accelerator, "is_fsdp2", False):  # shards parameters in place, also in the optimizer
            optimizer = make(trained_parameters(module))
            placed, wrapped = self._accelerator.prepare(module, optimizer.adamw)
            optimizer.adopt(wrapped.optimizer)
            return placed, optimizer
        placed = self._accelerator.prepare_model(module)
        return placed, make(trained_parameters(placed))

    def synchronised(self, module: torch.nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return a context that exchanges gradients after the last micro-batch only."""
        context: AbstractContextManager[object] = (
            contextlib.nullcontext() if last else self._accelerator.no_sync(module)
        )
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients; processes average them, so the loss is multiplied by the number of processes."""
        processes = self._accelerator.num_processes
        self._accelerator.backward(loss * processes if processes > 1 else loss)

    def total(self, value: float) -> float:
        """Return the sum over processes."""
        if self._accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float32, device=self.torch_device)
        return float(self._accelerator.reduce(tensor, reduction="sum"))

    def apply(self, optimizer: InnerOptimizer) -> None:
        """Check and clip gradients, and step the optimizer; with fp16 gradients are unscaled first."""
        scaler = self._accelerator.scaler
        if scaler is None and not self.is_sharded:
            clip_and_step(optimizer)
            return
        if scaler is None:
            self._check_shards(optimizer)
        else:
            scaler.unscale_(optimizer.adamw)
            if scaler.get_scale() < 1:  # it has been halved since 65536: their values do not overflow for the scale
                check_gradients(optimizer.parameters)
        if optimizer.max_norm is not None:
            self._accelerator.clip_grad_norm_(optimizer.parameters, optimizer.max_norm)
        if scaler is None:
            optimizer.adamw.step()
        else:  # skips the step if a gradient has overflowed, and lowers the scale
            scaler.step(optimizer.adamw)
            scaler.update()

    def _check_shards(self, optimizer: InnerOptimizer) -> None:
        """Check the shards of all processes, so that all end together: clipping exchanges their norms."""
        is_wrong = not are_gradients_finite(optimizer.parameters)
        if self.total(float(is_wrong)):
            if is_wrong:
                raise_not_finite(optimizer.parameters)
            raise DataError("a gradient is not finite in another process of this executor; its own last line says why")


Device = CpuBackend | AccelerateBackend
"""Compute backend of one process."""


def trained_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters, tied ones once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def choose_device(environment: Mapping[str, str] = os.environ) -> Device:
    """Return the CPU backend, or Accelerate if launched with it or if there is an accelerator.

    With several processes this waits until all of them have started.

    Raises:
        JobError: launched with a precision that the device does not support, or in a mode that is not supported.
    """
    for variable, mode in _UNSUPPORTED.items():
        if environment.get(variable, "").lower() in ("1", "true", "yes"):
            raise JobError(
                f"{variable}: {mode} is not supported; accelerate's file may say distributed_type MULTI_GPU, FSDP or NO"
            )
    launched = any(name in environment for name in LAUNCH_VARIABLES)
    if not launched and not _has_accelerator():
        return CpuBackend()
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not _has_accelerator()
    if on_cpu and precision not in _CPU_PRECISIONS:
        raise JobError(
            f"mixed_precision: {precision!r} needs a GPU and there is none; accelerate's file may say 'bf16' or 'no'"
        )
    if precision not in _PRECISIONS:
        raise JobError(
            f"mixed_precision: {precision!r} is not supported; accelerate's file may say 'bf16', 'fp16' or 'no'"
        )
    accumulation = environment.get(_ACCUMULATION, "1")
    if not accumulation.isdecimal() or int(accumulation) < 1:
        raise JobError(f"gradient_accumulation_steps: {accumulation!r} is not a number of micro-batches, 1 or more")
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-untyped]

    # Accelerate would count batches and skip optimizer steps meanwhile; here every batch is one step
    plugin = GradientAccumulationPlugin(num_steps=1)
    # without a GPU this must be explicit: `accelerate launch` does not pass it on, and each process would train alone
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
