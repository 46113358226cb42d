"""The inner optimizer: AdamW with a learning-rate schedule over the steps of the whole job.

Its state is kept from round to round: an outer update changes the parameters in place and keeps the moments. A process
that begins anew with a later round resets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from hypha_proto.job_spec import Adam, CosineWithWarmup, LearningRateSchedule, LinearWithWarmup, WarmupStableDecay

_BETAS: Final = (0.9, 0.999)
_EPSILON: Final = 1e-8
_WEIGHT_DECAY: Final = 0.01


def learning_rate_factor(schedule: LearningRateSchedule | None) -> Callable[[float], float]:
    """Return the learning-rate factor as a function of the steps taken so far (0 before the first).

    The schedules are those of `transformers.optimization`. A `wsd` without `training_steps` does not decay: it stays
    at 1 after its warmup.
    """
    match schedule:
        case CosineWithWarmup(warmup_steps=warmup, training_steps=total):
            return _warmed(warmup, lambda step: _cosine(_progress(step, warmup, total)))
        case LinearWithWarmup(warmup_steps=warmup, training_steps=end):
            return _warmed(warmup, lambda step: 1.0 - _progress(step, warmup, end))
        case WarmupStableDecay(warmup_steps=warmup, decay_steps=decay, training_steps=last):
            start = None if last is None else max(warmup, last - decay)
            return _warmed(warmup, lambda step: _decay(step, start, decay))
        case None:
            return lambda step: 1.0


class NotFiniteGradient(Exception):
    """A gradient is NaN or infinite; nothing was clipped, and no step was taken.

    Attributes:
        parameter: the first one whose gradient is.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter


class InnerOptimizer:
    """AdamW with gradient clipping and a learning rate that follows the job's schedule."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        config: Adam,
        schedule: LearningRateSchedule | None = None,
        round_steps: float | None = None,
    ) -> None:
        """Create the optimizer; values that the job leaves out are the defaults of `torch.optim.AdamW`.

        Args:
            parameters: parameters to optimize.
            config: learning rate, betas, epsilon, weight decay, maximum gradient norm.
            schedule: learning-rate schedule; None keeps it constant.
            round_steps: steps of the schedule in each round; None counts this worker's own steps, in all rounds.
        """
        self.parameters = list(parameters)
        self.max_norm = config.max_grad_norm
        self._rate = config.learning_rate
        self._factor = learning_rate_factor(schedule)
        self._steps = 0.0
        self._round_steps = round_steps
        self._end_of_round = math.inf
        self.adamw: torch.optim.Optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=config.betas or _BETAS,
            eps=_EPSILON if config.epsilon is None else config.epsilon,
            weight_decay=_WEIGHT_DECAY if config.weight_decay is None else config.weight_decay,
            fused=all(each.device.type == "cpu" for each in self.parameters) or None,  # a fifth of the time there
        )

    def adopt(self, adamw: torch.optim.Optimizer) -> None:
        """Replace AdamW, before the first step, by the device's version whose parameters are shards."""
        self.adamw = adamw
        self.parameters = [parameter for group in adamw.param_groups for parameter in group["params"]]

    def reset(self) -> None:
        """Discard the moments, as if no step had been taken; `begin_round` sets the schedule."""
        self.adamw.state.clear()

    def begin_round(self, number: int) -> None:
        """Set the schedule to the job's progress: before round `number`, from 1, all workers are at the same step.

        A worker that is faster than the average stays at the end of the round when it reaches it.
        """
        if self._round_steps is not None:
            self._steps = (number - 1) * self._round_steps
            self._end_of_round = number * self._round_steps

    def step(self, apply: Callable[[InnerOptimizer], None] | None = None) -> None:
        """Update the parameters from their gradients, then clear these.

        Args:
            apply: device-specific function that clips the gradients and steps `adamw`; None uses the default.

        Raises:
            NotFiniteGradient: as it says.
        """
        rate = self._rate * self._factor(min(self._steps, self._end_of_round))
        for group in self.adamw.param_groups:
            group["lr"] = rate
        (apply or clip_and_step)(self)
        for parameter in self.parameters:
            parameter.grad = None
        self.skip_step()

    def skip_step(self) -> None:
        """Take no step for a batch without labels; the schedule goes on, which counts batches."""
        self._steps += 1


def clip_and_step(optimizer: InnerOptimizer) -> None:
    """Check the gradients, clip them if the job asks for it, and step AdamW.

    Raises:
        NotFiniteGradient: one is not finite.
    """
    if optimizer.max_norm is None:
        check_gradients(optimizer.parameters)
    else:
        clip_gradients(optimizer.parameters, optimizer.max_norm)
    optimizer.adamw.step()


def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
    """Clip the gradients to a norm, which also tells whether they are finite.

    Raises:
        NotFiniteGradient: one is not, before the norm spreads it to all of them.
    """
    try:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    except RuntimeError:
        raise_not_finite(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)  # the norm of finite gradients was too large for float32


def check_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Check the gradients.

    Raises:
        NotFiniteGradient: one is not finite.
    """
    if not are_gradients_finite(parameters):
        raise_not_finite(parameters)


def are_gradients_finite(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether this process's gradients are finite; very large ones on another device than CPUs are not either.

    On CPUs, the kernel of `torch.amp.GradScaler` takes a third of the time of a norm; other devices may lack it.
    """
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if all(gradient.device.type == "cpu" for gradient in gradients):
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
        return not found.item()
    whole = getattr(torch.nn.utils, "get_total_norm", None)  # since torch 2.6
    norms = map(torch.linalg.vector_norm, gradients) if whole is None else [whole(gradients)]
    return all(map(math.isfinite, norms))


def raise_not_finite(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise an error for the first parameter whose gradient is not finite, if there is one.

    Raises:
        NotFiniteGradient: there is one.
    """
    for parameter in parameters:
        if parameter.grad is not None and not bool(torch.isfinite(_local(parameter.grad)).all()):
            raise NotFiniteGradient(parameter)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or this process's shard of it."""
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _warmed(warmup: int, after: Callable[[float], float]) -> Callable[[float], float]:
    """Prepend a linear warmup. The first step has factor 0, as in transformers."""
    return lambda step: step / warmup if step < warmup else after(step)


def _progress(step: float, warmup: int, total: int) -> float:
    return min(1.0, (step - warmup) / max(1, total - warmup))


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _decay(step: float, start: int | None, decay: int) -> float:
    return 1.0 if start is None or step < start else _cosine(_progress(step, start, start + decay))
