"""Tasks of any executor: definitions of a scheduler, and status updates of workers, over one stream for each lease.

A worker opens a stream of the protocol `TASKS` for each lease that it holds. It sends `Subscribe` and gets
`Subscribed`. Then the scheduler sends `SchedulerFrame`, the worker `WorkerFrame`, each after its length (u32, little
endian) of at most `MAX_FRAME` bytes. Both sides number their messages from 0 and acknowledge the other's, so after a
break the next stream continues without loss or repetition.

Alternatives are optional fields of one message, of which exactly one is set. A peer skips a field that it does not
know, and then sees that none is set.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import CommandAnswer, TaskCommand
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import AggregateConfig, HuggingFaceReference, TrainConfig
from hypha_proto.task_resources import PullFiles
from hypha_proto.wire_schema import I64, OMIT, U32, U64, Amount, Digest, Message

MAX_FRAME: Final = 1 << 20
"""Limit of an encoded frame in bytes."""
MAX_OUTPUT_FILES: Final = 2000
"""Largest number of files in all outputs of one attempt at a task."""
MAX_SETTINGS: Final = 64 << 10
"""Largest number of bytes in the settings of a task."""
MAX_ENTRIES: Final = 100
"""Largest number of resources, and of outputs, of a task."""
MAX_FILENAMES: Final = 1000
"""Largest number of file names in a source."""
RESOURCES: Final = "resources"
"""Folder of the work directory that holds the resources."""


# ------------------------------------------------------------------------------------------------- what tasks work with


class ResultSource(Message, frozen=True):
    """An output of another task of the job."""

    task: str
    output: str


class DatasetSource(Message, frozen=True):
    """A dataset of data nodes."""

    name: str
    slices: Annotated[tuple[U64, ...] | None, OMIT] = None
    """Indices of the slices to fetch; None means all."""


class PeersSource(Message, frozen=True):
    """A file that peers serve, such as a slice of a data node."""

    peers: tuple[PeerId, ...]
    dataset: str
    index: U64
    filenames: Annotated[tuple[str, ...] | None, OMIT] = None
    """Names of the files at `index`, `index + 1`, …; the resource is then a folder. Used for models of a scheduler."""


class SlicesSource(Message, frozen=True):
    """Slices of a dataset, assigned one by one by the scheduler while the executor runs, as for training."""

    dataset: str


class FileSource(Message, frozen=True):
    """A file or folder of a shared file system, under a root that the worker's owner allows."""

    path: str
    """Absolute path."""


class UriSource(Message, frozen=True):
    """A file at an ``https:``, ``http:``, ``file:`` or ``s3:`` URL, or one that is named ``sha256:`` and its digest."""

    value: str


class S3Source(Message, frozen=True):
    """An object in a bucket of the S3 service that the worker's owner names."""

    bucket: str
    key: str


class DhtSource(Message, frozen=True):
    """A file by its content; its holders are found in the DHT."""

    sha256: str
    """64 lower-case hex digits."""


class TaskResource(Message, frozen=True, kw_only=True):
    """An input of a task: a name and exactly one source."""

    name: str
    result: Annotated[ResultSource | None, OMIT] = None
    huggingface: Annotated[HuggingFaceReference | None, OMIT] = None
    dataset: Annotated[DatasetSource | None, OMIT] = None
    peers: Annotated[PeersSource | None, OMIT] = None
    file: Annotated[FileSource | None, OMIT] = None
    uri: Annotated[UriSource | None, OMIT] = None
    slices: Annotated[SlicesSource | None, OMIT] = None
    """Not fetched before the start: each fetch through the bridge gets the next slice."""
    s3: Annotated[S3Source | None, OMIT] = None
    dht: Annotated[DhtSource | None, OMIT] = None
    location: Annotated[PullFiles | None, OMIT] = None
    """Where the files of a `result` are, as in an answer to `LocateResource`; if they are not there, a worker asks."""


class OutputPath(Message, frozen=True):
    """An output that a task makes: a file or folder."""

    name: str
    path: str
    """Path in the work directory, relative to it."""


class TaskSpec(Message, frozen=True, kw_only=True):
    """What to run."""

    executor: str
    """The executor, as the lease was requested for it: ``class/name``, such as ``shell/bash``, or the name alone."""
    settings: str = "{}"
    """Settings of the executor: a JSON object. A text that equals a resource's name stands for its path."""
    training: Annotated[TrainConfig | None, OMIT] = None
    """Settings of a task that trains, in place of `settings`."""
    aggregation: Annotated[AggregateConfig | None, OMIT] = None
    """Settings of a parameter server, in place of `settings`."""
    resources: tuple[TaskResource, ...] = ()
    outputs: tuple[OutputPath, ...] = ()
    index: Annotated[U32 | None, OMIT] = None
    """Number of this instance, from 0, where `count` instances of a task run."""
    count: Annotated[U32 | None, OMIT] = None
    timeout_ms: Annotated[U64 | None, OMIT] = None
    """Milliseconds from the start of the executor after which the attempt has failed; None means no limit."""
    sends: Annotated[bool | None, OMIT] = None
    """Whether the executor may push files of the kind `transfer.TASK_RESULT` to the scheduler while it runs."""
    orphan_grace_ms: Annotated[U64 | None, OMIT] = None
    """Milliseconds for which the attempt may run on, and its lease is held, after the lease was last renewed in time;
    the worker's owner may allow less. None means that it ends with its lease."""
    traceparent: Annotated[str | None, OMIT] = None
    """Span of the scheduler that the attempt's spans belong to."""


