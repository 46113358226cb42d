"""What other nodes say, for the clients of the scheduler's socket: for the commands ``nodes`` and ``logs``.

The workers are those that subscribe to requests or are found in the DHT, asked for their status, and those that were
connected since the scheduler started. Logs are what executors of a job have printed, as its workers keep it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import msgspec

from hypha_net import rpc
from hypha_net.dataset_directory import list_datasets
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_net.events import Connected, Disconnected
from hypha_net.peer_names import known_name
from hypha_proto.dataset_listing import ListedDataset
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId, printable_name
from hypha_proto.job_logs import LIST_LOGS, MAX_TEXT, READ_LOG, ListLogs, ReadLog
from hypha_proto.resources import Resources
from hypha_proto.texts import shorten
from hypha_proto.worker_status import DESCRIBE_WORKER, DescribeWorker, WorkerStatus
from hypha_scheduler.allocation.shortage_report import find_candidates

_TIMEOUT: Final = 4.0
"""Seconds for a worker's answer, for finding workers, and for the lists of gateways."""
_QUESTIONS: Final = 64
"""Workers that are asked at a time; further ones wait."""
_MAX_KNOWN: Final = 1000
"""Workers that are remembered; of more, the ones that were seen longest ago go."""
_MAX_TEXT: Final = 200
_LOG_TIMEOUT: Final = 10.0
"""Seconds for a worker's answer about logs."""
_LOG_REQUESTS: Final = 16
"""Requests for logs at a time; further ones wait."""


class WorkerEntry(msgspec.Struct, omit_defaults=True):
    """A worker as ``nodes`` shows it."""

    peer: str
    name: str | None = None
    seen: float = 0.0
    """When it was last connected or answered, in seconds since the Unix epoch."""
    total: Resources | None = None
    """None if it has not answered."""
    free: Resources | None = None
    price: float | None = None
    """The least bid that gets an offer, in tokens per lease-hour."""
    executors: tuple[str, ...] = ()
    tasks: int | None = None
    """Attempts at tasks that run there, of all schedulers."""
    reasons: tuple[str, ...] = ()
    """Why it makes no offers, or gives no answer."""


@dataclass(slots=True)
class NodeDirectory:
    """What a scheduler knows of other nodes."""

    endpoint: Endpoint
    clock: Callable[[], float] = time.time
    _seen: dict[PeerId, float] = field(default_factory=dict)
    """When each worker was last seen, the latest last."""
    _log_requests: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(_LOG_REQUESTS))

    async def watch(self) -> None:
        """Note workers that connect and leave, until cancelled."""
        with self.endpoint.events.follow(Connected, Disconnected) as events:
            async for event in events:
                if isinstance(event, Connected | Disconnected):
                    about = self.endpoint.connected_peers().get(event.peer)
                    if event.peer in self._seen or (about is not None and about.role == "worker"):
                        self._note(event.peer)

    def _note(self, peer: PeerId) -> None:
        self._seen.pop(peer, None)
        self._seen[peer] = self.clock()
        if len(self._seen) > _MAX_KNOWN:
            del self._seen[next(iter(self._seen))]

    async def describe(self) -> dict[str, Any]:
        """Return ``workers`` and ``datasets`` in the order of their names, as plain values."""
        found: dict[PeerId, WorkerEntry] = {}
        datasets: dict[str, Any] = {}

        async def ask_gateways() -> None:
            datasets.update(await list_known(self.endpoint, _TIMEOUT) or {})

        questions = anyio.CapacityLimiter(_QUESTIONS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_gateways)
            for peer in {*self._seen, *await find_candidates(self.endpoint, _TIMEOUT)}:
                tasks.start_soon(self._ask, peer, questions, found)
        workers = sorted(found.values(), key=lambda entry: (entry.name or "", entry.peer))
        return {
            "workers": msgspec.to_builtins(workers),
            "datasets": [msgspec.to_builtins(datasets[name]) for name in sorted(datasets)],
        }

    async def _ask(self, peer: PeerId, questions: anyio.CapacityLimiter, found: dict[PeerId, WorkerEntry]) -> None:
        entry = WorkerEntry(str(peer))
        try:
            async with questions:
                status = await rpc.call(self.endpoint, peer, DESCRIBE_WORKER, DescribeWorker(), timeout=_TIMEOUT)
            self._note(peer)
            _fill(entry, status)
        except UnsupportedProtocolError:
            entry.reasons = ("it is older than 0.3 and does not say what it has",)
        except NetError as error:
            entry.reasons = (f"no answer: {error}",)
        if peer in self._seen:  # others are no workers
            about = self.endpoint.connected_peers().get(peer)
            name = known_name(peer) if about is None else about.certificate_name
            entry.name = None if name is None else printable_name(name)
            entry.seen = self._seen[peer] if about is None else self.clock()
            found[peer] = entry

    async def ask_logs(self, job_id: uuid.UUID, worker: str, run: str | None, position: int) -> dict[str, Any]:
        """Return the fields of `LogsListed`, or with `run` those of `LogPart`; or ``error`` and ``code``."""
        try:
            peer = PeerId.parse(worker)
            async with self._log_requests:
                if run is None:
                    listing = ListLogs(job_id=job_id)
                    listed = await rpc.call(self.endpoint, peer, LIST_LOGS, listing, timeout=_LOG_TIMEOUT)
                    return dict(msgspec.to_builtins(listed))
                reading = ReadLog(job_id=job_id, run=run, position=position, limit=MAX_TEXT)
                part = await rpc.call(self.endpoint, peer, READ_LOG, reading, timeout=_LOG_TIMEOUT)
                return dict(msgspec.to_builtins(part))
        except InvalidIdError as error:
            return {"error": f"worker: {error}", "code": "invalid"}
        except UnsupportedProtocolError:
            remedy = "its owner updates hypha-worker, or reads them there with `hypha-worker logs`"
            return {"error": f"it gives no logs to schedulers: {remedy}", "code": "unsupported"}
        except NetError as error:
            return {"error": str(error), "code": "unreachable"}


def _fill(entry: WorkerEntry, status: WorkerStatus) -> None:
    entry.total, entry.free, entry.price, entry.tasks = status.total, status.free, status.price, status.tasks
    entry.executors = tuple(f"{executor} ({executor.runtime})" for executor in status.executors)
    entry.reasons = tuple(shorten(rejection.text, _MAX_TEXT) for rejection in status.rejections)


async def list_known(endpoint: Endpoint, timeout: float) -> Mapping[str, ListedDataset] | None:
    """Return by name the datasets that the connected gateways list within `timeout` seconds; None if none lists any."""
    found: dict[str, ListedDataset] = {}
    answered = False

    async def ask(gateway: PeerId) -> None:
        nonlocal answered
        try:
            found.update({each.name: each for each in await list_datasets(endpoint, gateway, timeout=timeout)})
            answered = True
        except NetError:  # it may not answer: the datasets of the others are returned
            return

    async with anyio.create_task_group() as tasks:
        for gateway in {peer for peer in endpoint.gateways().values() if peer is not None}:
            tasks.start_soon(ask, gateway)
    return found if answered else None
