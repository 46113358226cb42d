"""Tasks on a lease, in real processes: definitions, reports, outputs, and the ways in which an attempt ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import psutil
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.endpoint_helpers import pull_bytes
from support.process_ready import is_alive
from support.scripted_task_scheduler import kind_of

from hypha_net import rpc
from hypha_net.errors import TransferRefusedError
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain, DrainReceived
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, RenewLease
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.task_resources import RELEASE_OUTPUTS, ReleaseOutputs
from hypha_proto.tasks import (
    DrainTask,
    OutputPath,
    Stop,
    StoredOutput,
    TaskFinished,
    TaskResource,
    TaskSpec,
    UriSource,
)
from hypha_proto.transfer import PullRequest
from hypha_worker.executors.process import idleness
from hypha_worker.task_files import TaskFiles
from hypha_worker.tasks.definition_check import DefinitionError, check_start

WAITS = "import subprocess; subprocess.Popen(['sleep', '60']); print('pid', os.getpid(), flush=True); time.sleep(60)"

InTaskLab = Callable[..., Any]


async def pull(endpoint: Any, peer: Any, output: StoredOutput, index: int = 0) -> bytes:
    request = PullRequest(dataset=output.dataset, index=index)
    return await pull_bytes(endpoint, peer, request, max_bytes=1 << 20)


def outputs_of(finished: TaskFinished) -> dict[str, StoredOutput]:
    return {output.name: output for output in finished.outputs}


async def test_tasks_run_one_after_the_other_and_their_outputs_stay(in_task_lab: InTaskLab) -> None:
    first = "os.makedirs('made/deep'); open('made/deep/x', 'w').write('deep'); open('made/y', 'w').write('y')\n"
    first += "open('f', 'w').write('file')"
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "first", first, outputs={"folder": "made", "file": "f", "definition": "job.json"})
        outputs = outputs_of(await tasks.success("first"))
        assert tasks.kinds("first") == ["started", "ready", "finished"]
        assert [(file.path, file.size) for file in outputs["folder"].files] == [("deep/x", 4), ("y", 1)]
        assert [(file.path, file.size) for file in outputs["file"].files] == [("", 4)]
        assert outputs["file"].files[0].digest == f"blake3:{blake3(b'file').hexdigest()}"
        tasks.start(lease, "second[3]", "print(1)", index=3, count=5)
        await tasks.end("second[3]")
        for peer in (lab.scheduler.endpoint, lab.server):
            assert await pull(peer, lab.peer, outputs["folder"]) == b"deep"
            assert await pull(peer, lab.peer, outputs["folder"], 1) == b"y"
        assert lab.worker.tasks.running == ()
        [folder] = lab.left_behind()
        assert folder.startswith("outputs-"), "work directories are removed"


async def test_a_process_sees_its_task_without_sources(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        code = "open('seen', 'w').write(json.dumps(task)); open('out', 'w').close()"
        settings = {"nested": [{"a": "out"}, 1.5, None]}
        tasks.start(
            lease, "t[1]", code, attempt=4, outputs={"seen": "seen", "out": "out"}, settings=settings, index=1, count=2
        )
        outputs = outputs_of(await tasks.success("t[1]", 4))
        seen = json.loads(await pull(lab.server, lab.peer, outputs["seen"]))
        settings["code"] = code
        assert seen == {
            "job_id": str(tasks.job_id),
            "task": "t[1]",
            "attempt": 4,
            "executor": "shell/python",
            "scheduler": str(lab.scheduler.endpoint.peer_id),
            "index": 1,
            "count": 2,
            "settings": settings,
            "resources": {},
            "outputs": {"seen": "seen", "out": "out"},
            "timeout_ms": None,
        }


async def test_a_name_alone_means_the_first_executor_of_that_name(in_task_lab: InTaskLab) -> None:
    def executor(job_class: str, text: str) -> dict[str, Any]:
        return {"class": job_class, "name": "tell", "cmd": "sh", "args": ["-c", f"echo {text} >out"]}

    async with in_task_lab(requested="tell", executors=[executor("shell", "first"), executor("other", "second")]) as (
        lab,
        tasks,
        lease,
    ):
        tasks.start(lease, "t", executor="tell", outputs={"out": "out"})
        assert await pull(lab.server, lab.peer, outputs_of(await tasks.success("t"))["out"]) == b"first\n"
        tasks.start(lease, "u", executor="other/tell")
        assert "none of those that the lease was requested for" in (await tasks.failure("u")).reason


async def test_work_is_given_back_when_an_executor_asks_for_it(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (_lab, tasks, lease):
        tasks.start(lease, "t", "print('ERROR disk: full'); sys.exit(os.EX_IOERR)")
        assert (await tasks.cancellation("t")).reason == "ERROR disk: full"


async def test_work_is_given_back_when_the_disk_is_full(
    in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(_files: TaskFiles, _path: PurePosixPath, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    async with in_task_lab() as (lab, tasks, lease):
        monkeypatch.setattr(TaskFiles, "take", take)
        tasks.start(lease, "t", "open('x', 'w').close()", outputs={"x": "x"})
        assert "No space left on device; free some space there" in (await tasks.cancellation("t")).reason
        assert lab.worker.outputs.held == ()


async def test_an_error_in_the_worker_ends_one_attempt_only(
    in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_task_lab() as (_lab, tasks, lease):
        with monkeypatch.context() as patched:
            patched.setattr("hypha_worker.executors.process.process_execution.task_json", lambda _context: 1 / 0)
            tasks.start(lease, "t")
            assert "ZeroDivisionError" in (await tasks.failure("t")).reason
        assert "because of an error in this worker" in caplog.text
        tasks.start(lease, "next")
        assert (await tasks.end("next")).finished is not None


async def test_a_lease_whose_session_fails_is_given_up_so_that_its_scheduler_hears_of_it(
    in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another session could not go on with the stream: the attempt would hang while the lease is renewed."""
    async with in_task_lab() as (lab, tasks, lease):
        with monkeypatch.context() as patched:
            patched.setattr("hypha_worker.tasks.task_sessions.check_start", lambda *_: 1 / 0)
            tasks.start(lease, "t")
            await tasks.until(lambda: all(found.id != lease for found in lab.worker.lease_manager.leases))
        assert "because of an error in this worker" in caplog.text


