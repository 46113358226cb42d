"""Resources of tasks: from holders, by push, slices one by one, files, URLs, results; and what is refused."""

from __future__ import annotations

import errno
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import msgspec
import pytest
from blake3 import blake3
from support.fake_http_server import files, served
from support.scripted_task_scheduler import PYTHON, ScriptedTaskScheduler
from support.task_bridge_client import EXECUTOR

from hypha_net import rpc, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.testing import MemoryEndpoint
from hypha_proto.attempt_id import AttemptId
from hypha_proto.datasets import DATA, NO_FREE_SLICE, DataRequest, NotFound, SliceAssigned, WireError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.task_resources import (
    PUSH_OUTPUT,
    AwaitPush,
    Gone,
    LocatedFile,
    LocateResource,
    NotYet,
    PullFiles,
    PushBegun,
    PushedFile,
    PushOutput,
    ResourceLocation,
)
from hypha_proto.tasks import (
    FileSource,
    PeersSource,
    ResultSource,
    SlicesSource,
    StoredOutput,
    TaskFinished,
    TaskResource,
    UriSource,
)
from hypha_proto.transfer import TASK_RESOURCE, TASK_RESULT, PullRequest, PushHeader, Refusal
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.service import open_worker
from hypha_worker.tasks.resource_pushes import ResourcePushes

InTaskLab = Callable[..., Any]
READ = """
def tree(path):
    if os.path.isfile(path):
        return open(path).read()
    return {name: tree(path + '/' + name) for name in sorted(os.listdir(path))}
open('found', 'w').write(json.dumps({name: tree(path) for name, path in task['resources'].items()}))
"""
MAKE = "os.makedirs('d/e'); open('d/e/x', 'w').write('x' * 5); [open(f'd/{n}', 'w').write('same') for n in 'yz']"
FOUND = {"e": {"x": "xxxxx"}, "y": "same", "z": "same"}


def digest(content: bytes) -> str:
    return f"blake3:{blake3(content).hexdigest()}"


def result(name: str = "r") -> TaskResource:
    return TaskResource(name=name, result=ResultSource("producer", "out"))


def located(output: StoredOutput, *peers: PeerId) -> tuple[LocatedFile, ...]:
    return tuple(
        LocatedFile(
            path=file.path, dataset=output.dataset, index=index, size=file.size, digest=file.digest, peers=peers
        )
        for index, file in enumerate(output.files)
    )


def answering(*answers: ResourceLocation) -> Callable[[PeerId, LocateResource], Awaitable[ResourceLocation]]:
    """Answer questions in turn, the last one again and again."""
    left = list(answers)

    async def answer(_peer: PeerId, _question: LocateResource) -> ResourceLocation:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


async def found_by(lab: Any, finished: TaskFinished, worker: PeerId | None = None) -> Any:
    """Return what a task with the code `READ` has found."""
    return json.loads(await lab.content_of(finished, "found", worker))


async def make_output(
    tasks: ScriptedTaskScheduler, lease: uuid.UUID, code: str = MAKE, path: str = "d"
) -> StoredOutput:
    tasks.start(lease, "producer", code, outputs={"out": path})
    [output] = (await tasks.success("producer")).outputs
    return output


@asynccontextmanager
async def second_worker(lab: Any, make_config: Any) -> AsyncIterator[tuple[PeerId, uuid.UUID]]:
    """Run a further worker, while the first makes no more offers; yields its peer id and a lease."""
    (folder := lab.folder / "second").mkdir()
    config = make_config(folder, executors=[PYTHON])
    async with lab.network.endpoint("second") as endpoint, open_worker(config, endpoint):
        lab.worker.lease_manager.close()
        yield endpoint.peer_id, await lab.scheduler.hire(ExecutorDescriptor.parse("python"))


