"""The command ``status`` of the control socket: what the worker does, and why requests get no offer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from msgspec.structs import asdict

from hypha_net.endpoint import Endpoint
from hypha_net.node.accounts import time_text
from hypha_net.node.descriptors import descriptor_limit
from hypha_net.peer_names import known_name
from hypha_proto.resources import Resources
from hypha_worker.accounts.storage import earned_since, read_accounts
from hypha_worker.bidding.rejection import MAX_EXECUTORS
from hypha_worker.bidding.request_history import DecidedRequest, RequestHistory
from hypha_worker.control.server import Answer
from hypha_worker.draining import WorkerDrain
from hypha_worker.executor_starts import ExecutorStarts
from hypha_worker.leasing.lease_manager import Lease, LeaseManager
from hypha_worker.tasks.task_run import TaskRun

if TYPE_CHECKING:
    from hypha_net.node.health import Readiness


@dataclass(frozen=True, slots=True)
class StatusCommand:
    """See the module; with the parts of a worker that its status is read from."""

    endpoint: Endpoint
    leases: LeaseManager
    draining: WorkerDrain
    history: RequestHistory
    readiness: Readiness
    starts: Sequence[ExecutorStarts]
    work_dir: Path

    async def run(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        if arguments:
            raise ValueError("status takes no arguments")
        now = time.time()
        accounts = await anyio.to_thread.run_sync(read_accounts, self.work_dir, now)
        midnight = datetime.fromtimestamp(now).astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
        earned = round(earned_since(accounts, midnight.timestamp()), 6)
        await answer({**self._describe(), "earned_today": earned})

    def _describe(self) -> dict[str, Any]:
        """Return the status as JSON values; times are UTC."""
        endpoint, leases, now = self.endpoint, self.leases, anyio.current_time()
        failures, since_epoch = endpoint.gateway_failures(), time.time() - now
        peers = [
            *(peer for peer in endpoint.gateways().values() if peer is not None),
            *(lease.scheduler for lease in leases.leases),
            *(decided.received.scheduler for decided in self.history.decided),
        ]
        return {
            "peer_id": str(endpoint.peer_id),
            "names": {str(peer): name for peer in peers if (name := known_name(peer)) is not None},
            "state": "draining" if leases.is_closed else "paused" if leases.is_paused else "running",
            "ready": self.readiness.is_ready,
            "reason": self.readiness.reason,
            "gateways": [
                {"address": address, "peer": None if peer is None else str(peer), "failure": failures.get(address)}
                for address, peer in endpoint.gateways().items()
            ],
            "excluded": [
                {"executor": str(starts.executor), "reason": starts.exclusion}
                for starts in self.starts
                if starts.exclusion is not None
            ],
            "open_files": descriptor_limit(),
            "free": _amounts(leases.free.resources),
            "leases": [_describe_lease(lease, now) for lease in leases.leases],
            "jobs": [_describe_task(run, since_epoch) for run in self.draining.running],
            "requests": [_describe_request(decided) for decided in reversed(self.history.decided)],
        }


def _describe_lease(lease: Lease, now: float) -> dict[str, Any]:
    return {
        "lease": str(lease.id),
        "scheduler": str(lease.scheduler),
        "state": lease.state.value,
        "price": lease.price,
        "job": None if lease.job_id is None else str(lease.job_id),
        "resources": _amounts(lease.allocation.resources),
        "seconds": round(lease.charged, 3),
        "tokens": round(lease.owed, 6),
        "expires_in": round(lease.remaining(now), 3),
    }


def _describe_task(run: TaskRun, since_epoch: float) -> dict[str, Any]:
    about, lease = run.attempt, run.lease
    return {
        "job": str(about.job_id),
        "task": about.task,
        "executor": run.spec.executor,
        "scheduler": str(lease.scheduler),
        "lease": str(lease.id),
        "since": None if lease.job_began is None else time_text(since_epoch + lease.job_began),
        "price": lease.price,
    }


def _describe_request(decided: DecidedRequest) -> dict[str, Any]:
    request = decided.received.request
    return {
        "at": time_text(decided.decided_at),
        "scheduler": str(decided.received.scheduler),
        "request": str(request.id),
        "executors": list(map(str, request.spec.executor[:MAX_EXECUTORS])),
        "resources": _amounts(request.spec.resources),
        "bid": request.bid,
        "price": decided.price,
        "reasons": list(decided.reasons),
    }


def _amounts(resources: Resources) -> dict[str, float]:
    """Return the amounts that are not 0."""
    return {name: round(amount, 6) for name, amount in asdict(resources).items() if amount}