async def test_an_attempt_fails_after_its_timeout(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (_lab, tasks, lease):
        tasks.start(lease, "t", "time.sleep(60)", timeout_ms=300)
        assert "after 0.3 s" in (await tasks.failure("t")).reason


@pytest.mark.parametrize("how", ["sleeps", "is stopped", "has a timeout"])
async def test_an_attempt_without_a_timeout_fails_when_its_process_does_nothing(
    in_task_lab: InTaskLab, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(idleness, "IDLE_LIMIT", 0.3)
    monkeypatch.setattr(idleness, "INTERVAL", 0.05)
    async with in_task_lab() as (_lab, tasks, lease):
        codes = {"sleeps": "time.sleep(60)", "is stopped": "os.kill(os.getpid(), 19)", "has a timeout": "time.sleep(1)"}
        tasks.start(lease, "t", codes[how], timeout_ms=60_000 if how == "has a timeout" else None)
        report = await tasks.end("t")
        if how == "has a timeout":
            assert report.finished is not None
        else:
            assert report.failed is not None
            assert "has used no processor time" in report.failed.reason


def test_a_process_that_waits_for_its_bridge_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idleness, "IDLE_LIMIT", 0.2)
    monkeypatch.setattr(idleness, "INTERVAL", 0.01)
    asked = 0

    def is_asking() -> bool:
        nonlocal asked
        asked += 1
        return asked < 30

    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            anyio.run(idleness.wait_until_idle, lambda: process.pid, is_asking, backend="trio")
        finally:
            process.kill()
    assert asked >= 30


@pytest.mark.parametrize("how", ["stop", "drain", "release", "expiry"])
async def test_an_attempt_ends_with_its_whole_process_tree(in_task_lab: InTaskLab, how: str) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "t", WAITS, outputs={"pid": "job.json"})
        await tasks.until(lambda: "ready" in tasks.kinds("t"))
        [run] = lab.worker.tasks.running
        [server] = psutil.Process().children()  # starts the processes, and stays
        await tasks.until(lambda: server.children(recursive=True)[1:])
        children = server.children(recursive=True)
        if how == "stop":
            tasks.define(lease, "t", stop=Stop("enough"))
        elif how == "drain":
            tasks.define(lease, "t", drain=DrainTask(100, "the worker drains"))
        elif how == "release":
            assert await lab.scheduler.release(lab.peer, lease)
        else:
            [held] = lab.worker.lease_manager.leases
            held.expires = anyio.current_time()
        report = await tasks.end("t")
        assert report.cancelled is not None
        reasons = {"stop": "enough", "drain": "drains", "release": "released", "expiry": "renewed"}
        assert reasons[how] in report.cancelled.reason
        assert not [child for child in children if is_alive(child)]
        assert lab.left_behind() == []
        assert run.ended.is_set()
        if how in ("stop", "drain"):
            tasks.start(lease, "next")
            assert (await tasks.end("next")).finished is not None
        else:
            total = lab.worker.arbiter.capabilities.capacity.resources
            await tasks.until(lambda: lab.worker.lease_manager.free.resources == total)
            await tasks.until(lambda: tasks.clean_ends)
        if how == "drain":
            assert tasks.kinds("t") == ["started", "ready", "draining", "cancelled"]


