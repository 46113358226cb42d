"""What `jobs` asks of whatever runs a job, be it a process or the parameter server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio

from hypha_net.endpoint import Endpoint
from hypha_net.transfer import FilePushTarget
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec
from hypha_proto.leases import Outcome
from hypha_proto.round_membership import MembersKnown, RoundMembers
from hypha_proto.transfer import PushHeader, Refusal
from hypha_worker.leasing.capacity import Allocation

GIGABYTE = 10**9
_UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class JobContext:
    """One dispatch of a job, for whatever runs it."""

    endpoint: Endpoint
    spec: JobSpec
    lease: uuid.UUID
    scheduler: PeerId
    allocation: Allocation
    work_dir: Path
    """A folder of its own; it exists while the job runs."""
    scope: anyio.CancelScope
    """Cancelled when this job is to end; what is cancelled around it is the worker."""
    traceparent: str | None = None
    """Trace that the job belongs to."""

    @property
    def max_bytes(self) -> int:
        """The largest file that the job may bring: its leased storage, or a tebibyte if it leased none."""
        return int(self.allocation.resources.storage * GIGABYTE) or _UNLIMITED


@dataclass(slots=True)
class ExecutionTrace:
    """What a run leaves behind for its report, however it ends."""

    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """How a job ended."""

    outcome: Outcome
    reason: str = ""
    trace: ExecutionTrace = field(default_factory=ExecutionTrace)


class ExecutionError(Exception):
    """A job cannot go on; the message is the reason that its scheduler reads."""


class Execution(Protocol):
    """A job that runs."""

    @property
    def senders(self) -> Set[PeerId]:
        """Peers whose pushes are for this job."""
        ...

    @property
    def accepted_push_kind(self) -> str:
        """The kind of push that is for this job."""
        ...

    @property
    def trace(self) -> ExecutionTrace:
        """What is known so far about the end."""
        ...

    async def run(self) -> None:
        """Run to the end. When it returns, raises or is cancelled, nothing of the job runs any more.

        Raises:
            ExecutionError: the job failed.
        """
        ...

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Where a file may land that `peer` is about to push to this job."""
        ...

    async def set_round_members(self, message: RoundMembers) -> MembersKnown:
        """Take the scheduler's word on who is in a round."""
        ...


ExecutionFactory = Callable[[JobContext], Execution]
