"""Inference jobs over the in-memory network: the job runner, task streams, slices and pushed parts together."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest
from support.inference_simulation import FakeDataset, job_table, part_of
from support.scripted_jobs import Lab, ScriptedStrategy, ScriptedWorker, open_scripted_jobs
from support.stored_model import write_model
from support.task_stream_worker import TaskStreamWorker

from hypha_net import rpc
from hypha_net.errors import NetError, TransferRefusedError
from hypha_net.transfer import describe, push
from hypha_net.transfer.framing import receive_message, send_message
from hypha_proto.codec import from_cbor, from_json, to_cbor, to_json
from hypha_proto.datasets import DATA, DataRequest, Manifest, SliceAssigned
from hypha_proto.ids import PeerId
from hypha_proto.leases import SAY_GOODBYE, Goodbye
from hypha_proto.protocols import PUSH
from hypha_proto.tasks import Started, TaskDefinition, TaskFailed, TaskFinished
from hypha_proto.transfer import TASK_RESULT, GoOn, PushAnswer, PushHeader, PushReceipt, Receipt
from hypha_scheduler.audit import audit
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, read_journal
from hypha_scheduler.strategies.inference.strategy import STRATEGY

pytestmark = pytest.mark.virtual_clock

ROWS = (3, 5, 1, 4, 7, 2)


class Executor:
    """What computes slices on one lease of a scripted worker."""

    def __init__(self, lab: Lab, worker: ScriptedWorker, lease: uuid.UUID, folder: Path) -> None:
        self.lab, self.worker, self.lease, self.folder = lab, worker, lease, folder
        self.stream = TaskStreamWorker(worker.endpoint, lab.peer, lease, lab.tasks)
        self.slices: list[int] = []

    async def begin(self) -> TaskDefinition:
        assert (await self.stream.open()).refused is None
        definition = await self.stream.until("start")
        await self.stream.tell(definition, started=Started())
        return definition

    async def fetch(self, definition: TaskDefinition) -> int | None:
        assert definition.start is not None
        [dataset] = [entry.slices.dataset for entry in definition.start.resources if entry.slices is not None]
        request = DataRequest(definition.attempt, dataset, id=uuid.uuid4())
        answer = await rpc.call(self.worker.endpoint, self.lab.peer, DATA, request, timeout=100.0)
        if not isinstance(answer, SliceAssigned):
            return None
        assert answer.format == "jsonl"
        self.slices.append(answer.index)
        return answer.index

    async def describe(self, definition: TaskDefinition, index: int, content: bytes) -> tuple[PushHeader, Path]:
        path = self.folder / f"{uuid.uuid4()}"
        path.write_bytes(content)
        size, digest = await describe(path)
        header = PushHeader(
            attempt=definition.attempt, round=index, kind=TASK_RESULT, name=f"part-{index}.jsonl", size=size,
            digest=digest, scheduler=self.lab.peer, samples=ROWS[index],
        )  # fmt: skip
        return header, path

    async def send(self, definition: TaskDefinition, index: int, content: bytes | None = None) -> None:
        made = part_of(index, ROWS[index]) if content is None else content
        header, path = await self.describe(definition, index, made)
        await push(self.worker.endpoint, self.lab.peer, path, header)

    async def compute(self, definition: TaskDefinition) -> None:
        """Compute slices until there are no more, and end successfully."""
        while (index := await self.fetch(definition)) is not None:
            await self.send(definition, index)
        await self.stream.tell(definition, finished=TaskFinished(outputs=(), bytes_sent=1, bytes_received=2))


Script = Callable[[Executor], Awaitable[None]]


async def diligent(executor: Executor) -> None:
    await executor.compute(await executor.begin())


class Network:
    """The job of a test and the workers that compute it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.job = job_table(model={"path": str(folder / "model"), "type": "causal-lm"})
        self.job_id = uuid.uuid4()
        self.directory = folder / "runs" / str(self.job_id)
        self.executors: list[Executor] = []

    def start(self, *, resume: bool = False) -> None:
        self.lab.tasks.start_soon(self.lab.run, cast(Any, self.job), self.job_id, resume)

    def serve(self, *scripts: Script) -> None:
        """Let each worker follow a script on each lease that it has; the last one is that of further workers."""
        for number, worker in enumerate(self.lab.workers):
            self.lab.tasks.start_soon(self._serve, worker, scripts[min(number, len(scripts) - 1)])

    async def _serve(self, worker: ScriptedWorker, script: Script) -> None:
        served: set[uuid.UUID] = set()
        while True:
            await worker.until(lambda: worker.leases.keys() - served)
            for lease in worker.leases.keys() - served:
                served.add(lease)
                executor = Executor(self.lab, worker, lease, self.folder)
                self.executors.append(executor)
                self.lab.tasks.start_soon(self._follow, executor, script)

    async def _follow(self, executor: Executor, script: Script) -> None:
        try:
            await script(executor)
        except NetError:
            return  # the job ended, or the lease

    async def result(self) -> dict[str, Any]:
        """Return the result of a job; check that each row has one result, and that the results are a dataset."""
        outcome = (await self.lab.ended())[-1]
        assert isinstance(outcome, Path), outcome
        audited = audit(self.directory)
        assert (audited.faults, audited.proven, audited.is_complete) == ([], sum(ROWS), True)
        text = (self.directory / "results" / "manifest.json").read_bytes()
        manifest: Manifest = from_json(Manifest, text)
        assert [entry.samples for entry in manifest.slices] == [*ROWS]
        records = [record for record in read_journal(self.directory / JOURNAL) if record["record"] == "part"]
        assert sorted(record["slice"] for record in records) == list(range(len(ROWS)))
        found: dict[str, Any] = json.loads(outcome.read_text())
        return found

    async def failure(self) -> str:
        outcome = (await self.lab.ended())[-1]
        assert isinstance(outcome, JobFailedError), outcome
        return str(outcome)

    def contents(self) -> dict[Path, bytes]:
        """Return the files of the job."""
        return {path: path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}