async def test_stale_attempts_are_refused_and_counted(in_task_lab: InTaskLab, recorded: Any) -> None:
    async with in_task_lab() as (_lab, tasks, lease):
        tasks.start(lease, "t", "time.sleep(0.3)", attempt=2)
        tasks.start(lease, "t", attempt=1)
        tasks.start(lease, "t", attempt=2)
        tasks.define(lease, "t", 1, stop=Stop("late"))
        tasks.define(lease, "other", 5, stop=Stop("never begun"))
        assert (await tasks.end("t", 2)).finished is not None
        await tasks.channel(lease).wait_until_handled()
        assert tasks.kinds("t", 1) == []
        assert tasks.kinds("t", 2) == ["started", "ready", "finished"]
        assert recorded.total("hypha.worker.definitions.refused", hypha_reason="stale") == 3
        assert (await tasks.end("other", 5)).cancelled is not None


async def test_a_second_task_at_the_same_time_is_given_back(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (_lab, tasks, lease):
        tasks.start(lease, "one", "time.sleep(60)")
        tasks.start(lease, "two")
        cancelled = await tasks.cancellation("two")
        assert "already runs" in cancelled.reason
        tasks.define(lease, "one", stop=Stop("enough"))
        assert (await tasks.end("one")).cancelled is not None


BAD_SPECS = {
    "executor": ({"executor": "shell/other"}, "executor 'shell/other'"),
    "timeout": ({"timeout_ms": 0}, "timeout_ms is 0"),
    "absolute": ({"outputs": {"o": "/etc/passwd"}}, "'/etc/passwd', which is not inside"),
    "outside": ({"outputs": {"o": "a/../../x"}}, "not inside"),
    "whole": ({"outputs": {"o": "."}}, "not inside"),
    "resources": ({"outputs": {"o": "resources/x"}}, "'resources' and 'resources/x', which overlap"),
    "overlap": ({"outputs": {"o": "a", "p": "a/b"}}, "'a' and 'a/b', which overlap"),
    "too long": ({"outputs": {"o": "a" * 256}}, "which is longer than 255 bytes"),
    "name": ({"outputs": {"a/b": "x"}}, "output 'a/b' is no name"),
    "huge name": ({"outputs": {"a" * 9000: "x"}}, "is no name: use 1 to 64 letters, digits and _.-"),
    "many": ({"outputs": {f"o{n}": f"p{n}" for n in range(101)}}, "limit of 100"),
}


@pytest.mark.parametrize("fault", BAD_SPECS)
async def test_a_definition_that_cannot_be_used_fails_with_the_reason(
    in_task_lab: InTaskLab, recorded: Any, fault: str
) -> None:
    fields, reason = BAD_SPECS[fault]
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "t", **fields)
        found = (await tasks.failure("t")).reason
        assert reason in found
        assert len(found) <= 1000
        assert recorded.total("hypha.worker.definitions.refused", hypha_reason="malformed") == 1
        assert lab.left_behind() == []
        tasks.start(lease, "next")
        assert (await tasks.end("next")).finished is not None


