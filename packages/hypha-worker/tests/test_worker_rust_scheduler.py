"""A scheduler of the existing Rust network: task ids of its own, none of our protocols, no answer when it is busy.

It dispatches by an id of the task, the same for every worker; it answers a worker that merges before the parameter
server has reported its outer step with ``Continue``; and once it listens no longer, its node answers with nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hypha_net import transfer
from hypha_net.endpoint import Stream
from hypha_net.rpc import read_to_end
from hypha_proto.dispatch import Dispatched, DispatchFailed
from hypha_proto.job_spec import All, PeersReference
from hypha_proto.progress import (
    BatchDone,
    Continue,
    Done,
    OuterStepTaken,
    ProgressRequest,
    ProgressResponse,
    ScheduleUpdate,
    SendingUpdate,
    UpdateMerged,
)
from hypha_proto.protocols import API
from hypha_proto.transfer import PSEUDO_GRADIENT, PushHeader
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_worker.service import open_worker

InLab = Callable[..., None]

WAITS = "time.sleep(60)\n"
UNTIL_TOLD = "while not os.path.exists(work_dir + '/go'): time.sleep(0.01)\n"


def test_a_job_is_matched_to_the_schedulers_lease_and_keeps_the_id_that_came(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        lab.write_script("post('/status/send', {'status': {'batch_size': 1}})\n" + UNTIL_TOLD)
        task, spec = uuid.uuid4(), lab.train_spec()
        await lab.scheduler.hire()
        for _ in range(2):  # the second is a repetition
            answer = await lab.scheduler.dispatch(lab.peer, task, spec)
            assert isinstance(answer, Dispatched)
            assert answer.id == task
            assert len(lab.worker.jobs.running) == 1
        (lab.worker.jobs.running[0].work_dir / "go").touch()
        await lab.scheduler.until(lambda: lab.scheduler.statuses == ["Running", "Finished"])
        assert lab.scheduler.task_ids == [task, task]

    in_lab(case, old=True)


def test_one_id_for_two_classes_starts_a_job_of_each(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        lab.write_script(WAITS)
        task, train = uuid.uuid4(), lab.train_spec()
        aggregate = msgspec.structs.replace(
            lab.aggregate_spec([lab.data.peer_id], [lab.data.peer_id], members=None), job_id=train.job_id
        )
        train_lease, server_lease = await lab.scheduler.hire(), await lab.scheduler.hire(lab.SERVER)
        for spec in (aggregate, train, aggregate, train):
            assert isinstance(await lab.scheduler.dispatch(lab.peer, task, spec), Dispatched)
        assert {job.lease: job.spec for job in lab.worker.jobs.running} == {train_lease: train, server_lease: aggregate}

    in_lab(case, old=True)


@pytest.mark.parametrize(("old", "started"), [(True, True), (False, False)])
def test_our_schedulers_dispatch_by_the_leases_id_only(in_lab: InLab, old: bool, started: bool) -> None:
    """A job of ours whose lease is over must not take another one that the same scheduler holds."""

    async def case(lab: Any) -> None:
        lab.write_script(WAITS)
        await lab.scheduler.hire()
        answer = await lab.scheduler.dispatch(lab.peer, uuid.uuid4(), lab.train_spec())
        assert isinstance(answer, Dispatched) == started

    in_lab(case, old=old)


def test_dispatches_are_counted_by_outcome(in_lab: InLab, recorded: Any) -> None:
    async def case(lab: Any) -> None:
        lab.write_script(WAITS)
        stranger = type(lab.scheduler)(lab.data)
        await lab.scheduler.hire()
        assert isinstance(await stranger.dispatch(lab.peer, uuid.uuid4(), lab.train_spec()), DispatchFailed)
        task, spec = uuid.uuid4(), lab.train_spec()
        await lab.scheduler.dispatch(lab.peer, task, spec)
        await lab.scheduler.dispatch(lab.peer, task, lab.train_spec(spec.job_id))
        await lab.scheduler.hire()
        assert isinstance(await lab.scheduler.dispatch(lab.peer, uuid.uuid4(), spec), DispatchFailed), "the job twice"
        for outcome, count in (("stranger", 1), ("accepted", 2), ("refused", 1)):
            assert recorded.total("hypha.worker.dispatches", hypha_outcome=outcome) == count, outcome

    in_lab(case, old=True)


async def write_and_push(lab: Any, sender: Any, spec: Any, value: float) -> None:
    path = lab.folder / f"update-{uuid.uuid4()}"
    write_update(path, {"w": (4,)}, [("w", np.full(4, value, np.float32))], UpdateMetadata())
    size, digest = await transfer.describe(path)
    header = PushHeader(spec.job_id, 1, PSEUDO_GRADIENT, "update", size, digest)
    await transfer.push(sender, lab.peer, path, header)


@pytest.mark.parametrize("old", [True, False], ids=["older", "ours"])
def test_an_older_scheduler_hears_of_the_step_before_any_worker_has_its_result(
    in_lab: InLab, push_receiver: Any, old: bool
) -> None:
    """A worker that merged first would be told to continue, and would train a further round for ever."""

    async def case(lab: Any) -> None:
        history: list[str] = []

        def answer(report: ProgressRequest) -> ProgressResponse:
            history.append(type(report.progress).__name__)
            return Done()

        lab.scheduler.answer = answer
        async with lab.network.endpoint("trainer") as trainer:
            receiver = push_receiver(trainer, lab.folder / "received", on_file=lambda: history.append("pushed"))
            receiver.listen()
            spec = lab.aggregate_spec([trainer.peer_id], [trainer.peer_id], members=None)
            lease = await lab.scheduler.hire(lab.SERVER)
            await lab.scheduler.dispatch(lab.peer, lease, spec)
            await write_and_push(lab, trainer, spec, 1.0)
            await lab.scheduler.until(lambda: "Finished" in lab.scheduler.statuses)
        assert history == (["OuterStepTaken", "pushed"] if old else ["pushed", "OuterStepTaken"])

    in_lab(case, old=old)


def test_a_scheduler_that_no_longer_listens_is_no_warning(in_lab: InLab, caplog: pytest.LogCaptureFixture) -> None:
    """Its node ends the stream with an empty answer when the job's handler is gone."""
    caplog.set_level(logging.INFO, "hypha_worker")
    answered: list[str] = []

    async def case(lab: Any) -> None:
        async def answer_nothing(stream: Stream) -> None:
            await read_to_end(stream, 1 << 20)
            answered.append(stream.protocol)
            await stream.send_eof()

        await lab.start("print('hello')")
        lab.scheduler.endpoint.handle(API, answer_nothing)
        await lab.scheduler.until(lambda: not lab.worker.jobs.running and answered)

    in_lab(case, old=True)
    assert not [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("works", [True, False], ids=["the job ends too", "the job goes on"])
def test_a_lease_whose_scheduler_has_exited_is_freed_without_an_error(
    in_lab: InLab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    monkeypatch.setattr("hypha_worker.leasing.lease_manager.RENEWED_LEASE", 2.0)
    monkeypatch.setattr("hypha_worker.jobs.job_manager.END_REPORT_DELAYS", (0.0, 0.05))

    async def case(lab: Any) -> None:
        lab.write_script(UNTIL_TOLD)
        total = lab.worker.arbiter.capabilities.capacity.resources
        await lab.scheduler.hire()
        answer = await lab.scheduler.dispatch(lab.peer, uuid.uuid4(), lab.train_spec())
        assert isinstance(answer, Dispatched)
        lab.scheduler.endpoint.shut_down()
        lab.network.partition(lab.peer, lab.scheduler.endpoint.peer_id)
        if works:
            (lab.worker.jobs.running[0].work_dir / "go").touch()
        until = lab.scheduler.until
        await until(lambda: lab.worker.lease_manager.free.resources == total)
        await until(lambda: not lab.worker.lease_manager.leases and not lab.worker.jobs.running)
        assert lab.left_behind() == []

    in_lab(case, old=True)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


ROUNDS = 2
TRAINS = """
import struct
tensors = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
events = listen({"resource": config["results"], "path": "incoming"})
answer = {"type": "Continue"}
while answer["type"] != "Done":
    status, files = post("/resources/fetch", config["data"])
    assert status == 200, files
    status, answer = post("/status/send", {"status": {"batch_size": 8}})
    assert (status, answer) == (200, {"type": "ScheduleUpdate", "counter": 0}), answer
    post("/status/send", "update")
    with open(os.path.join(work_dir, "update.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(tensors)) + tensors + struct.pack("<4f", 1.0, 1.0, 1.0, 1.0))
    status, told = post("/resources/send", {"resource": config["updates"], "path": "update.safetensors"})
    assert status == 200, told
    event = next(events)
    assert os.path.getsize(os.path.join(work_dir, event["path"])) > 16
    status, answer = post("/status/send", "update-received")
    print("merged", answer["type"], flush=True)
"""


class RustRounds:
    """What a Rust scheduler answers to reports of one training worker and one parameter server."""

    def __init__(self) -> None:
        self.stepped = self.merged = 0
        self.history: list[str] = []

    def answer(self, report: ProgressRequest) -> ProgressResponse:
        self.history.append(type(report.progress).__name__)
        match report.progress:
            case BatchDone():
                return ScheduleUpdate(counter=0)
            case OuterStepTaken():
                self.stepped += 1
                return Done() if self.stepped == ROUNDS else Continue()
            case UpdateMerged():
                self.merged += 1
                return Done() if self.stepped == self.merged == ROUNDS else Continue()
        return Continue()


@asynccontextmanager
async def second_worker(lab: Any, make_config: Any) -> AsyncIterator[Any]:
    """Open the worker that runs the parameter server."""
    folder: Path = lab.folder / "second"
    server = {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"}
    async with (
        lab.network.endpoint("second") as endpoint,
        open_worker(make_config(folder, executors=[server]), endpoint) as worker,
    ):
        yield worker


def test_a_whole_job_of_a_rust_scheduler_ends_after_its_last_round(
    in_lab: InLab, serve_slices: Any, make_config: Any
) -> None:
    rounds = RustRounds()

    async def case(lab: Any) -> None:
        lab.scheduler.answer = rounds.answer
        await serve_slices(lab, ROUNDS)
        lab.write_script(TRAINS)
        await lab.scheduler.hire()
        async with second_worker(lab, make_config) as second:
            trainer, server = lab.peer, second.endpoint.peer_id
            to_server = PeersReference(peers=(server,), strategy=All())
            train = lab.train_spec()
            config = msgspec.structs.replace(train.executor.config, updates=to_server, results=to_server)
            train = msgspec.structs.replace(train, executor=msgspec.structs.replace(train.executor, config=config))
            aggregate = msgspec.structs.replace(
                lab.aggregate_spec([trainer], [trainer], members=None), job_id=train.job_id
            )
            task = uuid.uuid4()
            await lab.scheduler.hire(lab.SERVER, cpu=2.0)  # the first worker has not enough left
            for peer, spec in ((server, aggregate), (trainer, train)):
                assert isinstance(await lab.scheduler.dispatch(peer, task, spec), Dispatched)
            await lab.scheduler.until(lambda: lab.scheduler.statuses.count("Finished") == 2)
            assert not lab.worker.jobs.running
            assert not second.jobs.running
        assert set(lab.scheduler.task_ids) == {task}

    in_lab(case, old=True)
    assert rounds.merged == rounds.stepped == ROUNDS
    assert rounds.history.count(SendingUpdate.__name__) == ROUNDS