@asynccontextmanager
async def open_inference(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, workers: int = 2, fake: FakeDataset | None = None
) -> AsyncIterator[Network]:
    """Open a network with a dataset of questions and a model."""
    write_model(folder / "model")
    found = fake or FakeDataset(ROWS)

    async def open_dataset(endpoint: Any, name: str, manifest: Path, *, timeout: float) -> DatasetView:
        await anyio.Path(manifest).write_bytes(found.manifest())
        entries = from_json(Manifest, found.manifest()).slices
        return DatasetView(name, provider, entries, None, found.format, found.columns)

    provider = PeerId.from_public_key(bytes([77]) * 32)
    async with open_scripted_jobs(monkeypatch, folder, cast(ScriptedStrategy, STRATEGY), workers=workers) as lab:
        monkeypatch.setattr("hypha_scheduler.jobs.context.open_dataset", open_dataset)
        yield Network(lab, folder)


async def test_two_workers_compute_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_inference(monkeypatch, tmp_path) as network:
        network.serve(diligent)
        network.start()
        result = await network.result()
        assert result["rows"] == result["rows_assigned"] == sum(ROWS)
        assert sum(worker["rows"] for worker in result["workers"]) == sum(ROWS)
        assert result["results_dir"] == str(network.directory / "results")
        assert sorted(index for executor in network.executors for index in executor.slices) == list(range(len(ROWS)))
        assert not (network.directory / "incoming").exists()


async def test_a_dataset_of_a_folder_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDataset(ROWS)
    (tmp_path / "questions").mkdir()
    manifest: Manifest = from_json(Manifest, fake.manifest())
    manifest = msgspec.structs.replace(manifest, format=fake.format, columns=dict(fake.columns or {}))
    (tmp_path / "questions" / "manifest.json").write_bytes(to_json(Manifest, manifest))
    for entry in manifest.slices:
        (tmp_path / "questions" / entry.file).write_bytes(b"x")
    async with open_inference(monkeypatch, tmp_path, fake=fake) as network:
        source = {"path": str(tmp_path / "questions")}
        network.job = job_table(model={"path": str(tmp_path / "model"), "type": "causal-lm"}, dataset=source)
        network.serve(diligent)
        network.start()
        await network.result()


async def test_a_part_that_is_invalid_is_refused_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_inference(monkeypatch, tmp_path) as network:
        refusals: list[str] = []

        async def careless(executor: Executor) -> None:
            definition = await executor.begin()
            index = await executor.fetch(definition)
            assert index is not None
            with pytest.raises(TransferRefusedError) as caught:
                await executor.send(definition, index, part_of(index, ROWS[index])[:-5])
            refusals.append(str(caught.value))
            await executor.compute(definition)

        network.serve(careless)
        network.start()
        result = await network.result()
        assert result["parts_refused"] == len(refusals) >= 1
        assert "is cut short" in refusals[0]


