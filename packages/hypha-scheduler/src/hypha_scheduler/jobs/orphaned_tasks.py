"""Tasks of an earlier run of the scheduler that may still run on their leases, and the renewal of these leases.

The journal says which tasks their workers have confirmed and which have ended. The workers hold the leases of the
others for the orphan grace; a lease that is renewed in time goes on as if nothing had happened.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId
from hypha_scheduler.allocation.allocator import renew
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import Lease, TaskRef

_log = logging.getLogger(__name__)

ADOPTION_TIMEOUT: Final = 20.0
"""Seconds within which a lease must be renewed; at first this node may not be connected to the network yet."""
_RENEWAL_TIMEOUT: Final = 5.0
_RETRY_PAUSE: Final = 0.5


@dataclass(slots=True)
class OrphanedTasks:
    """What a job held when its scheduler ended."""

    tasks: dict[uuid.UUID, TaskRef] = field(default_factory=dict)
    """Tasks that their workers have confirmed and whose ends are not known, by lease."""
    leases: dict[uuid.UUID, Lease] = field(default_factory=dict)
    """All leases that may still be held."""

    @property
    def idle(self) -> tuple[Lease, ...]:
        """Leases on which no confirmed task runs."""
        return tuple(lease for id, lease in self.leases.items() if id not in self.tasks)


OnRenewed = Callable[[Lease, float, float], None]
"""Called with a renewed lease, the time at which that was asked for, and the seconds for which it lasts from then."""


def read_orphaned(records: Iterable[Mapping[str, Any]]) -> OrphanedTasks:
    """Return what a job held after the records of its journal.

    Raises:
        JobFailedError: a record is malformed.
    """
    held = OrphanedTasks()
    for number, record in enumerate(records, 1):
        try:
            _apply(held, record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            kind = record.get("record")
            raise JobFailedError(f"record {number} of the journal, {kind!r}, is malformed: {error!r}") from None
    return held


def _apply(held: OrphanedTasks, record: Mapping[str, Any]) -> None:
    match record.get("record"):
        case "accepted" | "resumed":
            held.tasks.clear()
            held.leases.clear()
            _add(held, record.get("leases", ()), record.get("tasks", ()))
        case "placed" | "leased":
            _add(held, record["leases"], ())
        case "started":
            _add(held, (), [record])
        case "interrupted" if not record["tasks_run_on"]:
            held.tasks.clear()
            held.leases.clear()
        case "finished" | "failed":
            held.tasks.clear()
            held.leases.clear()
        case "ended":
            held.tasks.pop(uuid.UUID(record["lease"]), None)


def _add(held: OrphanedTasks, leases: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]) -> None:
    for entry in leases:
        lease = Lease(
            uuid.UUID(entry["lease"]), PeerId.parse(entry["peer"]), entry["role"], float(entry.get("price", 0.0))
        )
        held.leases[lease.id] = lease
    for entry in tasks:
        lease = held.leases[uuid.UUID(entry["lease"])]
        held.tasks[lease.id] = TaskRef(str(entry["task"]), lease, int(entry["attempt"]))


async def renew_orphaned(endpoint: Endpoint, tasks: Iterable[TaskRef], on_renewed: OnRenewed) -> None:
    """Renew the leases of tasks; return when each was renewed or refused, or after `ADOPTION_TIMEOUT` seconds."""
    with anyio.move_on_after(ADOPTION_TIMEOUT):
        async with anyio.create_task_group() as renewals:
            for task in tasks:
                renewals.start_soon(_renew, endpoint, task, on_renewed)


async def _renew(endpoint: Endpoint, task: TaskRef, on_renewed: OnRenewed) -> None:
    """Renew a lease; try again until its worker answers."""
    lease = task.lease
    while True:
        asked_at = anyio.current_time()
        try:
            life = await renew(endpoint, lease.peer, lease.id, _RENEWAL_TIMEOUT)
        except NetError as error:
            _log.info("lease %s at %s could not be renewed yet: %s", lease.id, lease.peer, error)
            await anyio.sleep(_RETRY_PAUSE)
            continue
        if life is None:
            _log.warning("%s no longer has the lease of task %s", lease.peer, task.name)
        else:
            on_renewed(lease, asked_at, life)
        return
