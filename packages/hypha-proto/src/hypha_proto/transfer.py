"""Headers of files in motion. Push and pull with these headers are ours (``…/0.1.0``); the bare are the old wire's.

A header is its length (u64, little endian) and then CBOR (the bare pull: JSON), 1 MiB at most.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.wire_schema import EXTERNAL, OMIT, U32, U64, Digest, Message, Newtype

MAX_HEADER: Final = 1 << 20
PSEUDO_GRADIENT: Final = "pseudo-gradient"
OUTER_UPDATE: Final = "outer-update"


class PullHeader(Message, frozen=True):
    """Old wire, JSON: which slice."""

    dataset: str
    index: U64


class PullRequest(Message, frozen=True):
    """Which file, and from which byte on."""

    dataset: str
    """A dataset, or ``<job id>/model`` for a model that a scheduler serves."""
    index: U64
    """Index of the slice or model file; for a `name` it does not count."""
    name: Annotated[str | None, OMIT] = None
    """``manifest`` for a dataset's manifest."""
    offset: U64 = 0
    traceparent: Annotated[str | None, OMIT] = None


class PullStart(Message, frozen=True, tag="Start"):
    """`size - offset` bytes follow."""

    size: U64
    """Bytes of the whole file."""
    digest: Digest


class Refusal(Newtype, frozen=True, tag="Refused"):
    """The file is not given or taken, and why."""

    reason: str


class PushHeader(Message, frozen=True):
    """What is pushed."""

    job_id: uuid.UUID
    round: U32
    kind: str
    """`PSEUDO_GRADIENT`, `OUTER_UPDATE` or an executor's own."""
    name: str
    size: U64
    """Bytes."""
    digest: Digest
    codec: str = "fp32"
    samples: U64 = 0
    """Samples that a pseudo-gradient was computed from."""
    attempt: U32 = 0
    traceparent: Annotated[str | None, OMIT] = None


class GoOn(Message, frozen=True, tag="GoOn"):
    """Send the bytes from `offset` on."""

    offset: U64


class Receipt(Message, frozen=True, tag="Receipt"):
    """The file is there, whole, its digest checked."""

    size: U64


PullAnswer = Annotated[PullStart | Refusal, EXTERNAL]
PushAnswer = Annotated[GoOn | Refusal, EXTERNAL]
PushReceipt = Annotated[Receipt | Refusal, EXTERNAL]