async def test_a_part_does_not_interrupt_another_of_the_same_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_inference(monkeypatch, tmp_path, workers=1) as network:

        async def sends_two_at_once(executor: Executor) -> None:
            definition = await executor.begin()
            first, second = await executor.fetch(definition), await executor.fetch(definition)
            assert first is not None
            assert second is not None
            content = part_of(first, ROWS[first])
            stream = await executor.worker.endpoint.open_stream(network.lab.peer, [PUSH])
            header, _ = await executor.describe(definition, first, content)
            await send_message(stream, to_cbor(PushHeader, header))
            assert isinstance(from_cbor(PushAnswer, await receive_message(stream)), GoOn)
            await executor.send(definition, second)
            await stream.send_all(content)
            await stream.send_eof()
            assert isinstance(from_cbor(PushReceipt, await receive_message(stream)), Receipt)
            await executor.compute(definition)

        network.serve(sends_two_at_once)
        network.start()
        result = await network.result()
        assert (result["parts_dropped"], result["rows_assigned"]) == (0, sum(ROWS))


async def test_a_part_of_a_worker_that_was_lost_gets_a_receipt_and_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_inference(monkeypatch, tmp_path, workers=1) as network:
        was_late = anyio.Event()

        async def late_once(executor: Executor) -> None:
            definition = await executor.begin()
            if not was_late.is_set():
                index = await executor.fetch(definition)
                assert index is not None
                goodbye = Goodbye(leases=(executor.lease,), reason="it hangs")
                await rpc.call(executor.worker.endpoint, network.lab.peer, SAY_GOODBYE, goodbye)
                await executor.send(definition, index)  # with a receipt, or it would raise
                del executor.worker.leases[executor.lease]
                was_late.set()
                return
            await executor.compute(definition)

        network.serve(late_once)
        network.start()
        await was_late.wait()
        result = await network.result()
        assert result["parts_dropped"] == 1
        assert result["rows"] == sum(ROWS) < result["rows_assigned"]


async def test_a_job_fails_by_its_executor_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_inference(monkeypatch, tmp_path, workers=1) as network:
        is_resumed = False

        async def dies_first(executor: Executor) -> None:
            definition = await executor.begin()
            if is_resumed:
                await executor.compute(definition)
                return
            if (index := await executor.fetch(definition)) is None:
                return  # the other one has ended the job
            await executor.send(definition, index)
            failed = TaskFailed(reason="it cannot", exit_code=2, last_lines=("no such column",))
            await executor.stream.tell(definition, failed=failed)

        network.serve(dies_first)
        network.start()
        assert "no such column" in await network.failure()
        committed = len(list((network.directory / "results").iterdir()))
        assert committed >= 1
        before = network.contents()
        model = network.folder / "model" / "model.safetensors"
        write_model(model.parent, ["other"])
        network.lab.results.clear()
        network.start(resume=True)
        assert "this is another job than the one to resume:\nmodel: files is {" in await network.failure()
        assert network.contents() == before
        write_model(model.parent)
        network.lab.results.clear()
        is_resumed = True
        network.start(resume=True)
        result = await network.result()
        assert result["rows"] == sum(ROWS)
        assert result["rows_assigned"] < sum(ROWS)
        kinds = [record["record"] for record in read_journal(network.directory / JOURNAL)]
        assert kinds.count("inference") == 1
        assert [kind for kind in kinds if kind in ("accepted", "failed", "resumed", "finished")] == [
            "accepted", "failed", "resumed", "finished",
        ]  # fmt: skip


async def test_a_dataset_without_the_prompts_columns_takes_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_inference(
        monkeypatch, tmp_path, fake=FakeDataset(ROWS, columns={"text": "text", "id": "integer"})
    ) as network:
        network.start()
        assert "inference.prompt: dataset 'questions' has no column 'question'; it has text" in await network.failure()
        assert not any(worker.leases for worker in network.lab.workers)
        assert "placed" not in [record["record"] for record in read_journal(network.directory / JOURNAL)]