BAD_OUTPUTS = {
    "missing": ("", "made no 'x'"),
    "link": ("os.symlink('/etc/passwd', 'x')", "'x' is a symbolic link"),
    "inner link": ("os.mkdir('x'); os.symlink('/etc/passwd', 'x/y')", "'y' is a symbolic link"),
    "fifo": ("os.mkdir('x'); os.mkfifo('x/y')", "'y' is a FIFO"),
    "long": (
        "os.makedirs('x/' + 'a' * 200 + '/' + 'b' * 100); open('x/' + 'a' * 200 + '/' + 'b' * 100 + '/c', 'w')",
        "longer than 255",
    ),
    "bytes": ("os.mkdir('x'); open(b'x/\\xff', 'w')", "not UTF-8"),
    "many": ("os.mkdir('x'); [open(f'x/{n}', 'w').close() for n in range(2001)]", "more than 2000 files"),
    "large": (
        "os.mkdir('x'); [open(f'x/{n}', 'w').truncate(300_000_000) for n in range(2)]",
        "request more storage",
    ),
}


@pytest.mark.parametrize("fault", BAD_OUTPUTS)
async def test_an_output_that_is_none_fails_the_attempt_and_is_named(in_task_lab: InTaskLab, fault: str) -> None:
    code, reason = BAD_OUTPUTS[fault]
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "t", "open('good', 'w').close();" + code, outputs={"good": "good", "bad": "x"})
        failed = await tasks.failure("t")
        assert failed.reason.startswith("output bad")
        assert reason in failed.reason
        assert lab.worker.outputs.held == ()


@pytest.fixture
def cleared_afterwards(tmp_path: Path) -> Iterator[None]:
    """Folders deeper than Python recurses, left by a test that fails, would break the next sessions of pytest."""
    yield
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


@pytest.mark.usefixtures("cleared_afterwards")
async def test_folders_of_any_depth_are_removed_and_the_next_task_runs(in_task_lab: InTaskLab) -> None:
    """Deeper than Python recurses, and than a path may be long."""
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "t", "[(os.mkdir('dddd'), os.chdir('dddd'), open('f', 'w').close()) for _ in range(1200)]")
        await tasks.end("t")  # it fails if it runs long enough for its storage to be looked at
        assert lab.left_behind() == []
        tasks.start(lease, "next")
        assert (await tasks.end("next")).finished is not None


