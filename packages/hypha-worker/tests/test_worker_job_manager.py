"""Jobs in real processes: they run, fail, are cancelled, and leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import psutil
import pytest

from hypha_net import rpc, transfer
from hypha_proto.dispatch import DISPATCH_JOB, Dispatched, DispatchFailed, DispatchJob
from hypha_proto.job_spec import All, JobSpec, PeersReference
from hypha_proto.leases import (
    CANCEL_JOB,
    RELEASE_LEASE,
    WHY_NOT,
    CancelJob,
    ReleaseLease,
    RenewalFailed,
    Renewed,
    WhyNot,
)
from hypha_proto.progress import (
    BatchDone,
    Continue,
    Done,
    ProgressRequest,
    ProgressResponse,
    RoundMetrics,
    ScheduleUpdate,
)
from hypha_proto.transfer import OTHER_FILE, OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader
from hypha_worker.errors import ExecutionError
from hypha_worker.executors.process import process_runner
from hypha_worker.executors.process.environment import substitute
from hypha_worker.executors.process.process_runner import exit_text
from hypha_worker.jobs.execution import ExecutionTrace, JobContext
from hypha_worker.leasing import retention

InLab = Callable[..., None]

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


def pids_of(lines: tuple[str, ...]) -> list[int]:
    return [int(word) for line in lines if line.startswith("pids") for word in line.split()[1:]]


def alive(work_dir: Path) -> list[psutil.Process]:
    """Return the processes of jobs in `work_dir`; the ids that they know may be those of their namespace."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME", "").startswith(str(work_dir)):
                found.append(process)
    return found


