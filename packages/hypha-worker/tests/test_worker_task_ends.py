"""Training tasks in real processes: what is reported of their ends, what they see, and what stays of them."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from hypha_proto.job_spec import All, PeersReference
from hypha_proto.resources import Resources
from hypha_proto.training_reports import (
    BatchDone,
    Done,
    ReportAnswer,
    ReportTraining,
    ScheduleUpdate,
)
from hypha_proto.transfer import PSEUDO_GRADIENT
from hypha_worker.errors import ExecutionError
from hypha_worker.executors.process import process_runner
from hypha_worker.executors.process.environment import base_environment, substitute
from hypha_worker.leasing import retention
from hypha_worker.tasks.execution import Execution, TaskContext

InLab = Callable[..., Any]

SLEEPER = """
import subprocess
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
child, orphan = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
print("pids", os.getpid(), child.pid, orphan.pid, flush=True)
post("/status/send", {"status": {"batch_size": 1}})
"""
WAITS = SLEEPER + "time.sleep(60)\n"
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pids", os.getpid(), flush=True)
post("/status/send", {"status": {"batch_size": 1}})
time.sleep(60)
"""


def alive(work_dir: Path) -> list[psutil.Process]:
    """Return the processes of jobs in `work_dir`; the ids that they know may be those of their namespace."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME", "").startswith(str(work_dir)):
                found.append(process)
    return found


TRAINS = """
status, files = post("/resources/fetch", config["data"])
assert status == 200, files
[file] = files
assert open(os.path.join(work_dir, file["path"]), "rb").read() == b"slice 0"
assert file["metadata"]["slice"] == "0" and file["metadata"]["dataset"] == "digits", file
status, answer = post("/resources/fetch", {"resource": config["data"], "path": "more"})
assert (status, answer["error"]) == (410, "no-more-data"), answer
events = listen({"resource": config["results"], "path": "incoming"})
status, answer = post("/status/send", {"status": {"batch_size": 8, "round_time": 3.5}})
assert (status, answer) == (200, {"type": "ScheduleUpdate", "counter": 0}), answer
open(os.path.join(work_dir, "update.safetensors"), "wb").write(b"gradient")
status, answer = post(
    "/resources/send", {"resource": config["updates"], "path": "update.safetensors", "round": 1, "samples": 24}
)
assert status == 200, answer
event = next(events)
assert event["round"] == 1 and event["path"].startswith("incoming/"), event
assert open(os.path.join(work_dir, event["path"]), "rb").read() == b"outer"
status, answer = post("/status/send", "update-received")
assert answer == {"type": "Done"}, answer
"""


async def test_a_job_trains_a_round_through_the_bridge(in_lab: InLab) -> None:
    async with in_lab() as lab:
        pushed = lab.receive_pushes(lab.server)
        lab.serve_slices(1)

        def answer(report: ReportTraining) -> ReportAnswer:
            assert report.attempt.job_id == lab.scheduler.job_id
            return ScheduleUpdate(counter=0) if isinstance(report.progress, BatchDone) else Done()

        lab.scheduler.answer = answer
        lease = await lab.start(TRAINS)
        await lab.scheduler.until(lambda: pushed.files)
        await lab.push(lab.server, 1, b"outer")
        end = await lab.scheduler.ended()
        assert (end.outcome, end.reason, end.exit_code) == ("finished", "", 0), end
        assert end.lease == lease
        assert (end.bytes_sent, end.bytes_received) == (len(b"gradient"), len(b"slice 0") + len(b"outer"))
        assert lab.scheduler.statuses == ["started", "ready", "finished"]
        [(sender, header, content)] = pushed.files
        assert (sender, content) == (lab.peer, b"gradient")
        attempt = lab.scheduler.reports[0].attempt
        assert attempt == lab.scheduler.tasks.name(end.task, end.attempt)
        assert (header.kind, header.round, header.samples, header.attempt) == (PSEUDO_GRADIENT, 1, 24, attempt)
        assert lab.left_behind() == []


SENDS = """
size = {size}
open(os.path.join(work_dir, "update.safetensors"), "wb").write(b"x" * size)
status, answer = post("/resources/send", {{"resource": config["updates"], "path": "update.safetensors"}})
assert status == 200, answer
post("/status/send", {{"status": {{"batch_size": 1}}}})
listen({{"resource": config["results"], "path": "incoming"}}).__next__()
"""


async def test_bytes_of_two_tasks_at_once_are_counted_apart(in_lab: InLab) -> None:
    async with in_lab() as lab:
        lab.receive_pushes(lab.server)
        sent = {1000: (lab.server, b"outer"), 3000: (lab.data, b"outer update")}
        leases = {}
        for count, (size, (sender, _)) in enumerate(sent.items(), 1):
            results = PeersReference(peers=(sender.peer_id,), strategy=All())
            leases[await lab.start(SENDS.format(size=size), lab.train_spec(results=results))] = size
            await lab.scheduler.until(lambda count=count: len(lab.scheduler.reports) == count)
        for sender, content in sent.values():
            await lab.push(sender, 1, content)
        for _ in sent:
            end = await lab.scheduler.ended()
            size = leases[end.lease]
            assert (end.outcome, end.bytes_sent, end.bytes_received) == ("finished", size, len(sent[size][1]))


@pytest.mark.parametrize(
    ("script", "reason", "code"),
    [
        ("print('before'); print('the reason', file=sys.stderr); sys.exit(3)", "exited with status 3", 3),
        ("print('before'); print('the reason', flush=True); os.kill(os.getpid(), 9)", "was ended by SIGKILL", -9),
    ],
)
async def test_a_failed_executor_is_reported_with_its_last_lines(
    in_lab: InLab, script: str, reason: str, code: int
) -> None:
    async with in_lab() as lab:
        await lab.start("sys.stdout.reconfigure(line_buffering=True)\n" + script)
        end = await lab.scheduler.ended()
        assert (end.outcome, end.exit_code, end.last_lines) == ("failed", code, ("before", "the reason"))
        assert reason in end.reason
        assert lab.left_behind() == []


async def test_an_executors_logged_error_comes_first_and_its_spec_is_shortened(in_lab: InLab) -> None:
    script = """