async def test_a_path_through_a_link_is_no_output(in_task_lab: InTaskLab, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    async with in_task_lab() as (_lab, tasks, lease):
        tasks.start(lease, "t", f"os.symlink({str(tmp_path)!r}, 'x')", outputs={"o": "x/secret"})
        assert "a folder in its path 'x/secret' is a symbolic link" in (await tasks.failure("t")).reason


async def test_outputs_are_served_and_removed_only_for_those_who_may(in_task_lab: InTaskLab, recorded: Any) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "t", "open('x', 'w').write('x'); open('y', 'w').write('y')", outputs={"x": "x", "y": "y"})
        outputs = outputs_of(await tasks.success("t"))
        for request in (
            PullRequest(dataset="output-guess", index=0),
            PullRequest(dataset=outputs["x"].dataset, index=1),
            PullRequest(dataset=outputs["x"].dataset, index=0, name="manifest"),
        ):
            with pytest.raises(TransferRefusedError, match="has no file"):
                await pull_bytes(lab.server, lab.peer, request, max_bytes=100)
        assert recorded.total("hypha.worker.output.requests", hypha_request="pull", hypha_outcome="refused") == 3

        async def release(peer: Any, job_id: uuid.UUID, *names: str) -> int:
            message = ReleaseOutputs(job_id=job_id, datasets=names)
            return (await rpc.call(peer, lab.peer, RELEASE_OUTPUTS, message)).removed

        assert await release(lab.server, tasks.job_id) == 0
        assert await release(lab.scheduler.endpoint, uuid.uuid4(), outputs["x"].dataset) == 0
        assert await pull(lab.server, lab.peer, outputs["x"]) == b"x"
        assert recorded.total("hypha.worker.output.requests", hypha_request="release", hypha_outcome="refused") == 1
        assert await release(lab.scheduler.endpoint, tasks.job_id, outputs["x"].dataset) == 1
        with pytest.raises(TransferRefusedError):
            await pull(lab.server, lab.peer, outputs["x"])
        assert await release(lab.scheduler.endpoint, tasks.job_id) == 1
        assert lab.worker.outputs.held == ()