async def push_result(lab: Any, spec: Any, number: int, content: bytes) -> None:
    path = lab.folder / f"outer-{number}"
    path.write_bytes(content)
    size, digest = await transfer.describe(path)
    header = PushHeader(
        job_id=spec.job_id, round=number, kind=OUTER_UPDATE, name="../outer.safetensors", size=size, digest=digest
    )
    await transfer.push(lab.server, lab.peer, path, header)


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
print("done with", os.environ["OMP_NUM_THREADS"], "threads")
"""


def test_a_job_trains_a_round_through_the_bridge(in_lab: InLab, push_receiver: Any, serve_slices: Any) -> None:
    async def case(lab: Any) -> None:
        spec, pushed = lab.train_spec(), push_receiver(lab.server, lab.folder / "server")
        pushed.listen()
        await serve_slices(lab, 1)

        def answer(report: ProgressRequest) -> ProgressResponse:
            assert report.job_id == spec.job_id
            return ScheduleUpdate(counter=0) if isinstance(report.progress, BatchDone) else Done()

        lab.scheduler.answer = answer
        lease = await lab.start(TRAINS, spec)
        await lab.scheduler.until(lambda: pushed.files)
        await push_result(lab, spec, 1, b"outer")
        end = await lab.scheduler.ended()
        assert (end.outcome, end.reason, end.exit_code) == ("finished", "", 0), end
        assert end.lease == lease
        assert end.last_lines == ("done with 1 threads",)
        assert (end.bytes_sent, end.bytes_received) == (len(b"gradient"), len(b"slice 0") + len(b"outer"))
        await lab.scheduler.until(lambda: len(lab.scheduler.statuses) == 2)
        assert lab.scheduler.statuses == ["Running", "Finished"]
        [(sender, header, content)] = pushed.files
        assert (sender, content) == (lab.peer, b"gradient")
        assert (header.kind, header.round, header.samples, header.job_id) == (PSEUDO_GRADIENT, 1, 24, spec.job_id)
        assert lab.scheduler.reports[0].lease == lease
        assert lab.left_behind() == []
        assert lab.scheduler.free_at_end == [lab.worker.arbiter.capabilities.capacity.resources]

    in_lab(case)


VARIANT = """
status, files = post("/resources/fetch", {"resource": config["data"], "path": "slices"})
assert status == 200, files
open(os.path.join(work_dir, "update.safetensors"), "w").write(str(config["seed"]))
post("/status/send", {"status": {"batch_size": 8}})
status, answer = post(
    "/resources/send", {"resource": config["updates"], "path": "update.safetensors", "round": 1, "samples": 8}
)
assert status == 200, answer
status, answer = post("/status/send", {"metrics": {"round": 1, "metrics": {"loss": 1.0}}})
assert answer == {"type": "Done"}, answer
print("variant is done")
"""


RECEIVES = """
events = listen({"receive": {"type": "Peers", "peers": [], "strategy": "All"}, "out_dir": "incoming"})
post("/status/send", {"status": {"batch_size": 1}})
event = next(events)
print(event["path"], event["kind"], event["sequence"], event["from_peer"])
"""


def test_a_job_receives_other_files_from_any_peer_of_its_references(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        spec, sender = lab.train_spec(), lab.scheduler.endpoint
        await lab.start(RECEIVES, spec)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        path = lab.folder / "chunk-0.bin"
        path.write_bytes(b"chunk")
        size, digest = await transfer.describe(path)
        header = PushHeader(spec.job_id, 1, OTHER_FILE, path.name, size, digest)
        with pytest.raises(transfer.TransferRefusedError, match="in none of the references"):
            await transfer.push(lab.data, lab.peer, path, header)
        await transfer.push(sender, lab.peer, path, header)
        end = await lab.scheduler.ended()
        assert end.last_lines == (f"incoming/chunk-0.bin file 0 {sender.peer_id}",)
        assert end.outcome == "finished"

    in_lab(case)


def variant(lab: Any, job_id: uuid.UUID, seed: int) -> JobSpec:
    """Make a task that sends its update to the scheduler and gets no outer update."""
    spec = lab.train_spec(job_id)
    scheduler = PeersReference(peers=(lab.scheduler.endpoint.peer_id,), strategy=All())
    nobody = PeersReference(peers=(), strategy=All())
    config = msgspec.structs.replace(spec.executor.config, updates=scheduler, results=nobody, seed=seed)
    return JobSpec(job_id=job_id, executor=msgspec.structs.replace(spec.executor, config=config))


def test_variants_of_a_job_run_side_by_side_and_one_after_the_other(
    in_lab: InLab, push_receiver: Any, serve_slices: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def case(lab: Any) -> None:
        scheduler, job_id = lab.scheduler, uuid.uuid4()
        pushed = push_receiver(scheduler.endpoint, lab.folder / "scheduler")
        pushed.listen()
        await serve_slices(lab, 4)
        scheduler.answer = lambda report: Done() if isinstance(report.progress, RoundMetrics) else Continue()
        lab.write_script(VARIANT)
        leases = [await scheduler.hire(cpu=1.0) for _ in range(2)]

        async def run(attempt: int) -> None:
            for lease, seed in zip(leases, (10, 20), strict=True):
                spec = variant(lab, job_id, seed + attempt)
                message = DispatchJob(id=lease, spec=spec, keep_lease=True, attempt=attempt)
                answer = await rpc.call(scheduler.endpoint, lab.peer, DISPATCH_JOB, message)
                assert isinstance(answer, Dispatched)
            await scheduler.until(lambda: len(scheduler.ends) == 2 * attempt + 2)
            assert len(pushed.files) == len(scheduler.ends), "an update arrives before the end is reported"

        await run(0)
        cancel = CancelJob(id=leases[0], reason="late", attempt=0)
        assert not (await rpc.call(scheduler.endpoint, lab.peer, CANCEL_JOB, cancel)).known
        await run(1)
        assert {(end.lease, end.attempt, end.outcome) for end in scheduler.ends} == {
            (lease, attempt, "finished") for lease in leases for attempt in (0, 1)
        }, scheduler.ends
        sent = [(header.lease, content) for _, header, content in pushed.files]
        assert sorted(sent, key=str) == sorted(
            [(lease, b"%d" % (seed + more)) for lease, seed in zip(leases, (10, 20), strict=True) for more in (0, 1)],
            key=str,
        )
        assert lab.left_behind() == []
        assert lab.worker.lease_manager.free.resources.cpu == 0.0, "both leases are kept"
        lines = [text for text in caplog.messages if text.endswith("] variant is done")]
        assert (len(lines), len(set(lines))) == (4, 2), "lines of two tasks can be told apart"


SENDS = """
size = {size}
open(os.path.join(work_dir, "update.safetensors"), "wb").write(b"x" * size)
status, answer = post("/resources/send", {{"resource": config["updates"], "path": "update.safetensors"}})
assert status == 200, answer
post("/status/send", {{"status": {{"batch_size": 1}}}})
listen({{"resource": config["results"], "path": "incoming"}}).__next__()
"""


def test_bytes_of_two_jobs_at_once_are_counted_apart(in_lab: InLab, push_receiver: Any) -> None:
    sizes = {1000: b"outer", 3000: b"outer update"}

    async def case(lab: Any) -> None:
        pushed = push_receiver(lab.server, lab.folder / "server")
        pushed.listen()
        specs, ends = {}, {}
        for size in sizes:
            specs[size] = lab.train_spec()
            await lab.start(SENDS.format(size=size), specs[size])
            count = len(specs)
            await lab.scheduler.until(lambda count=count: len(lab.scheduler.reports) == count)
        for size, content in sizes.items():
            await push_result(lab, specs[size], 1, content)
        await lab.scheduler.until(lambda: len(lab.scheduler.ends) == 2, 20.0)
        ends = {end.job_id: (end.outcome, end.bytes_sent, end.bytes_received) for end in lab.scheduler.ends}
        assert ends == {specs[size].job_id: ("finished", size, len(content)) for size, content in sizes.items()}

    in_lab(case)


def test_a_second_job_gets_the_machine_as_soon_as_the_first_has_ended(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        lab.write_script("print('hello')")
        for _ in range(2):
            lease = await lab.scheduler.hire(cpu=2.0)
            await lab.scheduler.dispatch(lab.peer, lease, lab.train_spec())
            assert (await lab.scheduler.ended()).outcome == "finished"

    in_lab(case)


@pytest.mark.parametrize(
    ("script", "reason", "code"),
    [
        ("print('before'); print('the reason', file=sys.stderr); sys.exit(3)", "exited with status 3", 3),
        ("print('before'); print('the reason', flush=True); os.kill(os.getpid(), 9)", "was ended by SIGKILL", -9),
    ],
)
def test_a_failed_executor_is_reported_with_its_last_lines(in_lab: InLab, script: str, reason: str, code: int) -> None:
    async def case(lab: Any) -> None:
        await lab.start("sys.stdout.reconfigure(line_buffering=True)\n" + script)
        end = await lab.scheduler.ended()
        assert (end.outcome, end.exit_code, end.last_lines) == ("failed", code, ("before", "the reason"))
        assert reason in end.reason
        assert lab.left_behind() == []
        await lab.scheduler.until(lambda: "Failed" in lab.scheduler.statuses)

    in_lab(case)


@pytest.mark.parametrize("code", [1, 0])
def test_an_executors_logged_error_comes_first_and_its_spec_is_shortened(in_lab: InLab, code: int) -> None:
    script = f"""
