"""Membership of a training job: workers that join or rejoin its rounds.

The scheduler says with which round a worker begins; it tells of changes by `commands`.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.protocols import MEMBERSHIP, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, Digest, Message


class JoinRound(Message, frozen=True):
    """Question of a worker whose executor is ready to train: with which round does it begin?

    What the executor has trained in the open round before, and not sent, is given up.
    """

    job_id: uuid.UUID
    lease: uuid.UUID
    traceparent: Annotated[str | None, OMIT] = None


class RoundToJoin(Message, frozen=True):
    """Response to `JoinRound`, after some seconds at the latest."""

    round: Annotated[U32 | None, OMIT] = None
    """Round with which the executor begins, from the weights after the one before. None: ask again, unless `reason`."""
    weights: Annotated[Digest | None, OMIT] = None
    """Digest of these weights; None where the round begins from the start model."""
    reason: str = ""
    """Why the executor will never take part; empty if it does or may still."""


JOIN_ROUND: Final = RpcMethod[JoinRound, RoundToJoin](MEMBERSHIP, JoinRound, RoundToJoin, "JoinRound")