async def test_outputs_outlive_their_lease_and_take_its_storage(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        manager = lab.worker.lease_manager
        tasks.start(lease, "t", "open('x', 'w').truncate(300_000_000)", outputs={"x": "x"})
        outputs = outputs_of(await tasks.success("t"))
        assert manager.free.resources.storage == pytest.approx(0.5), "the lease still holds it"
        two_files = "os.mkdir('x'); [open(f'x/{n}', 'w').truncate(150_000_000) for n in range(2)]"
        tasks.start(lease, "u", two_files, outputs={"x": "x"})
        assert "the task's storage has 200000000" in (await tasks.failure("u")).reason
        assert await lab.scheduler.release(lab.peer, lease)
        assert manager.free.resources.storage == pytest.approx(0.7)
        message = ReleaseOutputs(job_id=tasks.job_id, datasets=(outputs["x"].dataset,))
        assert (await rpc.call(lab.scheduler.endpoint, lab.peer, RELEASE_OUTPUTS, message)).removed == 1
        assert manager.free.resources.storage == pytest.approx(1.0)


async def test_outputs_are_removed_an_hour_after_the_last_renewal(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        tasks.start(lease, "t", "open('x', 'w').close()", outputs={"x": "x"})
        await tasks.end("t")
        renewed = anyio.current_time()
        await rpc.call(lab.scheduler.endpoint, lab.peer, RENEW_LEASE, RenewLease(id=lease))
        await lab.worker.outputs.remove_expired(renewed + 3590)
        assert len(lab.worker.outputs.held) == 1
        await lab.worker.outputs.remove_expired(renewed + 3610)
        assert lab.worker.outputs.held == ()
        [folder] = (lab.folder / "work").glob("outputs-*")
        assert list(folder.iterdir()) == []


async def test_a_broken_stream_goes_on_without_loss_or_repetition(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        await tasks.until(lambda: lease in tasks.streams)
        for number in range(12):
            tasks.start(lease, f"t{number}", "time.sleep(0.02)")
            if number % 3 == 0:
                await tasks.streams[lease].reset()
            if number % 3 == 1:
                await lab.scheduler.endpoint.disconnect(lab.peer)
            assert (await tasks.end(f"t{number}")).finished is not None
        kinds = [(report.attempt.task, kind_of(report)) for report in tasks.updates]
        expected = [(f"t{number}", kind) for number in range(12) for kind in ("started", "ready", "finished")]
        assert kinds == expected
        assert len(tasks.subscriptions) > 5


async def test_a_refused_subscription_is_tried_again_while_the_lease_lives(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        await tasks.until(lambda: lease in tasks.streams)
        tasks.refuse = "no such lease"
        await tasks.streams[lease].reset()
        await tasks.until(lambda: len(tasks.subscriptions) > 3)
        tasks.refuse = None
        tasks.start(lease, "t")
        assert (await tasks.end("t")).finished is not None
        await lab.scheduler.release(lab.peer, lease)
        count = len(tasks.subscriptions)
        following = await lab.scheduler.hire(ExecutorDescriptor.parse("shell/python"))
        await tasks.until(lambda: following in tasks.streams)
        assert [each.lease for each in tasks.subscriptions[count:]] == [following], "none after the lease"


async def test_a_draining_worker_lets_its_task_end_and_gives_back_the_next(in_task_lab: InTaskLab) -> None:
    async with in_task_lab() as (lab, tasks, lease):
        drains: list[Drain] = []

        async def on_drain(_peer: PeerId, message: Drain) -> DrainReceived:
            drains.append(message)
            return DrainReceived()

        rpc.serve(lab.scheduler.endpoint, ANNOUNCE_DRAIN, on_drain)
        code = "while not os.path.exists('go'):\n time.sleep(0.01)\nopen('x', 'w').write('x')"
        tasks.start(lease, "t", code, outputs={"x": "x"})
        await tasks.until(lambda: "ready" in tasks.kinds("t"))
        [run] = lab.worker.draining.running
        assert run.attempt.task == "t"
        lab.worker.draining.request(30.0, "its owner drains it")
        async with anyio.create_task_group() as group:
            group.start_soon(lab.worker.draining.run)
            await tasks.until(lambda: drains)
            tasks.start(lease, "next")
            lab.let_all_go()
            output = outputs_of(await tasks.success("t"))["x"]
            assert (await tasks.end("next")).cancelled is not None
            assert await pull(lab.server, lab.peer, output) == b"x", "it is held until it is released"
            await rpc.call(
                lab.scheduler.endpoint, lab.peer, RELEASE_OUTPUTS, ReleaseOutputs(job_id=tasks.job_id, datasets=())
            )
        assert drains[0].leases == (lease,)


NAMES = st.sampled_from(["a", "b", "a.b", "a[1]", "../a", "", "x" * 65]) | st.text(max_size=10)
PATHS = st.sampled_from(
    ["a", "b", "a/b", "./a", "../a", "/a", "a/", "a//b", ".", "", "resources", "resources/a", "a\0"]
)
SETTINGS = st.sampled_from(["{}", "[]", "{", '{"a": 1}', '{"a": 1, "a": 2}', "{" * 70]) | st.text(max_size=10)


@given(SETTINGS, st.lists(NAMES, max_size=2), st.lists(st.tuples(NAMES, PATHS | st.text()), max_size=3))
def test_whatever_a_definition_holds_it_is_refused_or_stays_inside(
    settings: str, resources: list[str], outputs: list[tuple[str, str]]
) -> None:
    spec = TaskSpec(
        executor="x",
        settings=settings,
        resources=tuple(TaskResource(name=name, uri=UriSource("x")) for name in resources),
        outputs=tuple(OutputPath(name, path) for name, path in outputs),
    )
    try:
        check_start(spec, [ExecutorDescriptor.parse("x")])
    except DefinitionError:
        return
    folder = Path("/work")
    places = [folder / "resources" / name for name in resources] + [folder / path for _, path in outputs]
    assert all(folder in Path(os.path.normpath(place)).parents for place in places)
    assert not [one for one in places for other in places if one is not other and one.is_relative_to(other)]
