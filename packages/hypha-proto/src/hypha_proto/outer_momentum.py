"""The momentum of an outer optimizer, computed from the outer updates that it writes; needs the extra `update`.

An outer step (arXiv:2311.08105; `torch.optim.SGD` on ``-delta``) has the momentum ``m' = mu m + delta`` and the update
``u = lr (delta + mu m')``, or ``u = lr m'`` without Nesterov. Solved for m':

    m' = u / (lr (1 + mu)) + m mu / (1 + mu)      Nesterov
    m' = u / lr                                   classical

The parameter server and the scheduler both compute it so, from the float32 update that is sent. Their momentum is
therefore equal to the bit, and a parameter server can continue from the scheduler's.
"""

from __future__ import annotations

import numpy as np

from hypha_proto.safetensors_io import Float32Array


def derive_momentum(
    update: Float32Array, previous: Float32Array | float, *, learning_rate: float, momentum: float, nesterov: bool
) -> Float32Array:
    """Return the momentum after an outer step, rounded once from float64.

    Args:
        update: the outer update of the step, or a block of it.
        previous: the momentum before the step, of the same shape; 0 before the first one.
        learning_rate: learning rate of the outer optimizer, not 0.
        momentum: its momentum factor.
        nesterov: whether its momentum is Nesterov's.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if not nesterov:
            return np.divide(update, learning_rate, dtype=np.float64).astype(np.float32)
        derived = np.divide(update, learning_rate * (1.0 + momentum), dtype=np.float64)
        derived += np.multiply(previous, momentum / (1.0 + momentum), dtype=np.float64)
        return derived.astype(np.float32)