print("ERROR hypha.training: an older one")
print("ERROR hypha.training: no Pillow")
for number in range(55):
    print("traceback", number)
print("Command", ["--job", sys.argv[3]], "failed")
sys.exit({code})
"""

    async def case(lab: Any) -> None:
        await lab.start(script)
        lines = (await lab.scheduler.ended()).last_lines
        assert lines[-1] == "Command ['--job', '{JOB_JSON}'] failed"
        assert len(lines) == 50
        if code:
            assert lines[:2] == ("ERROR hypha.training: no Pillow", "traceback 7")
        else:
            assert lines[0] == "traceback 6"

    in_lab(case)


def test_an_executor_that_cannot_be_started_fails_the_job(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        await lab.start("")
        end = await lab.scheduler.ended()
        assert end.outcome == "failed"
        assert "'no-such-program' is not found" in end.reason

    executor = {"class": "train", "name": "script", "runtime": "process", "cmd": "no-such-program"}
    in_lab(case, executors=[executor])


def test_processes_left_by_an_executor_are_ended_with_it(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        await lab.start(SLEEPER)
        end = await lab.scheduler.ended()
        assert end.outcome == "finished"
        pids = pids_of(end.last_lines)
        assert len(pids) == 3
        assert alive(lab.folder / "work") == []

    in_lab(case)


@pytest.mark.parametrize("how", ["release", "cancel", "expiry"])
def test_a_job_ends_with_its_lease_and_its_whole_process_tree(in_lab: InLab, how: str) -> None:
    async def case(lab: Any) -> None:
        lease = await lab.start(WAITS)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        assert len(alive(lab.folder / "work")) >= 3
        if how == "expiry":
            [held] = lab.worker.lease_manager.leases
            held.expires = anyio.current_time()
        endpoint, total = lab.scheduler.endpoint, lab.worker.arbiter.capabilities.capacity.resources
        if how == "release":
            assert await lab.scheduler.release(lab.peer, lease)
        elif how == "cancel":
            answer = await rpc.call(endpoint, lab.peer, CANCEL_JOB, CancelJob(id=lease, reason="enough"))
            assert answer.known
        assert lab.worker.lease_manager.free.resources.cpu == 1.0, "not free before the processes are gone"
        end = await lab.scheduler.ended()
        assert end.outcome == "cancelled"
        assert {"release": "released", "cancel": "enough", "expiry": "not renewed in time"}[how] in end.reason
        pids = pids_of(end.last_lines)
        assert len(pids) == 3
        assert alive(lab.folder / "work") == []
        assert lab.left_behind() == []
        if how == "cancel":
            assert lab.worker.lease_manager.free.resources.cpu == 1.0
            lab.write_script("print('again')")
            assert isinstance(await lab.scheduler.dispatch(lab.peer, lease, lab.train_spec()), Dispatched)
            assert (await lab.scheduler.ended()).last_lines == ("again",)
        else:
            assert lab.scheduler.free_at_end == [total]

    in_lab(case)


@pytest.mark.parametrize("script", [WAITS, STUBBORN], ids=["willing", "stubborn"])
def test_shutdown_ends_jobs_soon_and_reports_it(
    in_lab: InLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(process_runner, "TERM_GRACE", 3600.0)
    monkeypatch.setattr(process_runner, "SHUTDOWN_GRACE", 0.2)

    async def case(lab: Any) -> None:
        await lab.start(script)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        seen.append(lab.scheduler)

    in_lab(case)
    [end] = seen[0].ends
    assert (end.outcome, end.reason) == ("cancelled", "the worker is shutting down")
    assert pids_of(end.last_lines)
    assert alive(tmp_path / "work") == []
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["control", "logs"]


def test_a_worker_that_shuts_down_starts_no_job(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        lease = await lab.scheduler.hire()
        lab.worker.jobs._tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            answer = await lab.scheduler.dispatch(lab.peer, lease, lab.train_spec())
        assert isinstance(answer, DispatchFailed)
        assert not lab.worker.jobs.running

    in_lab(case)


def test_other_peers_cannot_use_a_lease(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        lease = await lab.start(WAITS)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        stranger = type(lab.scheduler)(lab.data)
        assert isinstance(await stranger.renew(lab.peer, lease), RenewalFailed)
        assert isinstance(await stranger.dispatch(lab.peer, lease, lab.train_spec()), DispatchFailed)
        assert not await stranger.release(lab.peer, lease)
        message = CancelJob(id=lease, reason="mischief")
        assert not (await rpc.call(lab.data, lab.peer, CANCEL_JOB, message)).known
        assert lab.worker.jobs.running
        assert isinstance(await lab.scheduler.renew(lab.peer, lease), Renewed)

    in_lab(case)


def test_invalid_dispatches_are_refused_and_repeated_ones_confirmed(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        spec = lab.train_spec()
        lease = await lab.start(WAITS, spec)
        assert isinstance(await lab.scheduler.dispatch(lab.peer, lease, spec), Dispatched)
        assert len(lab.worker.jobs.running) == 1
        assert isinstance(await lab.scheduler.dispatch(lab.peer, lease, lab.train_spec()), DispatchFailed)
        assert isinstance(await lab.scheduler.dispatch(lab.peer, uuid.uuid4(), spec), DispatchFailed)
        other = await lab.scheduler.hire()
        assert isinstance(await lab.scheduler.dispatch(lab.peer, other, spec), DispatchFailed), "the same job twice"
        unknown = lab.aggregate_spec([lab.data.peer_id], [lab.data.peer_id])
        assert isinstance(await lab.scheduler.dispatch(lab.peer, other, unknown), Dispatched)

    in_lab(case)


def test_a_worker_explains_why_it_would_not_bid(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        async def reasons(**wanted: float) -> tuple[str, ...]:
            message = WhyNot(request=lab.scheduler.request(**wanted))
            return (await rpc.call(lab.scheduler.endpoint, lab.peer, WHY_NOT, message)).reasons

        assert await reasons(cpu=1.0) == ()
        assert await reasons(cpu=8.0, bid=10.0) == (
            "the bid of 10 is below 50, the least this worker accepts",
            "cpu: 8 requested, this worker has 2",
        )
        await lab.scheduler.hire(cpu=2.0)
        assert await reasons(cpu=1.0) == ("cpu: this worker has enough, but too much of it is leased",)

    in_lab(case)


def test_an_older_scheduler_gets_a_status(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        await lab.start("print('hello')")
        await lab.scheduler.until(lambda: lab.scheduler.statuses == ["Running", "Finished"])
        assert lab.scheduler.ends == []

    in_lab(case, old=True)


def test_the_end_of_a_job_is_reported_after_the_scheduler_was_unreachable(
    in_lab: InLab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hypha_worker.connectors.rpc_retry")

    async def case(lab: Any) -> None:
        await lab.start("while not os.path.exists(work_dir + '/go'): time.sleep(0.01)")
        lab.network.partition(lab.peer, lab.scheduler.endpoint.peer_id)
        (lab.worker.jobs.running[0].work_dir / "go").touch()
        await lab.scheduler.until(lambda: "again in" in caplog.text)
        lab.network.heal(lab.peer, lab.scheduler.endpoint.peer_id)
        assert (await lab.scheduler.ended()).outcome == "finished"

    in_lab(case)


def test_a_release_without_a_job_frees_the_machine_at_once(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        lease = await lab.scheduler.hire(cpu=2.0)
        answer = await rpc.call(lab.scheduler.endpoint, lab.peer, RELEASE_LEASE, ReleaseLease(id=lease))
        assert answer.known
        assert lab.worker.lease_manager.free.resources.cpu == 2.0

    in_lab(case)


PRINTS = """
names = "OMP_NUM_THREADS", "HYPHA_EXECUTOR_MEMORY", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OWN"
for name in names:
    print(name, repr(os.environ.get(name)))
