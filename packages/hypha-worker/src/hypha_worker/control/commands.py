"""What a worker's owner asks it for over the control socket: ``status``, ``pause``, ``resume`` and ``drain``.

That a worker is paused is a file in its control folder, so that it stays so over restarts. The first answer to
``drain`` says what is drained; the second, when the worker's jobs have ended and its leases are given back, what was
cancelled. Closing the connection does not stop the drain.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
from msgspec.structs import asdict

from hypha_net.node.accounts import time_text
from hypha_net.node.descriptors import descriptor_limit
from hypha_net.peer_names import known_name
from hypha_proto.resources import Resources
from hypha_proto.whole_directory import sync
from hypha_worker.accounts.storage import earned_since, read_accounts
from hypha_worker.bidding.rejection import MAX_EXECUTORS
from hypha_worker.bidding.request_history import DecidedRequest, RequestHistory
from hypha_worker.control.server import Answer
from hypha_worker.draining import WorkerDrain
from hypha_worker.executor_health import ExecutorHealth
from hypha_worker.leasing.lease_manager import Lease, LeaseManager
from hypha_worker.leasing.terms import MAX_DRAIN
from hypha_worker.tasks.task_run import TaskRun
from hypha_worker.work_dir import control_folder, prepare_control_folder

if TYPE_CHECKING:
    from hypha_net.node.health import Readiness

_log = logging.getLogger(__name__)

PAUSED_NAME: Final = "paused"
_LAST_ANSWERS: Final = 1.0
"""Seconds in which clients must take the last answer to ``drain``."""


# --------------------------------------------------------------------------------------------------------------- status


@dataclass(frozen=True, slots=True)
class StatusCommand:
    """Tells what the worker does, and why requests get no offer."""

    draining: WorkerDrain
    history: RequestHistory
    readiness: Readiness
    health: Sequence[ExecutorHealth]
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
        endpoint, leases = self.draining.endpoint, self.draining.lease_manager
        now = anyio.current_time()
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
                {"executor": str(health.executor), "reason": health.exclusion}
                for health in self.health
                if health.exclusion is not None
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
        "since": None if lease.task_began is None else time_text(since_epoch + lease.task_began),
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


# ---------------------------------------------------------------------------------------------------------------- pause


def load_pause(work_dir: Path) -> bool:
    """Return whether the worker with this work directory is paused, and log it."""
    path = control_folder(work_dir) / PAUSED_NAME
    is_paused = path.exists()
    if is_paused:
        _log.warning("this worker is paused and makes no offers: hypha-worker resume ends that (%s)", path)
    return is_paused


def store_pause(work_dir: Path, *, is_paused: bool) -> None:
    """Store whether a worker is paused; when this returns, it is on disk.

    Raises:
        OSError: it cannot be stored.
    """
    folder = prepare_control_folder(work_dir)
    path = folder / PAUSED_NAME
    if is_paused:
        path.touch(mode=0o600)
    else:
        path.unlink(missing_ok=True)
    sync(folder)


@dataclass(frozen=True, slots=True)
class PauseCommands:
    """Let the worker make no more offers until its owner wants so."""

    work_dir: Path
    leases: LeaseManager
    on_resume: Callable[[], Awaitable[None]]
    """Called when the worker is resumed, also if it was not paused."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while the state on disk and in memory changes, so that commands at the same time leave both equal."""

    async def pause(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        await self._set(arguments, is_paused=True)
        await answer({"paused": True, "jobs": sum(lease.has_task for lease in self.leases.leases)})

    async def resume(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        await self._set(arguments, is_paused=False)
        await self.on_resume()
        await answer({"paused": False, "draining": self.leases.is_closed})

    async def _set(self, arguments: Mapping[str, Any], *, is_paused: bool) -> None:
        if arguments:
            raise ValueError("pause and resume take no arguments")
        async with self._lock:
            await anyio.to_thread.run_sync(lambda: store_pause(self.work_dir, is_paused=is_paused))
            if self.leases.is_paused != is_paused:
                _log.info("paused by its owner: no more offers" if is_paused else "resumed by its owner")
            self.leases.is_paused = is_paused


# ---------------------------------------------------------------------------------------------------------------- drain


@dataclass(slots=True)
class DrainCommand:
    """Drains the worker, and tells what has become of its jobs."""

    draining: WorkerDrain
    drain_timeout: float
    """Seconds of a drain whose client names none."""
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _cancelled: Sequence[TaskRun] = ()
    """Tasks that the end of the drain cancelled."""
    _waiting: int = 0
    """Clients that wait for the end of the drain."""
    _answered: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        timeout = parse_timeout(arguments)
        self._waiting += 1
        try:
            self.draining.request(self.drain_timeout if timeout is None else timeout, "its owner drains it")
            jobs = [_describe_drained(job) for job in self.draining.running]
            await answer({"draining": True, "seconds": round(self.draining.left, 3), "jobs": jobs})
            await self._ended.wait()
            await answer({"drained": True, "cancelled": [_describe_drained(job) for job in self._cancelled]})
        finally:
            self._waiting -= 1
            self._answered.set()
            self._answered = anyio.Event()

    async def report_end(self, cancelled: Sequence[TaskRun]) -> None:
        """Tell the clients that the drain is over.

        Args:
            cancelled: tasks that ran longer than the drain.
        """
        self._cancelled = cancelled
        self._ended.set()
        with anyio.move_on_after(_LAST_ANSWERS):
            while self._waiting:
                await self._answered.wait()


def parse_timeout(arguments: Mapping[str, Any]) -> float | None:
    """Return the seconds of a request to drain; None if it names none.

    Raises:
        ValueError: they are no usable number.
    """
    timeout = arguments.get("timeout")
    if timeout is None:
        return None
    if type(timeout) not in (int, float) or not math.isfinite(timeout) or not 0 <= timeout <= MAX_DRAIN:
        raise ValueError(f"drain.timeout: {timeout!r} is not a number of seconds from 0 to {MAX_DRAIN:g}")
    return float(timeout)


def _describe_drained(run: TaskRun) -> dict[str, str]:
    return {
        "job_id": str(run.attempt.job_id),
        "task": run.attempt.task,
        "executor": run.spec.executor,
        "lease": str(run.lease.id),
        "scheduler": str(run.lease.scheduler),
    }