print("ERROR hypha.training: an older one")
print("ERROR hypha.training: no Pillow")
for number in range(55):
    print("traceback", number)
print("Command", ["--job", sys.argv[3]], "failed")
sys.exit(1)
"""
    async with in_lab() as lab:
        await lab.start(script)
        lines = (await lab.scheduler.ended()).last_lines
        assert lines[-1] == "Command ['--job', '{JOB_JSON}'] failed"
        assert len(lines) == 50
        assert lines[:2] == ("ERROR hypha.training: no Pillow", "traceback 7")


async def test_an_executor_that_cannot_be_started_fails_the_job(in_lab: InLab, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.symlink_to("/bin/false")
    executor = {"class": "train", "name": "script", "runtime": "process", "cmd": str(program)}
    async with in_lab(executors=[executor]) as lab:
        program.unlink()  # it was there when the worker checked it
        await lab.start("")
        assert "program' is not found" in await lab.scheduler.failure()


@pytest.mark.parametrize("script", [WAITS, STUBBORN], ids=["willing", "stubborn"])
async def test_shutdown_ends_jobs_soon_and_reports_it(
    in_lab: InLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(process_runner, "TERM_GRACE", 3600.0)
    monkeypatch.setattr(process_runner, "SHUTDOWN_GRACE", 0.2)
    async with in_lab() as lab:
        await lab.start(script)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        seen.append(lab.scheduler)
    [end] = seen[0].ends
    assert (end.outcome, end.reason) == ("cancelled", "the worker is shutting down")
    assert alive(tmp_path / "work") == []
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["control", "logs"]


async def test_a_lease_that_ends_while_its_scheduler_is_gone_is_served_no_longer(in_lab: InLab) -> None:
    """The end of its task can be reported to nobody."""
    async with in_lab() as lab:
        await lab.start(WAITS)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        lab.network.partition(lab.peer, lab.scheduler.endpoint.peer_id)
        [lease] = lab.worker.lease_manager.leases
        lease.expires = anyio.current_time()
        await lab.scheduler.until(lambda: not lab.worker.tasks._sessions)
        assert lab.worker.tasks.running == ()


PRINTS = """
names = "OMP_NUM_THREADS", "HYPHA_EXECUTOR_MEMORY", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OWN"
for name in names:
    print(name, repr(os.environ.get(name)))
print(os.getcwd() == work_dir == os.path.dirname(os.environ["JOB"]), oct(os.stat(work_dir).st_mode))
print(json.load(open(os.environ["JOB"])) == job, config["model"]["artifact"]["token"])
sys.exit(1)
"""


async def test_a_job_sees_its_own_devices_folder_and_spec_and_no_secret(in_lab: InLab, tmp_path: Path) -> None:
    executor = {
        "class": "train",
        "name": "script",
        "runtime": "process",
        "cmd": sys.executable,
        "args": ["-I", "-S", str(tmp_path / "script.py"), "{SOCKET_PATH}", "{WORK_DIR}", "{JOB_JSON}"],
        "env": {"JOB": "{JOB_FILE}", "OWN": "{not a word}"},
    }
    devices = [{"index": 0, "memory": 16.0}, {"index": 1, "memory": 24.0}]
    async with in_lab(executors=[executor], resources={"cpu": 4.0, "memory": 4.0, "devices": devices}) as lab:
        lab.write_script(PRINTS)
        first = await lab.scheduler.hire(gpu=10.0)
        second = await lab.scheduler.hire(gpu=20.0, cpu=2.0, memory=1.5)
        third = await lab.scheduler.hire(cpu=1.0)
        seen = []
        for lease in (first, second, third):
            await lab.scheduler.dispatch(lease, lab.train_spec())
            end = await lab.scheduler.ended()
            assert end.last_lines[4:] == ("OWN '{not a word}'", "True 0o40700", "True None")
            seen.append(end.last_lines[:4])
        expected = ("1", None, "0"), ("2", "1500000000", "1"), ("1", None, "")
        for (threads, memory, cuda, rocr), (wanted, size, devices) in zip(seen, expected, strict=True):
            assert threads == f"OMP_NUM_THREADS {wanted!r}"
            assert memory == f"HYPHA_EXECUTOR_MEMORY {size!r}"
            assert cuda == f"CUDA_VISIBLE_DEVICES {devices!r}"
            assert rocr == f"ROCR_VISIBLE_DEVICES {devices!r}"


USES_SOCKET = """
path, link = sys.argv[1], os.path.join(work_dir, "bridge.sock")
print(os.path.samefile(path, link), os.path.islink(link), oct(os.stat(link).st_mode & 0o777), len(path) < 108)
print(post("/telemetry/spans", {"spans": []})[0], flush=True)
try:
    os.remove(link)
    os.symlink(os.path.join(work_dir, "..", "kept"), link)
