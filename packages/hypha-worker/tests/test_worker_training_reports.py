"""Reports of several batches: in one message where the strategy takes them, one by one elsewhere, and in an outage."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from hypha_net import rpc
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.batch_reports import REPORT_BATCHES, BatchesCounted, ReportBatches, TrainedBatches
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import (
    REPORT,
    BatchDone,
    Continue,
    Done,
    ReportAnswer,
    ReportError,
    ReportTraining,
    ScheduleUpdate,
    TrainedBatch,
)
from hypha_worker.bridge.training_reports import BATCH_TIMEOUT, TrainingReports
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import BridgeError

pytestmark = pytest.mark.virtual_clock

ATTEMPT = AttemptId(uuid.UUID(int=1), "train-1", 0)


def trained(first: int, count: int, number: int = 4) -> TrainedBatches:
    return TrainedBatches(
        round=number, first=first, batches=tuple(TrainedBatch(batch_size=8, slices={"1": 8}) for _ in range(count))
    )


@dataclass
class Scene:
    """A worker's reports and its scheduler."""

    network: MemoryNetwork
    worker: MemoryEndpoint
    scheduler: MemoryEndpoint
    contact: SchedulerContact
    reports: TrainingReports
    single: list[ReportTraining] = field(default_factory=list)
    several: list[ReportBatches] = field(default_factory=list)
    answers: list[ReportAnswer] = field(default_factory=list)
    """Answers to reports of single batches; then `Continue`."""
    answer: BatchesCounted = field(default_factory=lambda: BatchesCounted(counted=9, last=12))
    """Answer to several batches."""

    def take_single(self) -> None:
        async def handle(_peer: PeerId, request: ReportTraining) -> ReportAnswer:
            self.single.append(request)
            return self.answers.pop(0) if self.answers else Continue()

        rpc.serve(self.scheduler, REPORT, handle)

    def take_several(self) -> None:
        async def handle(_peer: PeerId, request: ReportBatches) -> BatchesCounted:
            self.several.append(request)
            return self.answer

        rpc.serve(self.scheduler, REPORT_BATCHES, handle)


@asynccontextmanager
async def open_scene(*, waits: bool = True, takes_batches: bool = True) -> AsyncIterator[Scene]:
    network = MemoryNetwork()
    async with network.endpoint("worker") as worker, network.endpoint("scheduler") as scheduler:
        await worker.connect_peer(scheduler.peer_id)
        contact = SchedulerContact(worker, scheduler.peer_id, may_wait=lambda: waits)
        reports = TrainingReports(ATTEMPT, contact, takes_batches=takes_batches)
        yield Scene(network, worker, scheduler, contact, reports)


@pytest.mark.parametrize("waits", [True, False], ids=["with a grace", "without"])
async def test_several_batches_travel_in_one_message(waits: bool) -> None:
    async with open_scene(waits=waits) as scene:
        scene.take_single()
        scene.take_several()
        assert await scene.reports.report_batches(trained(6, 3)) == BatchesCounted(counted=9, last=12)
        batches = trained(6, 3).batches
        assert scene.several == [ReportBatches(attempt=ATTEMPT, round=4, first=6, batches=batches)]
        assert scene.single == []


@pytest.mark.parametrize("waits", [True, False], ids=["with a grace", "without"])
async def test_a_strategy_that_takes_no_several_gets_one_report_a_batch(waits: bool) -> None:
    async with open_scene(waits=waits, takes_batches=False) as scene:
        scene.take_single()
        scene.answers = [Continue(), ScheduleUpdate(counter=7), Continue()]
        report = scene.reports.report_batches
        assert await report(trained(0, 3)) == BatchesCounted(counted=3, last=9)
        assert [request.progress for request in scene.single] == [BatchDone(batch_size=8, slices={"1": 8})] * 3
        assert await report(trained(3, 1)) == BatchesCounted(counted=4, last=9)
        scene.answers = [ScheduleUpdate(counter=2)]
        assert await report(trained(4, 1)) == BatchesCounted(counted=5, last=7)
        assert await report(trained(0, 1, number=5)) == BatchesCounted(counted=1), "the end of another round"
        scene.answers = [Continue(), Done()]
        assert await report(trained(1, 3, number=5)) == BatchesCounted(counted=3, done=True)
        scene.answers = [ReportError(reason="no such job")]
        assert await report(trained(3, 1, number=5)) == BatchesCounted(counted=4, reason="no such job")
        assert len({request.id for request in scene.single}) == len(scene.single)


async def test_the_end_of_a_round_that_is_begun_anew_is_not_that_of_before() -> None:
    async with open_scene(takes_batches=False) as scene:
        scene.take_single()
        scene.answers = [ScheduleUpdate(counter=7)]
        assert await scene.reports.report_batches(trained(0, 1)) == BatchesCounted(counted=1, last=8)
        assert await scene.reports.report_batches(trained(0, 1)) == BatchesCounted(counted=1)


async def test_batches_of_an_outage_are_reported_again_after_it() -> None:
    async with open_scene() as scene:
        scene.take_several()
        report, scheduler = scene.reports.report_batches, scene.scheduler.peer_id
        scene.network.partition(scene.worker.peer_id, scheduler)
        began = anyio.current_time()
        assert await report(trained(6, 1)) == BatchesCounted(counted=6), "none is counted"
        assert anyio.current_time() - began <= BATCH_TIMEOUT
        began = anyio.current_time()
        assert await report(trained(6, 2)) == BatchesCounted(counted=6)
        assert anyio.current_time() == began, "later ones do not wait"
        scene.network.heal(scene.worker.peer_id, scheduler)
        await scene.worker.connect_peer(scheduler)
        scene.contact.is_confirmed = True
        assert await report(trained(6, 3)) == BatchesCounted(counted=9, last=12)
        assert [(each.first, len(each.batches)) for each in scene.several] == [(6, 3)]


async def test_a_refusal_counts_only_of_a_scheduler_that_runs_the_job() -> None:
    async with open_scene() as scene:
        began = anyio.Event()

        async def lose_confirmation(_peer: PeerId, _request: ReportBatches) -> BatchesCounted:
            began.set()
            scene.contact.is_confirmed = False  # the connection was lost meanwhile: another process answers
            return BatchesCounted(counted=0, reason="no such job")

        rpc.serve(scene.scheduler, REPORT_BATCHES, lose_confirmation)
        assert await scene.reports.report_batches(trained(6, 1)) == BatchesCounted(counted=6)
        assert began.is_set()
        scene.contact.is_confirmed = True
        scene.answer = BatchesCounted(counted=0, reason="no such job")
        scene.take_several()
        assert await scene.reports.report_batches(trained(6, 1)) == scene.answer


async def test_a_job_that_ends_with_its_lease_fails_when_the_scheduler_stays_away() -> None:
    async with open_scene(waits=False) as scene:
        scene.take_several()
        scene.network.partition(scene.worker.peer_id, scene.scheduler.peer_id)
        with pytest.raises(BridgeError):
            await scene.reports.report_batches(trained(6, 1))