print(os.getcwd() == work_dir == os.path.dirname(os.environ["JOB"]), oct(os.stat(work_dir).st_mode))
print(json.load(open(os.environ["JOB"])) == job, config["model"]["artifact"]["token"])
"""


def test_a_job_sees_its_own_devices_folder_and_spec_and_no_secret(in_lab: InLab, tmp_path: Path) -> None:
    async def case(lab: Any) -> None:
        lab.write_script(PRINTS)
        first = await lab.scheduler.hire(gpu=10.0)
        second = await lab.scheduler.hire(gpu=20.0, cpu=2.0, memory=1.5)
        third = await lab.scheduler.hire(cpu=1.0)
        seen = []
        for lease in (first, second, third):
            await lab.scheduler.dispatch(lab.peer, lease, lab.train_spec())
            end = await lab.scheduler.ended()
            assert end.outcome == "finished", end
            assert end.last_lines[4:] == ("OWN '{not a word}'", "True 0o40700", "True None")
            seen.append(end.last_lines[:4])
        expected = ("1", None, "0"), ("2", "1500000000", "1"), ("1", None, "")
        for (threads, memory, cuda, rocr), (wanted, size, devices) in zip(seen, expected, strict=True):
            assert threads == f"OMP_NUM_THREADS {wanted!r}"
            assert memory == f"HYPHA_EXECUTOR_MEMORY {size!r}"
            assert cuda == f"CUDA_VISIBLE_DEVICES {devices!r}"
            assert rocr == f"ROCR_VISIBLE_DEVICES {devices!r}"

    executor = {
        "class": "train",
        "name": "script",
        "runtime": "process",
        "cmd": sys.executable,
        "args": ["-I", "-S", str(tmp_path / "script.py"), "{SOCKET_PATH}", "{WORK_DIR}", "{JOB_JSON}"],
        "env": {"JOB": "{JOB_FILE}", "OWN": "{not a word}"},
    }
    devices = [{"index": 0, "memory": 16.0}, {"index": 1, "memory": 24.0}]
    in_lab(case, executors=[executor], resources={"cpu": 4.0, "memory": 4.0, "devices": devices})


USES_SOCKET = """
path, link = sys.argv[1], os.path.join(work_dir, "bridge.sock")
print(os.path.samefile(path, link), os.path.islink(link), oct(os.stat(link).st_mode & 0o777), len(path) < 108)
print(post("/telemetry/spans", {"spans": []})[0], flush=True)
try:
    os.remove(link)
    os.symlink(os.path.join(work_dir, "..", "kept"), link)