except OSError:  # a sandbox may have mounted it
    pass
sys.exit(1)
"""


@pytest.mark.parametrize("long", [False, True])
async def test_a_job_finds_its_socket_in_its_folder_and_may_do_with_it_what_it_likes(in_lab: InLab, long: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as short:
        (work_dir := Path(short) / ("x" * 60 if long else "w")).mkdir(mode=0o750)
        (kept := work_dir / "kept").write_text("kept")
        async with in_lab(work_dir=work_dir) as lab:
            await lab.start(USES_SOCKET)
            end = await lab.scheduler.ended()
            assert end.last_lines == (f"True {long} 0o600 True", "200"), end
            assert sorted(path.name for path in work_dir.iterdir()) == ["control", "kept", "logs"]
            assert kept.read_text() == "kept"


def test_placeholders_inside_values_are_not_substituted() -> None:
    words = {"{A}": "{B}", "{B}": "b", "{C}": "{A}"}
    assert substitute("-{A}-{B}-{C}-{D}-{}", words) == "-{B}-b-{A}-{D}-{}"


def test_a_worker_of_a_user_without_a_home_runs_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with another user id, which has no entry among the users."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    made = base_environment(tmp_path, Resources(), [tmp_path])
    assert made["HOME"] == str(tmp_path)


class FailsWhenCancelled(Execution):
    """An execution that fails while it is being cancelled, with a task still running."""

    def __init__(self, context: TaskContext) -> None:
        self._context = context

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            self._context.scope.cancel()
            raise ExecutionError("it failed")


async def test_a_job_that_fails_while_it_is_cancelled_does_not_end_the_worker(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.executors.parameter_server.server.ParameterServer", FailsWhenCancelled)
    async with in_lab() as lab:
        for _ in range(2):  # the second shows that the worker still runs
            lease = await lab.scheduler.hire(lab.SERVER)
            await lab.scheduler.dispatch(lease, lab.aggregate_spec([], []))
            end = await lab.scheduler.ended()
            assert (end.lease, end.outcome) == (lease, "cancelled")
            await lab.scheduler.release(lab.peer, lease)


@pytest.mark.parametrize("how", ["ended", "cancelled"])
async def test_resources_stay_taken_while_a_process_survives_sigkill(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch, recorded: Any, how: str
) -> None:
    """After 30 s they counted as free before, and a further job ran beside the process."""
    monkeypatch.setattr(process_runner, "TERM_GRACE", 0.05)
    monkeypatch.setattr(process_runner, "SHUTDOWN_GRACE", 0.05)
    monkeypatch.setattr(process_runner, "KILL_GRACE", 0.1)
    monkeypatch.setattr(retention, "RETENTION_POLL", 0.02)
    async with in_lab(isolation={"disable": ["bubblewrap", "supervisor", "cgroup"]}) as lab:
        manager, kill = lab.worker.lease_manager, os.kill
        before = manager.free.resources.cpu
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda *_: None)
            patch.setattr(psutil.Process, "send_signal", lambda *_: None)
            lease = await lab.start(SLEEPER if how == "ended" else WAITS)
            await lab.scheduler.until(lambda: lab.scheduler.reports)
            if how == "cancelled":
                await lab.scheduler.release(lab.peer, lease)
            await lab.scheduler.ended()
            left = alive(lab.folder / "work")
            assert len(left) >= 2
            await lab.scheduler.until(lambda: manager.leases == ())
        assert manager.free.resources.cpu == before - 1.0
        assert recorded.total("hypha.worker.leases.retained") == 1
        for process in left:
            kill(process.pid, signal.SIGKILL)
        await lab.scheduler.until(lambda: manager.free.resources.cpu == before)
        assert recorded.total("hypha.worker.leases.retained") == 0
