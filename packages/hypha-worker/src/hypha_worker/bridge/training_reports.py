"""Reports of a training job to its scheduler, which may be away for a while: the executor trains on meanwhile.

Several batches travel in one message if the strategy takes them so, otherwise each in a report of its own.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from hypha_net import rpc
from hypha_net.errors import NetError
from hypha_proto.attempt_id import AttemptId
from hypha_proto.batch_reports import REPORT_BATCHES, BatchesCounted, ReportBatches, TrainedBatches, report_of
from hypha_proto.protocols import RpcMethod
from hypha_proto.training_reports import (
    REPORT,
    BatchDone,
    Continue,
    Done,
    ReportAnswer,
    ReportError,
    ReportTraining,
    ScheduleUpdate,
    TrainingReport,
)
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import to_bridge_error

_log = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")

BATCH_TIMEOUT: Final = 5.0
"""Seconds that the report of a batch may take, if the job may go on without an answer."""
MAX_UNREPORTED: Final = 1000
"""Slices of which samples are counted while they cannot be reported."""
_INDEX_DIGITS: Final = 20
_MAX_COUNT: Final = (1 << 32) - 1


@dataclass(slots=True)
class TrainingReports:
    """Reports of one executor to its scheduler."""

    attempt: AttemptId
    contact: SchedulerContact
    takes_batches: bool = False
    """Whether the strategy takes several batches in one message."""
    _last: tuple[int, int | None] = (0, None)
    """A round whose batches are reported one by one, and the number of its last batch if it is known."""
    _unreported: Counter[str] = field(default_factory=Counter)
    """Samples taken from each slice in batches that were not reported during an outage."""

    async def report(self, progress: TrainingReport) -> ReportAnswer:
        """Report progress; wait for the scheduler as long as the job may. Raises `BridgeError`."""
        try:
            return await self.contact.call(
                REPORT, self._request(progress), is_refusal=lambda answer: isinstance(answer, ReportError)
            )
        except NetError as error:
            raise to_bridge_error(error) from error

    async def report_batch(self, batch: BatchDone) -> ReportAnswer:
        """Report a batch; let the executor go on at once if the scheduler cannot be reached, and may come back.

        Raises:
            BridgeError: the scheduler cannot be reached, and the job ends with its lease.
        """
        if not self.contact.may_wait():
            return await self.report(batch)
        answer = await self._try(REPORT, self._request(self._with_unreported(batch)))
        if answer is None or (isinstance(answer, ReportError) and not self.contact.is_confirmed):
            self._note_unreported(batch)
            return Continue()
        self._unreported.clear()
        return answer

    async def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        """Report several batches; a scheduler that is silent, and may come back, counts none of them yet.

        Raises:
            BridgeError: the scheduler cannot be reached, and the job ends with its lease.
        """
        if self.takes_batches:
            try:
                return await self._report_at_once(trained)
            except NetError as error:
                raise to_bridge_error(error) from error
        return await self._report_one_by_one(trained)

    async def _report_at_once(self, trained: TrainedBatches) -> BatchesCounted:
        """Raises `NetError`."""
        message = ReportBatches(attempt=self.attempt, **msgspec.structs.asdict(trained))
        if not self.contact.may_wait():
            return await self.contact.call(REPORT_BATCHES, message, is_refusal=lambda answer: bool(answer.reason))
        answer = await self._try(REPORT_BATCHES, message)
        if answer is None or (answer.reason and not self.contact.is_confirmed):
            return BatchesCounted(counted=trained.first)
        return answer

    async def _report_one_by_one(self, trained: TrainedBatches) -> BatchesCounted:
        """Report to a strategy that takes one batch in a message."""
        if self._last[0] != trained.round or not trained.first:
            self._last = (trained.round, None)
        for counted, batch in enumerate(trained.batches, trained.first + 1):
            match await self.report_batch(report_of(batch)):
                case Done():
                    return BatchesCounted(counted=counted, done=True)
                case ReportError(reason=reason):
                    return BatchesCounted(counted=counted, reason=reason or "its log says why")
                case ScheduleUpdate(counter=counter):
                    self._last = (trained.round, min(counted + counter, _MAX_COUNT))
        return BatchesCounted(counted=trained.first + len(trained.batches), last=self._last[1])

    async def _try(self, method: RpcMethod[Req, Resp], request: Req) -> Resp | None:
        """Call the scheduler if it is there; return None if it does not answer soon."""
        contact = self.contact
        if not (contact.is_confirmed and contact.is_connected):
            return None
        try:
            return await rpc.call(contact.endpoint, contact.scheduler, method, request, timeout=BATCH_TIMEOUT)
        except NetError as error:
            _log.info("batches were not reported, the executor goes on: %s", error)
            contact.is_confirmed = False
            return None

    def _note_unreported(self, batch: BatchDone) -> None:
        """Keep the counts of a batch for the next report, within what a report may carry."""
        for index, samples in (batch.slices or {}).items():
            if index in self._unreported or (len(self._unreported) < MAX_UNREPORTED and len(index) <= _INDEX_DIGITS):
                self._unreported[index] = min(self._unreported[index] + samples, _MAX_COUNT)

    def _with_unreported(self, batch: BatchDone) -> BatchDone:
        """Return a batch with the samples of those before it that were not reported, by slice."""
        if not self._unreported:
            return batch
        counts = self._unreported + Counter(batch.slices or {})
        return msgspec.structs.replace(batch, slices={index: min(counts[index], _MAX_COUNT) for index in counts})

    def _request(self, progress: TrainingReport) -> ReportTraining:
        return ReportTraining(self.attempt, progress, id=uuid.uuid4())
