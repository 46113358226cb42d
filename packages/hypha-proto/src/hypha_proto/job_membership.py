"""Membership of a training job: workers that join or rejoin its rounds.

The scheduler says in which round a worker begins; it announces changes by `commands`.
"""

from __future__ import annotations

from typing import Annotated, Final

from hypha_proto.attempt_id import AttemptId
from hypha_proto.protocols import MEMBERSHIP, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, Digest, Message


class JoinRound(Message, frozen=True):
    """Request of a worker whose executor is ready to train: in which round does it begin?

    What the executor trained in the open round before, and did not send, is discarded.
    """

    attempt: AttemptId
    traceparent: Annotated[str | None, OMIT] = None


class RoundToJoin(Message, frozen=True):
    """Response to `JoinRound`, within some seconds."""

    round: Annotated[U32 | None, OMIT] = None
    """Round with which the executor begins, from the weights after the one before. None: ask again, unless `reason`."""
    weights: Annotated[Digest | None, OMIT] = None
    """Digest of these weights; None where the round begins from the start model."""
    keeps: Annotated[bool | None, OMIT] = None
    """True if the slices that the executor was assigned ahead (`datasets.DataRequest`) are still assigned to it."""
    reason: str = ""
    """Why the executor will never take part; empty if it does or may still."""


JOIN_ROUND: Final = RpcMethod(MEMBERSHIP, JoinRound, RoundToJoin, "JoinRound")
