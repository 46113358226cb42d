"""Status of a worker, for schedulers: its resources, those that are free, its price, and what runs.

Uses the extension ``/hypha-worker/0.1.0``, which workers answer.
"""

from __future__ import annotations

import re
from typing import Final

from hypha_proto.ids import NAME
from hypha_proto.leases import Rejection
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.protocols import WORKER, RpcMethod
from hypha_proto.resources import Resources
from hypha_proto.texts import quote
from hypha_proto.wire_schema import U32, Message, Price

MAX_EXECUTORS: Final = 256
"""Maximum number of executors that a worker names."""


class OfferedExecutor(ExecutorDescriptor, frozen=True):
    """Executor that a worker offers."""

    runtime: str
    """What runs its tasks, by the name in the worker's configuration: ``process`` or ``parameter-server``."""

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.runtime):
            raise ValueError(f"runtime {quote(self.runtime)} is no name: use 1 to 64 letters, digits and _.-")


class DescribeWorker(Message, frozen=True):
    """Request of a scheduler for the status of a worker."""


class WorkerStatus(Message, frozen=True):
    """Response to `DescribeWorker`."""

    total: Resources
    free: Resources
    """Part of `total` that no lease holds."""
    price: Price
    """The least bid that gets an offer, in tokens per lease-hour."""
    executors: tuple[OfferedExecutor, ...]
    """At most `MAX_EXECUTORS`."""
    tasks: U32
    """Attempts at tasks that run, of all schedulers."""
    rejections: tuple[Rejection, ...] = ()
    """Why it would make no offer to this scheduler, even for a request without resources."""

    def __post_init__(self) -> None:
        if len(self.executors) > MAX_EXECUTORS:
            raise ValueError(f"executors: {len(self.executors)} entries; expected at most {MAX_EXECUTORS}")


DESCRIBE_WORKER: Final = RpcMethod(WORKER, DescribeWorker, WorkerStatus, max_request=4 << 10, max_response=256 << 10)
