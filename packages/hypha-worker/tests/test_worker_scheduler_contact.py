"""The contact of a job with its scheduler over TCP: a scheduler that is started again at its address is dialled."""

from __future__ import annotations

import uuid
from pathlib import Path

import anyio
from support.authority import Authority
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint, rpc
from hypha_net.endpoint import Endpoint
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import REPORT, Acknowledged, ReportAnswer, ReportError, ReportTraining, SendingUpdate
from hypha_worker.connectors.scheduler_contact import SchedulerContact


def answer_with(endpoint: Endpoint, answer: ReportAnswer) -> None:
    async def handle(_peer: PeerId, _report: ReportTraining) -> ReportAnswer:
        return answer

    rpc.serve(endpoint, REPORT, handle)


async def test_a_scheduler_that_is_started_again_gets_the_report_when_it_has_taken_up_the_job(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "acme")
    identity = authority.identity("scheduler")
    report = ReportTraining(AttemptId(uuid.uuid4(), "train-1", 0), SendingUpdate(), id=uuid.uuid4())
    answers: list[ReportAnswer] = []
    settings = EndpointSettings(relay_circuit=False)
    async with open_endpoint(authority.identity("worker"), settings) as worker, anyio.create_task_group() as tasks:
        contact = SchedulerContact(worker, identity.peer_id, may_wait=lambda: True)

        async def send() -> None:
            answers.append(await contact.call(REPORT, report, is_refusal=lambda each: isinstance(each, ReportError)))

        listening = EndpointSettings(("/ip4/127.0.0.1/tcp/0",), relay_circuit=False)
        async with open_endpoint(identity, listening) as scheduler:
            await worker.connect(scheduler.addresses[0])
            await until(lambda: worker.connected_peers()[identity.peer_id].addresses)
            address = scheduler.addresses[0].split("/p2p/")[0]
            tasks.start_soon(contact.keep)
        await until(lambda: not contact.is_confirmed)
        tasks.start_soon(send)
        async with open_endpoint(identity, EndpointSettings((address,), relay_circuit=False)) as scheduler:
            answer_with(scheduler, ReportError(reason="no such job yet"))
            await until(lambda: contact.is_connected)
            assert answers == []
            answer_with(scheduler, Acknowledged())
            contact.is_confirmed = True
            await until(lambda: bool(answers))
        tasks.cancel_scope.cancel()
    assert answers == [Acknowledged()]
