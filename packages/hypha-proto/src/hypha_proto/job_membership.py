"""Membership of a training job: workers that join or rejoin its rounds, and a parameter server that is replaced.

Uses the extension ``/hypha-membership/0.1.0``; peers of the older network do not have it. The scheduler says with which
round a worker begins, and tells workers and parameter server of changes while they run.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_proto.protocols import MEMBERSHIP, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message


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


class ServerChanged(Message, frozen=True):
    """Announcement of the scheduler to a training worker that another parameter server takes the outer steps.

    The worker sends it the update of the open round, if it has stated one.
    """

    job_id: uuid.UUID
    lease: uuid.UUID
    """Lease of the training worker."""
    term: U32
    """Term of the new parameter server, higher than all before."""
    server: PeerId
    round: U32
    """The open round, of which the new parameter server takes the step first."""
    update: Annotated[Digest | None, OMIT] = None
    """Digest of the outer update of the round before, which is committed; None if there is none."""
    outer_update: Annotated[SliceAddress | None, OMIT] = None
    """Where the scheduler serves it to workers that have not received it from the parameter server before."""
    traceparent: Annotated[str | None, OMIT] = None


class ServerKnown(Message, frozen=True):
    """Response to `ServerChanged`."""

    accepted: bool
    """False if no such job runs here, or a newer term is known."""
    reason: str = ""
    """Why it was not accepted."""
    sends: Annotated[Digest | None, OMIT] = None
    """Digest of the update of the open round that the worker sends to the new parameter server; None if it has none."""


class JobWorkers(Message, frozen=True):
    """Announcement of the scheduler to the parameter server which workers send updates, and get outer updates."""

    job_id: uuid.UUID
    term: U32
    """Term of the parameter server that is meant."""
    version: U64
    """Grows with each change; an older list than the last is not accepted."""
    workers: tuple[PeerId, ...]


class JobWorkersKnown(Message, frozen=True):
    """Response to `JobWorkers`."""

    accepted: bool
    reason: str = ""
    """Why it was not accepted."""


JOIN_ROUND: Final = RpcMethod[JoinRound, RoundToJoin](MEMBERSHIP, JoinRound, RoundToJoin, "JoinRound")
SERVER_CHANGED: Final = RpcMethod[ServerChanged, ServerKnown](MEMBERSHIP, ServerChanged, ServerKnown, "ServerChanged")
JOB_WORKERS: Final = RpcMethod[JobWorkers, JobWorkersKnown](MEMBERSHIP, JobWorkers, JobWorkersKnown, "JobWorkers")
