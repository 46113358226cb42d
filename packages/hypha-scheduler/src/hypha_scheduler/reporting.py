"""Job report: events in ``metrics.jsonl``, records in ``journal.jsonl``, and worker metrics for the status bridge.

Called by `training` for everything that happens in a job. Programs such as `hypha-local` and `export-metrics` read the
events. The journal is for people after a crash: the next scheduler names the job, and cannot resume it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from hypha_net import instrumentation
from hypha_proto.ids import PeerId
from hypha_scheduler.allocation.auction import AcceptedOffer
from hypha_scheduler.end_record import EndRecord
from hypha_scheduler.journal import JOURNAL, Journal
from hypha_scheduler.metrics.status_bridge import EVENTS, EventFile, StatusBridge
from hypha_scheduler.strategies.diloco.rounds import Late, Measured, RoundClosed

_SCHEDULER_METRICS: Final = frozenset({"samples", "batch_size", "utilisation"})
"""Metrics that the scheduler computes itself; reports of workers with these names are not posted."""
_ROUND_SECONDS: Final = instrumentation.Histogram("hypha.scheduler.round.duration", "s", "Duration of a job's rounds.")
_SAMPLES: Final = instrumentation.Counter("hypha.scheduler.samples", "{sample}", "Samples of closed rounds.")


class JobReport:
    """Event file, journal and metrics bridge of one job; a context manager that opens and closes the files."""

    def __init__(self, directory: Path, bridge: StatusBridge | None = None) -> None:
        """Report to files in `directory`, which must exist, and to `bridge` if there is one."""
        self._directory = directory
        self._bridge = bridge
        self._job_id: str | None = None
        self._resources = ExitStack()
        self._events: EventFile
        self._journal: Journal

    def __enter__(self) -> JobReport:
        self._events = self._resources.enter_context(EventFile(self._directory / EVENTS))
        self._journal = self._resources.enter_context(Journal(self._directory / JOURNAL))
        self._journal.lock()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._resources.close()

    def emit(self, event: str, **fields: object) -> None:
        """Write an event to ``metrics.jsonl``."""
        self._events.write(event, **fields)

    def persist(self, kind: str, **fields: object) -> None:
        """Write a journal record and wait until it is on disk."""
        self._journal.record(kind, **fields)

    def persist_async(self, kind: str, **fields: object) -> None:
        """Write a journal record without waiting for the disk."""
        self._journal.record_async(kind, **fields)

    def accepted(self, job_id: uuid.UUID, job: Mapping[str, object]) -> None:
        """Report the start of the job; secrets in `job` must be masked already."""
        self._job_id = str(job_id)
        self.persist("accepted", job_id=str(job_id), job=job)
        self.emit("accepted", job_id=str(job_id), directory=str(self._directory))

    def placed(self, offers: tuple[AcceptedOffer, ...], seconds: float) -> None:
        """Report that all leases are held, `seconds` after the first request."""
        workers = [{"peer": str(offer.peer), "role": offer.role, "price": offer.price} for offer in offers]
        self.emit("placement", seconds=round(seconds, 4), workers=workers)
        leases = [{"peer": str(offer.peer), "role": offer.role, "lease": str(offer.lease)} for offer in offers]
        self.persist("placed", leases=leases)

    def measured(self, measured: Measured) -> None:
        """Report the metrics of a worker over a round."""
        for name, value in measured.values.items():
            self.emit("metric", worker=str(measured.peer), round=measured.round, name=name, value=value)
            if name not in _SCHEDULER_METRICS:
                self._post(measured.peer, measured.round, name, value)

    def late(self, late: Late) -> None:
        """Report that a round continues without a late worker, which takes part again in the next."""
        self.emit("worker_late", worker=str(late.peer), round=late.round, seconds=round(late.seconds, 4))

    def _post(self, worker: PeerId, number: int, name: str, value: float) -> None:
        if self._bridge is not None:
            self._bridge.put(str(worker), number, name, value, job_id=self._job_id)

    def round_closed(self, closed: RoundClosed, update_bytes: int) -> None:
        """Report a closed round; `update_bytes` is the size of its outer update, and of each worker's update."""
        samples, members = sum(closed.samples.values()), len(closed.samples)
        self.emit(
            "round",
            round=closed.round,
            samples=samples,
            loss=closed.loss,
            samples_per_second=round(samples / closed.seconds, 2) if closed.seconds > 0 else None,
            seconds=round(closed.seconds, 4),
            waits={str(peer): round(wait, 4) for peer, wait in closed.waits.items()},
            counts={str(peer): count for peer, count in closed.batches.items()},
            update_bytes=update_bytes * (2 * members + 1),  # from every member, and to every member and the scheduler
        )
        _ROUND_SECONDS.record(closed.seconds)
        _SAMPLES.add(samples)
        self.persist_async("round", round=closed.round, samples=samples)
        for peer, count in closed.samples.items():
            self._post(peer, closed.round, "samples", count)
            if batches := closed.batches[peer]:
                self._post(peer, closed.round, "batch_size", count / batches)
            if closed.seconds > 0:
                self._post(peer, closed.round, "utilisation", max(0.0, 1.0 - closed.waits[peer] / closed.seconds))

    def failed(self, error: str) -> EndRecord:
        """Return the record of the job's failure."""
        return EndRecord(self._directory, "failed", {"error": error}, {"error": error})

    def finished(self, summary: dict[str, object]) -> EndRecord:
        """Return the record of the job's success."""
        return EndRecord(self._directory, "finished", {"rounds": summary["rounds"]}, summary)
