"""Seeds of the random generators: one for each member and round of a job.

Dropout and other random layers draw from global generators. They are seeded at the beginning of each round, so that
workers draw different numbers, and a round can be computed again without those before it. All processes of an executor
have the same seed, as they had from the start: layers that are skipped at random (LayerDrop) must be the same in each.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def round_seed(seed: int, member: int | None, round_number: int) -> int:
    """Return the seed of a round: the first 63 bits of the SHA-256 of the text ``SEED/MEMBER/ROUND``.

    Args:
        seed: seed of the job.
        member: number of this worker in the job; None (an empty text) if the scheduler states none.
        round_number: number of the round, from 1.
    """
    text = f"{seed}/{'' if member is None else member}/{round_number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, on all devices, of numpy and of Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