async def test_a_result_is_copied_on_the_same_worker(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        output = await make_output(tasks, lease)
        tasks.locate = answering(
            ResourceLocation(not_yet=NotYet("producer", 10)),
            ResourceLocation(pull=PullFiles(located(output, lab.peer))),
        )
        sent = lab.worker.endpoint.traffic.sent
        write = "open('resources/r/y', 'w').write('changed')\n"
        settings = {"in": ["r", {"deep": "r"}, "other"]}
        code = READ + write + "assert task['settings']['in'] == ['resources/r', {'deep': 'resources/r'}, 'other']"
        tasks.start(lease, "t", code, outputs={"found": "found"}, resources=(result(),), settings=settings)
        finished = await tasks.success("t")
        assert await found_by(lab, finished) == {"r": FOUND}
        assert len(tasks.questions) == 2
        assert finished.bytes_received == 0
        tasks.start(lease, "u", READ, outputs={"found": "found"}, resources=(result(),))
        assert await found_by(lab, await tasks.success("u")) == {"r": FOUND}, "the stored output is another copy"
        assert lab.worker.endpoint.traffic.sent - sent < 20_000


@pytest.mark.usefixtures("quick_retries")
async def test_a_result_whose_place_comes_with_the_start_needs_no_question(in_task_lab: InTaskLab) -> None:
    """The scheduler is asked only if the result cannot be had there."""
    async with in_task_lab() as (lab, tasks, lease):
        output = await make_output(tasks, lease)
        right = PullFiles(located(output, lab.peer))
        tasks.locate = answering(ResourceLocation(pull=right))
        for name, known, questions in (("t", right, 0), ("u", PullFiles(located(output, lab.data.peer_id)), 1)):
            resource = msgspec.structs.replace(result(), location=known)
            tasks.start(lease, name, READ, outputs={"found": "found"}, resources=(resource,))
            assert await found_by(lab, await tasks.success(name, seconds=30)) == {"r": FOUND}
            assert len(tasks.questions) == questions
        assert [failed.peer for failed in tasks.questions[0].failures] == [lab.data.peer_id]


async def test_a_result_is_pulled_from_another_worker(in_task_lab: InTaskLab, make_config: Any) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        output = await make_output(tasks, lease)
        await lab.scheduler.release(lab.peer, lease)
        folder = located(output, lab.peer)
        single = msgspec.structs.replace(folder[1], path="")

        async def locate(_peer: PeerId, question: LocateResource) -> ResourceLocation:
            return ResourceLocation(pull=PullFiles((single,) if question.resource == "single" else folder))

        tasks.locate = locate
        async with second_worker(lab, make_config) as (peer, second):
            resources = (result(), result("single"))
            tasks.start(second, "t", READ, outputs={"found": "found"}, resources=resources, executor="python")
            finished = await tasks.success("t")
            assert await found_by(lab, finished, peer) == {"r": FOUND, "single": "same"}
            assert finished.bytes_received == 17
            assert {question.attempt for question in tasks.questions} == {tasks.name("t")}


@pytest.mark.usefixtures("quick_retries")
async def test_a_holder_that_fails_is_reported_and_another_is_asked(in_task_lab: InTaskLab) -> None:
    """The scheduler hears who has no such file or a false one, and who cannot be reached."""
    async with in_task_lab() as (lab, tasks, lease):
        files = {"refused": b"", "false": b"wrong", "right": b"right"}

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            content = files[request.dataset]
            return transfer.PullSource(content) if content else Refusal(reason="gone")

        transfer.serve_pulls(lab.data, resolve)

        def pull(dataset: str, peer: PeerId) -> ResourceLocation:
            file = LocatedFile(path="", dataset=dataset, index=0, size=5, digest=digest(b"right"), peers=(peer,))
            return ResourceLocation(pull=PullFiles((file,)))

        stranger = PeerId.parse("12D3KooWRm8J3iL796zPFi2EtGGtUJn58AG67gcqRLvNLQXkmDoe")
        data = lab.data.peer_id
        tasks.locate = answering(
            pull("refused", data), pull("false", data), pull("right", stranger), pull("right", data)
        )
        tasks.start(lease, "t", READ, outputs={"found": "found"}, resources=(result(),))
        assert await found_by(lab, await tasks.success("t", seconds=30)) == {"r": "right"}
        failures = [[(failed.peer, failed.is_permanent) for failed in asked.failures] for asked in tasks.questions]
        assert failures == [[], [(data, True)], [(data, True)], [(stranger, False)]]


async def test_a_resource_that_is_gone_fails_the_attempt_and_is_named(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (_lab, tasks, lease):
        tasks.locate = answering(ResourceLocation(gone=Gone("its task was cancelled")))
        tasks.start(lease, "t", resources=(result("data"),))
        failed = await tasks.failure("t")
        assert (failed.resource, failed.exit_code) == ("data", None)
        assert "its task was cancelled" in failed.reason
        assert tasks.kinds("t") == ["started", "failed"]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../b", ""])
async def test_a_scheduler_cannot_place_files_outside_a_resource(in_task_lab: InTaskLab, path: str) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        other = LocatedFile(path="good", dataset="d", index=0, peers=(lab.peer,))
        bad = LocatedFile(path=path, dataset="d", index=1, peers=(lab.peer,))
        tasks.locate = answering(ResourceLocation(pull=PullFiles((other, bad))))
        tasks.start(lease, "t", resources=(result(),))
        assert "which is not inside" in (await tasks.failure("t")).reason


async def test_a_resource_over_the_storage_fails_the_attempt(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        output = await make_output(tasks, lease, "open('d', 'w').truncate(300_000_000)")
        tasks.locate = answering(ResourceLocation(pull=PullFiles(located(output, lab.peer))))
        tasks.start(lease, "t", resources=(result(),))
        failed = await tasks.failure("t")
        assert "exceeds this job's storage" in failed.reason
        assert failed.resource == "r"


async def test_waiting_for_a_resource_ends_with_the_attempt(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        tasks.locate = answering(ResourceLocation(not_yet=NotYet("producer", 10_000)))
        tasks.start(lease, "t", resources=(result(),))
        await tasks.until(lambda: tasks.questions)
        assert await lab.scheduler.release(lab.peer, lease)
        assert (await tasks.end("t")).cancelled is not None


async def test_files_and_urls_under_the_owners_roots_are_copied(in_task_lab: InTaskLab, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "folder" / "deep").mkdir(parents=True)
    (shared / "folder" / "deep" / "a").write_text("a")
    (shared / "b").write_text("b")
    (shared / "folder" / "link").symlink_to(shared / "b")
    (tmp_path / "secret").write_text("secret")
    async with in_task_lab(connectors={"roots": [str(shared)]}) as (lab, tasks, lease):
        resources = (
            TaskResource(name="folder", file=FileSource(str(shared / "folder"))),
            TaskResource(name="file", file=FileSource(str(shared / "b"))),
            TaskResource(name="page", uri=UriSource((shared / "b").as_uri())),
        )
        tasks.start(lease, "t", READ, outputs={"found": "found"}, resources=resources)
        found = await found_by(lab, await tasks.success("t"))
        assert found == {"folder": {"deep": {"a": "a"}, "link": "b"}, "file": "b", "page": "b"}
        (shared / "folder" / "out").symlink_to(tmp_path / "secret")
        for number, source in enumerate(
            [str(tmp_path / "secret"), str(shared / ".." / "secret"), str(shared), "relative", str(shared / "folder")]
        ):
            tasks.start(lease, f"bad{number}", resources=(TaskResource(name="x", file=FileSource(source)),))
            failed = await tasks.failure(f"bad{number}")
            assert failed.resource == "x"
            assert "connectors.roots" in failed.reason or "not an absolute path" in failed.reason


async def test_a_full_disk_is_told_with_the_resource(in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(FileIO):
        def write(self, _block: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with served(files(lambda _: (b"page", {}))) as url:
        resources = (TaskResource(name="page", uri=UriSource(f"{url}/page")),)
        async with in_task_lab(connectors={"hosts": ["127.0.0.1"]}) as (_, tasks, lease):
            with monkeypatch.context() as patched:
                patched.setattr("hypha_net.connectors.content.FileIO", FullDisk)
                tasks.start(lease, "t", resources=resources)
                cancelled = await tasks.cancellation("t")
            assert cancelled.reason.startswith("resource page (uri): ")
            assert cancelled.reason.endswith(": No space left on device; free some space there")
            tasks.start(lease, "next", resources=resources)
            assert (await tasks.end("next")).finished is not None


async def test_a_peers_files_become_a_file_or_a_named_folder(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        lab.serve_slices(1)
        peers = (lab.data.peer_id,)
        resources = (
            TaskResource(name="one", peers=PeersSource(peers, "numbers", 4)),
            TaskResource(name="more", peers=PeersSource(peers, "numbers", 1, ("a", "b/c"))),
        )
        tasks.start(lease, "t", READ, outputs={"found": "found"}, resources=resources)
        finished = await tasks.success("t")
        assert await found_by(lab, finished) == {"one": "slice 4", "more": {"a": "slice 1", "b": {"c": "slice 2"}}}
        hub = HuggingFaceReference(repository="org/model", filenames=("/a",))
        for task, bad, reason in (
            ("u", {"peers": PeersSource(peers, "numbers", 1, ("../a",))}, "which is not inside its folder"),
            ("v", {"huggingface": hub}, "which is not inside its folder"),
            ("w", {"peers": PeersSource(peers, "numbers", 1, ("a", "./a"))}, "which overlap"),
            ("x", {"peers": PeersSource(peers, "numbers", 1, ("a" * 256,))}, "which is longer than 255 bytes"),
        ):
            tasks.start(lease, task, resources=(TaskResource(name="bad", **bad),))  # type: ignore[arg-type]
            assert reason in (await tasks.failure(task)).reason


async def test_a_token_reaches_neither_process_nor_reports(
    in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[str | None] = []

    async def download(downloads: Downloads, reference: HuggingFaceReference, folder: PurePosixPath) -> list[Any]:
        used.append(reference.token)
        if reference.repository == "org/bad":
            from hypha_worker.errors import peer_failed

            raise peer_failed(f"the Hub says: no {reference.token}")
        (downloads.storage.files.work_dir / folder / "config.json").write_bytes(b"{}")
        return []

    monkeypatch.setattr(Downloads, "from_hub", download)

    def model(repository: str) -> TaskResource:
        reference = HuggingFaceReference(repository=repository, filenames=("config.json",), token="hf_secret")
        return TaskResource(name="model", huggingface=reference)

    async with in_task_lab() as (lab, tasks, lease):
        code = READ + "assert not any('secre' 't' in v for v in (open('job.json').read(), *os.environ.values()))"
        tasks.start(lease, "t", code, outputs={"found": "found"}, resources=(model("org/model"),))
        assert await found_by(lab, await tasks.success("t")) == {"model": {"config.json": "{}"}}
        tasks.start(lease, "bad", resources=(model("org/bad"),))
        assert "the Hub says: no [token]" in (await tasks.failure("bad")).reason
        assert used == ["hf_secret"] * 2
        assert "hf_secret" not in caplog.text


# ---------------------------------------------------------------------------------------------------------------- push


def pushing(
    tasks: ScriptedTaskScheduler, lab: Any, output: StoredOutput, to: PeerId, arrived: anyio.Event | None
) -> list[PushBegun]:
    """Let a scheduler tell the holder to push a delivery, and announce it, if wanted when the push has `arrived`."""
    begun: list[PushBegun] = []

    async def locate(_peer: PeerId, question: LocateResource) -> ResourceLocation:
        delivery = uuid.uuid4()
        files = tuple(PushedFile(output.dataset, index, str(index)) for index in reversed(range(len(output.files))))
        message = PushOutput(job_id=tasks.job_id, delivery=delivery, to=to, files=files)

        begun.append(await rpc.call(tasks.endpoint, lab.peer, PUSH_OUTPUT, message))
        if arrived is not None:
            await arrived.wait()
        return ResourceLocation(pushed=AwaitPush(delivery, located(output), (lab.peer,)))

    tasks.locate = locate
    return begun


@pytest.mark.parametrize("early", [True, False])
async def test_a_result_is_pushed_to_another_worker(
    in_task_lab: InTaskLab, make_config: Any, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    accept = ResourcePushes.accept
    async with in_task_lab() as (lab, tasks, lease):
        output = await make_output(tasks, lease)
        async with second_worker(lab, make_config) as (peer, second):
            arrived = anyio.Event()

            def accept_early(deliveries: ResourcePushes, peer: PeerId, header: PushHeader) -> Any:
                arrived.set()
                return accept(deliveries, peer, header)

            monkeypatch.setattr(ResourcePushes, "accept", accept_early)
            begun = pushing(tasks, lab, output, peer, arrived if early else None)
            tasks.start(second, "t", READ, outputs={"found": "found"}, resources=(result(),), executor="python")
            finished = await tasks.success("t")
            assert await found_by(lab, finished, peer) == {"r": FOUND}
            assert begun == [PushBegun(accepted=True)]
            assert finished.bytes_received == 13


async def test_only_announced_pushes_of_announced_senders_are_accepted(in_task_lab: InTaskLab, recorded: Any) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        delivery = uuid.uuid4()
        file = LocatedFile(path="", dataset="d", index=0, size=5, digest=digest(b"right"))
        tasks.locate = answering(ResourceLocation(pushed=AwaitPush(delivery, (file,), (lab.data.peer_id,))))
        tasks.start(lease, "t", READ, outputs={"found": "found"}, resources=(result(),))

        await tasks.until(lambda: tasks.questions)

        async def push(peer: MemoryEndpoint, content: bytes = b"right", **changes: Any) -> str:
            fields = {
                "attempt": tasks.name("maker"),
                "kind": TASK_RESOURCE,
                "name": "0",
                "delivery": delivery,
                "scheduler": lab.scheduler.endpoint.peer_id,
            }
            fields |= {"size": len(content), "digest": digest(content)} | changes
            header = PushHeader(round=0, **fields)
            try:
                await transfer.push(peer, lab.peer, content, header)
            except TransferRefusedError as error:
                return error.reason
            return ""

        assert "not announced as a sender" in await push(lab.server)
        other = AttemptId(uuid.uuid4(), "maker", 0)
        assert "no task here expects" in await push(lab.data, delivery=uuid.uuid4(), attempt=other)
        assert "not part of this delivery" in await push(lab.data, attempt=other)
        assert "not part of this delivery" in await push(lab.data, kind="outer-update")
        assert "not wanted" in await push(lab.data, name="1")
        assert "not wanted" in await push(lab.data, name="-1")
        assert "is announced" in await push(lab.data, b"wrong")
        assert "5 are announced" in await push(lab.data, b"long, but with the digest", digest=file.digest)
        assert recorded.total("hypha.worker.deliveries.refused") == 8
        assert await push(lab.data) == ""
        assert await found_by(lab, await tasks.success("t")) == {"r": "right"}


async def test_a_stalled_delivery_is_reported(in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_worker.tasks.resource_pushes.STALL", 0.2)
    monkeypatch.setattr("hypha_worker.tasks.resource_pushes._POLL", 0.05)
    async with in_task_lab() as (lab, tasks, lease):
        file = LocatedFile(path="", dataset="d", index=0)
        pushed = ResourceLocation(pushed=AwaitPush(uuid.uuid4(), (file,), (lab.data.peer_id,)))
        tasks.locate = answering(pushed, ResourceLocation(gone=Gone("nobody has it")))
        tasks.start(lease, "t", resources=(result(),))
        assert (await tasks.end("t")).failed is not None
        [failure] = tasks.questions[1].failures
        assert (failure.peer, failure.is_permanent) == (lab.data.peer_id, False)
        assert "1 of 1 files were not pushed" in failure.reason


async def test_only_the_scheduler_of_outputs_has_them_pushed(in_task_lab: InTaskLab, recorded: Any) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        output = await make_output(tasks, lease)

        async def ask(peer: MemoryEndpoint, **changes: Any) -> PushBegun:
            fields = {"job_id": tasks.job_id, "to": lab.server.peer_id, "files": (PushedFile(output.dataset, 0, "0"),)}
            return await rpc.call(peer, lab.peer, PUSH_OUTPUT, PushOutput(delivery=uuid.uuid4(), **(fields | changes)))

        scheduler = lab.scheduler.endpoint
        assert not (await ask(lab.server)).accepted
        assert not (await ask(scheduler, job_id=uuid.uuid4())).accepted
        assert not (await ask(scheduler, files=(PushedFile(output.dataset, 3, "0"),))).accepted
        assert not (await ask(scheduler, to=lab.peer)).accepted
        many = tuple(PushedFile(output.dataset, 0, str(number)) for number in range(4001))
        answer = await ask(scheduler, files=many)
        assert (answer.accepted, answer.reason) == (False, "4001 files are over the limit of 4000 in one request")
        assert recorded.total("hypha.worker.output.requests", hypha_request="push", hypha_outcome="refused") == 5
        assert (await ask(scheduler)).accepted


SLICES = TaskResource(name="slices", slices=SlicesSource("rows"))
FETCH_ALL = """
found = []
while True:
    folder = "slices/%d" % len(found)
    status, answer = post("/resources/fetch", {"type": "Resource", "name": "slices", "out_dir": folder})
    if status == 503 and answer["error"] == "no-free-slice":
        continue
    if status != 200:
        break
    [file] = answer
    found.append([file["path"], file["metadata"]["slice"], file["metadata"]["dataset"], open(file["path"]).read()])
"""


def serve(lab: Any, answers: list[Any], unusable: frozenset[int] = frozenset()) -> list[DataRequest]:
    """Let the scheduler give these answers in turn, a number being a slice; return the requests."""
    requests: list[DataRequest] = []

    async def assign(_peer: Any, request: DataRequest) -> SliceAssigned | NotFound | WireError:
        requests.append(request)
        answer = answers[len(requests) - 1] if len(requests) <= len(answers) else NotFound()
        if not isinstance(answer, int):
            return answer  # type: ignore[no-any-return]
        content = digest(b"rows %d" % answer)
        return SliceAssigned(data_provider=lab.data.peer_id, index=answer, epoch=0, digest=content, format="jsonl")

    async def resolve(_peer: Any, request: PullRequest) -> transfer.PullSource | Refusal:
        if request.index in unusable and request.name != "manifest":
            return Refusal(reason="it is damaged")
        return transfer.PullSource(b"rows %d" % request.index)

    rpc.serve(lab.scheduler.endpoint, DATA, assign)
    transfer.serve_pulls(lab.data, resolve)
    return requests


async def test_a_task_fetches_slices_until_there_are_no_more(in_task_lab: InTaskLab) -> None:
    code = (
        FETCH_ALL
        + """
assert status == 410 and answer["error"] == "no-more-data", answer
assert [entry[1:] for entry in found] == [["7", "rows", "rows 7"], ["2", "rows", "rows 2"]], found
assert [entry[0].startswith("slices/%d/" % n) for n, entry in enumerate(found)] == [True, True], found
assert all(entry[0].endswith(".jsonl") for entry in found), found
"""
    )
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        requests = serve(lab, [7, WireError(message=NO_FREE_SLICE), 2])
        tasks.start(lease, "t", code, resources=(SLICES,))
        finished = await tasks.success("t")
        assert {(request.dataset, request.attempt) for request in requests} == {("rows", tasks.name("t"))}
        assert len(requests) == 4
        assert finished.bytes_received == 12


async def test_another_slice_takes_the_place_of_a_damaged_one(in_task_lab: InTaskLab) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        requests = serve(lab, [0, 1], unusable=frozenset({0}))
        tasks.start(lease, "t", FETCH_ALL + "assert [entry[1] for entry in found] == ['1'], found", resources=(SLICES,))
        assert (await tasks.end("t")).finished is not None
        assert requests[1].unusable is not None
        assert requests[1].unusable.index == 0


async def test_a_scheduler_that_refuses_is_quoted(in_task_lab: InTaskLab) -> None:
    code = FETCH_ALL + "assert status == 502 and 'the job is over' in answer['detail'], answer"
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        serve(lab, [WireError(message="the job is over")])
        tasks.start(lease, "t", code, resources=(SLICES,))
        assert (await tasks.end("t")).finished is not None


SEND = """
open("part-3.jsonl", "w").write("{}")
status, answer = post("/resources/send", {
    "send": {"type": "Peers", "peers": [task["scheduler"]], "strategy": "One"},
    "path": "part-3.jsonl", "round": 3, "samples": 1,
})
"""


async def test_a_task_that_may_sends_results_to_its_scheduler(in_task_lab: InTaskLab) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        receiver = lab.receive_pushes(lab.scheduler.endpoint)
        tasks.start(lease, "t", SEND + "assert status == 200, answer", sends=True)
        finished = await tasks.success("t")
        [(_, header, content)] = receiver.files
        assert header is not None
        assert (header.kind, header.name, header.round, header.samples) == (TASK_RESULT, "part-3.jsonl", 3, 1)
        assert (header.attempt, content) == (tasks.name("t"), b"{}")
        assert finished.bytes_sent == 2


@pytest.mark.parametrize("also", [[], ["12D3KooWRm8J3iL796zPFi2EtGGtUJn58AG67gcqRLvNLQXkmDoe"]])
async def test_other_tasks_and_other_peers_are_refused(in_task_lab: InTaskLab, also: list[str]) -> None:
    code = SEND.replace('[task["scheduler"]]', f'[task["scheduler"]] + {json.dumps(also)}')
    async with in_task_lab(executors=[EXECUTOR]) as (_lab, tasks, lease):
        tasks.start(lease, "t", code + "assert status == 403, answer", sends=bool(also) or None)
        assert (await tasks.end("t")).finished is not None
