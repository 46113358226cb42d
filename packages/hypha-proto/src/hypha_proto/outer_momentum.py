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
from numpy.typing import NDArray

from hypha_proto.job_spec import Nesterov
from hypha_proto.safetensors_io import Float32Array

Float64Array = NDArray[np.float64]


def derive_momentum(update: Float32Array, previous: Float32Array | float, optimizer: Nesterov) -> Float32Array:
    """Return the momentum after an outer step, rounded once from float64.

    Args:
        update: the outer update of the step, or a block of it.
        previous: the momentum before the step, of the same shape; 0 before the first one.
        optimizer: the outer optimizer, whose learning rate is not 0.
    """
    result, spare = np.empty(update.shape, np.float32), (np.empty(update.shape), np.empty(update.shape))
    derive_momentum_into(result, update, previous, spare, optimizer)
    return result


def derive_momentum_into(
    result: Float32Array,
    update: Float32Array,
    previous: Float32Array | float,
    spare: tuple[Float64Array, Float64Array],
    optimizer: Nesterov,
) -> None:
    """Compute `derive_momentum` into an existing array, without allocating memory.

    Args:
        result: where the momentum is written; may be `previous`.
        update: see `derive_momentum`.
        previous: see `derive_momentum`.
        spare: two arrays of the same shape for intermediate results.
        optimizer: see `derive_momentum`.
    """
    derived, kept = spare
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(derived, update)
        if optimizer.is_classical:
            derived /= optimizer.learning_rate
        else:
            derived /= optimizer.learning_rate * (1.0 + optimizer.momentum)
            np.copyto(kept, previous)
            kept *= optimizer.momentum / (1.0 + optimizer.momentum)
            derived += kept
        np.copyto(result, derived, casting="same_kind")
