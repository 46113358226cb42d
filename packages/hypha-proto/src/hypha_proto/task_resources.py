"""Where the resources of tasks are: workers ask their scheduler, and the scheduler asks the holders of outputs.

Requests and responses of the protocol `TASK_RESOURCES`. The files themselves move by the transfer protocols, from the
worker that has an output to the one that needs it.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.protocols import TASK_RESOURCES, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message


class FailedHolder(Message, frozen=True):
    """A peer from which a resource could not be fetched."""

    peer: PeerId
    reason: str
    is_permanent: bool = False
    """Whether it has no such file, or one with other content; otherwise it could not be reached."""


class LocateResource(Message, frozen=True, kw_only=True):
    """Request of a worker: where is this resource of a task that it runs?"""

    attempt: AttemptId
    resource: str
    """Name of the resource in the task's definition; its source is a result or a dataset."""
    failures: tuple[FailedHolder, ...] = ()
    """Holders in an earlier answer from which it could not be fetched."""
    traceparent: Annotated[str | None, OMIT] = None


class LocatedFile(Message, frozen=True, kw_only=True):
    """One file of a resource."""

    path: str
    """Path relative to the resource; empty where the resource is a single file."""
    dataset: str
    """What to ask its holders for, in `transfer.PullRequest`."""
    index: U64
    size: Annotated[U64 | None, OMIT] = None
    """Size in bytes, where it is known."""
    digest: Annotated[Digest | None, OMIT] = None
    """Digest of its content, where it is known."""
    peers: tuple[PeerId, ...] = ()
    """Peers that have it, the best first. Empty where it is pushed."""


class PullFiles(Message, frozen=True):
    """Pull these files from their holders."""

    files: tuple[LocatedFile, ...]


class AwaitPush(Message, frozen=True):
    """These files will be pushed to this worker, each with `PushHeader.delivery` and, as its name, its index here."""

    delivery: uuid.UUID
    files: tuple[LocatedFile, ...]
    senders: tuple[PeerId, ...]
    """Peers that will push them."""


class NotYet(Message, frozen=True):
    """The resource does not exist yet; ask again."""

    task: str
    """Task that makes it."""
    retry_ms: U64
    """Milliseconds after which to ask."""


class Gone(Message, frozen=True):
    """There is no such resource, and there will be none."""

    reason: str


class ResourceLocation(Message, frozen=True, kw_only=True):
    """Answer to `LocateResource`: exactly one of the optional fields."""

    pull: Annotated[PullFiles | None, OMIT] = None
    pushed: Annotated[AwaitPush | None, OMIT] = None
    not_yet: Annotated[NotYet | None, OMIT] = None
    gone: Annotated[Gone | None, OMIT] = None


class PushedFile(Message, frozen=True):
    """A file that a holder is to push."""

    dataset: str
    """Stored output that it belongs to."""
    index: U64
    """Its position among the files of that output."""
    name: str
    """Name to push it under: its index in `AwaitPush.files`."""


class PushOutput(Message, frozen=True, kw_only=True):
    """Request of a scheduler to a holder: push files of stored outputs to a peer."""

    job_id: uuid.UUID
    delivery: uuid.UUID
    to: PeerId
    files: tuple[PushedFile, ...]
    traceparent: Annotated[str | None, OMIT] = None


class PushBegun(Message, frozen=True):
    """Answer to `PushOutput`; the files are pushed in the background."""

    accepted: bool
    reason: str = ""
    """Why not."""


class ReleaseOutputs(Message, frozen=True):
    """Request of a scheduler to a holder: remove these stored outputs."""

    job_id: uuid.UUID
    datasets: tuple[str, ...]
    """`tasks.StoredOutput.dataset` of each; empty means all of the job."""
    traceparent: Annotated[str | None, OMIT] = None


class OutputsReleased(Message, frozen=True):
    """Answer to `ReleaseOutputs`."""

    removed: U32
    """Number of outputs that were removed."""


LOCATE_RESOURCE: Final = RpcMethod(TASK_RESOURCES, LocateResource, ResourceLocation, "LocateResource")
PUSH_OUTPUT: Final = RpcMethod(TASK_RESOURCES, PushOutput, PushBegun, "PushOutput")
RELEASE_OUTPUTS: Final = RpcMethod(TASK_RESOURCES, ReleaseOutputs, OutputsReleased, "ReleaseOutputs")