# ------------------------------------------------------------------------------------------ definitions: scheduler down


class Stop(Message, frozen=True):
    """End the attempt now; it is reported as cancelled."""

    reason: str


class DrainTask(Message, frozen=True):
    """Let the attempt finish what it has begun, and end it when the time is over."""

    left_ms: U64
    """Milliseconds from receipt."""
    reason: str


class TaskDefinition(Message, frozen=True, kw_only=True):
    """Definition for one attempt at a task: exactly one of `start`, `stop`, `drain` and `command`."""

    attempt: AttemptId
    """On one lease, definitions of an older attempt at a task than the newest are refused."""
    start: Annotated[TaskSpec | None, OMIT] = None
    stop: Annotated[Stop | None, OMIT] = None
    drain: Annotated[DrainTask | None, OMIT] = None
    command: Annotated[TaskCommand | None, OMIT] = None


# -------------------------------------------------------------------------------------------- status updates: worker up


class Started(Message, frozen=True):
    """The worker has accepted the attempt and fetches its resources."""


class Ready(Message, frozen=True):
    """All resources are there, and the executor runs."""


class TaskProgress(Message, frozen=True, kw_only=True):
    """What an executor says about its progress."""

    fraction: Annotated[Amount | None, OMIT] = None
    """Share of the work that is done, 0 to 1."""
    message: Annotated[str | None, OMIT] = None
    """One line for people."""
    metrics: Annotated[dict[str, float] | None, OMIT] = None
    """Numbers by name."""


class Draining(Message, frozen=True):
    """The attempt drains."""

    left_ms: U64
    """Milliseconds that it still has."""


class StoredFile(Message, frozen=True):
    """A file of a stored output."""

    path: str
    """Path relative to the output; empty where the output is a single file."""
    size: U64
    """Size in bytes."""
    digest: Digest


class StoredOutput(Message, frozen=True):
    """An output in the store of the worker that made it."""

    name: str
    dataset: str
    """Unguessable name under which `transfer.PullRequest` gets its files; `index` is the position in `files`."""
    files: tuple[StoredFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def is_file(self) -> bool:
        """Whether it is a single file, and no folder."""
        return [file.path for file in self.files] == [""]


class TaskFinished(Message, frozen=True, kw_only=True):
    """The executor has ended successfully, and all outputs are stored."""

    outputs: tuple[StoredOutput, ...]
    bytes_sent: U64 = 0
    """Bytes of files that the worker has sent for the attempt."""
    bytes_received: U64 = 0


class TaskFailed(Message, frozen=True, kw_only=True):
    """The attempt has failed."""

    reason: str
    """One line for people."""
    exit_code: I64 | None = None
    """Exit status of the executor, negative for a signal; None if no process ran."""
    last_lines: tuple[str, ...] = ()
    """Last lines of its output."""
    resource: Annotated[str | None, OMIT] = None
    """Name of the resource that could not be fetched, where that is the reason."""
    bytes_sent: U64 = 0
    bytes_received: U64 = 0


class TaskCancelled(Message, frozen=True, kw_only=True):
    """The attempt was ended before it was over: by `Stop`, or because this worker cannot continue it."""

    reason: str
    bytes_sent: U64 = 0
    bytes_received: U64 = 0


class StatusUpdate(Message, frozen=True, kw_only=True):
    """What has happened to one attempt at a task: exactly one of the optional fields."""

    attempt: AttemptId
    started: Annotated[Started | None, OMIT] = None
    ready: Annotated[Ready | None, OMIT] = None
    progress: Annotated[TaskProgress | None, OMIT] = None
    draining: Annotated[Draining | None, OMIT] = None
    answered: Annotated[CommandAnswer | None, OMIT] = None
    finished: Annotated[TaskFinished | None, OMIT] = None
    failed: Annotated[TaskFailed | None, OMIT] = None
    cancelled: Annotated[TaskCancelled | None, OMIT] = None


# -------------------------------------------------------------------------------------------------------------- stream


class Subscribe(Message, frozen=True):
    """First message of a worker on a stream."""

    lease: uuid.UUID
    next: U64
    """Sequence number of the first definition that it has not handled."""
    first: U64 = 0
    """Sequence number of its oldest status update that is not acknowledged. A scheduler that was started again, and
    holds the lease still, goes on with this one."""


class Subscribed(Message, frozen=True):
    """Answer to `Subscribe`."""

    job_id: uuid.UUID
    """Job that holds the lease."""
    next: U64
    """Sequence number of the first status update that the scheduler has not handled."""
    refused: Annotated[str | None, OMIT] = None
    """Why there is no such stream; the scheduler closes it. The other fields mean nothing then."""


class SchedulerFrame(Message, frozen=True, kw_only=True):
    """A definition, or only an acknowledgement."""

    sequence: U64
    """Number of `definition`; without one, of the next to come."""
    acknowledged: U64
    """Sequence number of the first status update that is not handled."""
    definition: Annotated[TaskDefinition | None, OMIT] = None


class WorkerFrame(Message, frozen=True, kw_only=True):
    """A status update, or only an acknowledgement."""

    sequence: U64
    """Number of `report`; without one, of the next to come."""
    acknowledged: U64
    """Sequence number of the first definition that was not received."""
    report: Annotated[StatusUpdate | None, OMIT] = None