except OSError:  # a sandbox may have mounted it
    pass
"""


@pytest.mark.parametrize("long", [False, True])
def test_a_job_finds_its_socket_in_its_folder_and_may_do_with_it_what_it_likes(in_lab: InLab, long: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as short:
        (work_dir := Path(short) / ("x" * 60 if long else "w")).mkdir(mode=0o750)
        (kept := work_dir / "kept").write_text("kept")

        async def case(lab: Any) -> None:
            await lab.start(USES_SOCKET)
            end = await lab.scheduler.ended()
            assert (end.outcome, end.last_lines) == ("finished", (f"True {long} 0o600 True", "200")), end
            assert sorted(path.name for path in work_dir.iterdir()) == ["control", "kept", "logs"]
            assert kept.read_text() == "kept"

        in_lab(case, work_dir=work_dir)


def test_placeholders_inside_values_are_not_substituted(tmp_path: Path) -> None:
    words = {"{A}": "{B}", "{B}": "b", "{C}": "{A}"}
    assert substitute("-{A}-{B}-{C}-{D}-{}", words) == "-{B}-b-{A}-{D}-{}"


@pytest.mark.parametrize(("code", "text"), [(3, "exited with status 3"), (-15, "was ended by SIGTERM")])
def test_an_exit_status_is_described(code: int, text: str) -> None:
    assert exit_text(code) == text


def test_two_jobs_run_concurrently_and_end_separately(in_lab: InLab) -> None:
    async def case(lab: Any) -> None:
        first = await lab.start(WAITS)
        second = await lab.start(WAITS)
        await lab.scheduler.until(lambda: len(lab.scheduler.reports) == 2)
        assert len(lab.left_behind()) == 4, "each has a folder, and one for incoming files"
        assert await lab.scheduler.release(lab.peer, first)
        assert (await lab.scheduler.ended()).lease == first
        assert [job.lease for job in lab.worker.jobs.running] == [second]
        assert len(lab.left_behind()) == 2
        assert isinstance(await lab.scheduler.renew(lab.peer, second), Renewed)

    in_lab(case)


class FailsWhenCancelled:
    """An execution that fails while it is being cancelled, with a task still running."""

    senders: frozenset[Any] = frozenset()
    accepted_push_kind = ""
    message_handlers: ClassVar[dict[str, Any]] = {}
    trace = ExecutionTrace(exit_code=3)

    def __init__(self, context: JobContext) -> None:
        self._context = context

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            self._context.scope.cancel()
            raise ExecutionError("it failed")


def test_a_job_that_fails_while_it_is_cancelled_does_not_end_the_worker(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.executors.parameter_server.server.ParameterServer", FailsWhenCancelled)

    async def case(lab: Any) -> None:
        for _ in range(2):  # the second shows that the worker still runs
            lease = await lab.scheduler.hire(lab.SERVER)
            await lab.scheduler.dispatch(lab.peer, lease, lab.aggregate_spec([], []))
            end = await lab.scheduler.ended()
            assert (end.lease, end.outcome) == (lease, "cancelled")
            await lab.scheduler.release(lab.peer, lease)

    in_lab(case)


@pytest.mark.parametrize("how", ["ended", "cancelled"])
def test_resources_stay_taken_while_a_process_survives_sigkill(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch, recorded: Any, how: str
) -> None:
    """After 30 s they counted as free before, and a further job ran beside the process."""
    monkeypatch.setattr(process_runner, "TERM_GRACE", 0.05)
    monkeypatch.setattr(process_runner, "SHUTDOWN_GRACE", 0.05)
    monkeypatch.setattr(process_runner, "KILL_GRACE", 0.1)
    monkeypatch.setattr(retention, "RETENTION_POLL", 0.02)

    async def case(lab: Any) -> None:
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

    in_lab(case, isolation={"disable": ["bubblewrap", "supervisor", "cgroup"]})
