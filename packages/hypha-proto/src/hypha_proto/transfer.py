"""Headers of the file transfer protocols.

A header is its length (u64, little endian) followed by CBOR of at most 1 MiB. `hypha_net.transfer` implements them.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.attempt_id import AttemptId
from hypha_proto.contributions import Contribution
from hypha_proto.ids import PeerId
from hypha_proto.wire_schema import EXTERNAL, OMIT, U32, U64, Digest, Message, Newtype

MAX_HEADER: Final = 1 << 20
"""Limit of an encoded header in bytes."""
PSEUDO_GRADIENT: Final = "pseudo-gradient"
"""`PushHeader.kind` of a worker's update to the parameter server."""
OUTER_UPDATE: Final = "outer-update"
"""`PushHeader.kind` of the outer step's result."""
OTHER_FILE: Final = "file"
"""`PushHeader.kind` of a file that an executor sends for a purpose of its own."""
TASK_RESOURCE: Final = "task-resource"
"""`PushHeader.kind` of a file of a task's resource."""
TASK_RESULT: Final = "task-result"
"""`PushHeader.kind` of a file that a running task sends to its scheduler."""
NO_ROOM: Final = "no room"
"""Beginning of a refusal's reason when the receiver's disk is full: the push may succeed later."""
NO_JOB: Final = "no job here accepts a push"
"""Beginning of a refusal's reason when the file's job does not run at the receiver, or no longer."""


class PullRequest(Message, frozen=True):
    """Request for a file from a byte offset on."""

    dataset: str
    """Name of a dataset, or ``<job id>/model`` or ``<job id>/preprocessor`` for files that a scheduler serves."""
    index: U64
    """Index of the slice or file; ignored if `name` is set."""
    name: Annotated[str | None, OMIT] = None
    """``manifest`` to request the dataset's manifest."""
    offset: U64 = 0
    """Number of bytes that the requester already has."""
    traceparent: Annotated[str | None, OMIT] = None


class PullStart(Message, frozen=True, tag="Start"):
    """Positive response to a pull; `size - offset` bytes of the file follow."""

    size: U64
    """Size of the whole file in bytes."""
    digest: Digest


class Refusal(Newtype, frozen=True, tag="Refused"):
    """Negative response: the file is not sent, or not accepted, for this reason."""

    reason: str


class PushHeader(Message, frozen=True):
    """Description of a pushed file."""

    attempt: AttemptId
    """Attempt that sends the file, or has made it."""
    round: U32
    kind: str
    """`PSEUDO_GRADIENT`, `OUTER_UPDATE`, `OTHER_FILE`, `TASK_RESOURCE`, or one that this version does not know."""
    name: str
    """File name."""
    size: U64
    """Size in bytes."""
    digest: Digest
    scheduler: PeerId
    """Scheduler of the job; another scheduler may use the same job id."""
    codec: str = "fp32"
    """Encoding of the numbers in the file."""
    samples: U64 = 0
    """Number of samples that a pseudo-gradient was computed from."""
    traceparent: Annotated[str | None, OMIT] = None
    delivery: Annotated[uuid.UUID | None, OMIT] = None
    """Delivery of a task's resource that the file belongs to (`task_resources.AwaitPush`)."""
    term: Annotated[U32 | None, OMIT] = None
    """Term of the parameter server that sends an outer update, or that a pseudo-gradient is meant for."""
    contribution: Annotated[Contribution | None, OMIT] = None
    """What the executor states about its pseudo-gradient."""


class GoOn(Message, frozen=True, tag="GoOn"):
    """Positive response to a push: send the bytes from `offset` on."""

    offset: U64


class Receipt(Message, frozen=True, tag="Receipt"):
    """Confirmation that a pushed file arrived completely and its digest matches."""

    size: U64
    """Size in bytes."""


PullAnswer = Annotated[PullStart | Refusal, EXTERNAL]
PushAnswer = Annotated[GoOn | Refusal, EXTERNAL]
PushReceipt = Annotated[Receipt | Refusal, EXTERNAL]
