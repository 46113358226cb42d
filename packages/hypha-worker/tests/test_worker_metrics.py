"""Telemetry of a worker: every metric of docs/telemetry.md gets a value, resource use, and spans of executors."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from support.endpoint_helpers import pull_bytes
from support.otlp_collector import Collector, http_collector

from hypha_net import instrumentation, rpc, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.telemetry import open_export
from hypha_proto.bridge_api import ExecutorSpan, SpanReport
from hypha_proto.commands import SetMembers
from hypha_proto.datasets import DATA, DataRequest, SliceAssigned
from hypha_proto.leases import RenewalFailed
from hypha_proto.round_membership import Member
from hypha_proto.task_resources import PUSH_OUTPUT, RELEASE_OUTPUTS, PushedFile, PushOutput, ReleaseOutputs
from hypha_proto.tasks import Stop, TaskResource, UriSource
from hypha_proto.training_reports import Done
from hypha_proto.transfer import PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_worker.bridge import backend
from hypha_worker.bridge.backend import SpanRecorder
from hypha_worker.errors import BridgeError
from hypha_worker.hardware import usage
from hypha_worker.hardware.usage import ProcessUsage, UsageAccumulator, read_tree

DOCUMENT = Path(__file__).parents[3] / "docs" / "telemetry.md"
ELSEWHERE = {
    "hw.gpu.utilization",
    "hw.gpu.memory.usage",
    "hypha.worker.lease.owed",
    "hypha.worker.leases.retained",
    "hypha.worker.outer_updates.discarded",
    "hypha.worker.cache.hits",
    "hypha.worker.cache.io",
    "hypha.worker.cache.evictions",
    "hypha.worker.cache.size",
    "hypha.worker.content.bad",
}
"""Tested in test_worker_nvml, test_worker_orphans, test_worker_task_ends, test_worker_rounds,
test_worker_content_cache and test_worker_content_holders."""

Expected = dict[str, list[dict[str, str | bool]]]
TASKS: Expected = {
    "hypha.worker.tasks.started": [{}],
    "hypha.worker.tasks.active": [{"hypha__executor": "shell/python"}],
    "hypha.worker.tasks.ended": [{"hypha__outcome": outcome} for outcome in ("finished", "failed", "cancelled")],
    "hypha.worker.task.duration": [{"hypha__outcome": "finished"}],
    "hypha.worker.resources": [{"hypha__outcome": "fetched"}, {"hypha__outcome": "failed"}],
    "hypha.worker.resource.io": [{}],
    "hypha.worker.outputs.held": [{}],
    "hypha.worker.output.requests": [
        {"hypha__request": "pull", "hypha__outcome": "served"},
        {"hypha__request": "push", "hypha__outcome": "refused"},
        {"hypha__request": "release", "hypha__outcome": "served"},
    ],
    "hypha.worker.deliveries.refused": [{}],
    "hypha.worker.definitions.refused": [{"hypha__reason": reason} for reason in ("stale", "malformed", "unable")],
}
"""Metrics of tasks."""

WORKS = """
import os
data = {"resource": config["data"], "path": "slices"}
assert [post("/resources/fetch", data)[0] for _ in range(3)] == [200, 200, 200]
assert post("/status/send", {"status": {"batch_size": 8, "slices": {"0": 8}}})[0] == 200
while time.process_time() < 0.6:
    sum(range(1000))
with open("out.bin", "wb") as file:
    file.write(os.urandom(4 << 20))
    file.flush()
    os.fsync(file.fileno())
end = time.monotonic() + 30
while not os.path.exists("go") and time.monotonic() < end:
    time.sleep(0.05)
"""
WRITTEN = 4 << 20


async def serve_slices(lab: Any) -> None:
    """Let the scheduler assign slices in order and the data node serve them."""
    content = b"x" * 1000
    _, digest = await transfer.describe(content)
    given: list[DataRequest] = []

    async def assign(_peer: Any, request: DataRequest) -> SliceAssigned:
        given.append(request)
        provider = lab.data.peer_id if len(given) > 1 else lab.server.peer_id  # which does not have it
        return SliceAssigned(data_provider=provider, index=max(0, len(given) - 2), digest=digest)

    async def resolve(_peer: Any, _request: Any) -> transfer.PullSource:
        return transfer.PullSource(content)

    async def refuse(_peer: Any, request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(content) if request.name == "manifest" else Refusal(reason="the file has changed")

    transfer.serve_pulls(lab.server, refuse)
    rpc.serve(lab.scheduler.endpoint, DATA, assign)
    transfer.serve_pulls(lab.data, resolve)


def values(recorded: Any, name: str, **about: str | bool) -> list[float]:
    wanted = {key.replace("__", "."): value for key, value in about.items()}
    return [value for other, value, has in recorded.values if other == name and wanted.items() <= has.items()]


def missing(recorded: Any, expected: Expected) -> list[tuple[str, dict[str, str | bool]]]:
    """Return which of the expected metrics have had no positive value."""
    each = [(name, about) for name, abouts in expected.items() for about in abouts]
    return [(name, about) for name, about in each if not any(value > 0 for value in values(recorded, name, **about))]


def written(recorded: Any) -> float:
    """Return the bytes that executors have written."""
    return sum(values(recorded, "process.disk.io", disk__io__direction="write"))


async def train(lab: Any, recorded: Any) -> None:
    await serve_slices(lab)
    lease = await lab.start(WORKS)
    await lab.scheduler.until(lambda: written(recorded) >= WRITTEN, 40)
    lab.let_all_go()
    end = await lab.scheduler.ended()
    assert end.outcome == "finished", end
    assert isinstance(await lab.scheduler.renew(lab.peer, uuid.uuid4()), RenewalFailed)
    await lab.scheduler.release(lab.peer, lease)
    assert isinstance(await lab.scheduler.renew(lab.peer, lease), RenewalFailed)
    await lab.start("sys.exit(3)")
    assert (await lab.scheduler.ended()).outcome == "failed"


async def aggregate(lab: Any) -> None:
    """Run one round with one member."""
    lab.scheduler.answer = lambda _report: Done()
    receiver = lab.receive_pushes(lab.server)
    spec = lab.aggregate_spec([lab.server.peer_id], [lab.server.peer_id])
    lease = await lab.scheduler.hire(lab.SERVER)
    await lab.scheduler.dispatch(lease, spec)
    path = lab.folder / "update"
    write_update(path, {"w": (4,)}, [("w", np.ones(4, np.float32))], UpdateMetadata())
    await lab.push(lab.server, 1, path, PSEUDO_GRADIENT)
    members = (Member(peer=lab.server.peer_id, samples=1),)
    message = SetMembers(round=1, members=members, deadline_ms=10_000)
    await lab.scheduler.tasks.command(lease, lab.scheduler.task_on(lease), message)
    await lab.scheduler.until(lambda: receiver.files)


async def let_leases_end(lab: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two leases end, one of them idle; release one that does not exist."""
    await lab.scheduler.hire(cpu=0.5)
    await lab.scheduler.until(lambda: values(recorded, "hypha.worker.lease.ends", hypha__outcome="idle"))
    monkeypatch.setattr("hypha_worker.leasing.lease_manager.RENEWED_LEASE", 0.5)
    await lab.scheduler.hire(cpu=0.5)
    await lab.scheduler.until(lambda: values(recorded, "hypha.worker.lease.ends", hypha__outcome="expired"))
    assert not await lab.scheduler.release(lab.peer, uuid.uuid4())


async def test_every_documented_metric_has_a_value(in_lab: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.1)
    async with in_lab(offer={"price": 50.0, "idle_lease": 2.0}) as lab:
        await train(lab, recorded)
        await aggregate(lab)
        await let_leases_end(lab, recorded, monkeypatch)
    expected: Expected = {
        "hypha.worker.executors.active": [{}],
        "hypha.worker.executors.ended": [{"process__exit__code": "0"}, {"process__exit__code": "3"}],
        "hypha.worker.executor.processes": [{}],
        "process.cpu.time": [{"cpu__mode": "user"}],
        "process.cpu.utilization": [{}],
        "process.memory.usage": [{}],
        "process.disk.io": [{"disk__io__direction": "write"}],
        "hypha.worker.requests": [{"hypha__offered": True}],
        "hypha.worker.leases.active": [{"hypha__lease__state": "held"}],
        "hypha.worker.lease.renewals": [{"hypha__outcome": outcome} for outcome in ("renewed", "refused", "stranger")],
        "hypha.worker.lease.ends": [
            {"hypha__outcome": outcome} for outcome in ("expired", "idle", "released", "stranger")
        ],
        "hypha.worker.slices": [{"hypha__dataset": "digits"}],
        "hypha.worker.slices.unusable": [{}],
        "hypha.worker.slice.io": [{"hypha__dataset": "digits"}],
        "hypha.worker.slice.duration": [{"hypha__dataset": "digits"}],
        "hypha.worker.prefetch.depth": [{}],
        "hypha.worker.samples": [{}],
        "hypha.worker.outer_step.duration": [{}],
    }
    assert missing(recorded, expected) == []
    assert sum(values(recorded, "hypha.worker.slices")) == 3
    assert sum(values(recorded, "hypha.worker.slice.io")) == 3000
    assert values(recorded, "hypha.worker.prefetch.depth") == [1, 2, 3, 2]
    assert sum(values(recorded, "hypha.worker.samples")) == 8
    assert written(recorded) >= WRITTEN
    assert 0.3 < sum(values(recorded, "process.cpu.time", cpu__mode="user")) < 30
    assert sum(values(recorded, "hypha.worker.executors.active")) == 0
    section = DOCUMENT.read_text().split("### Worker", 1)[1].split("###", 1)[0]
    assert set(re.findall(r"^\| `([a-z_.]+)`", section, re.MULTILINE)) == {*expected, *TASKS, *ELSEWHERE}


async def test_every_documented_metric_of_tasks_has_a_value(in_task_lab: Any, recorded: Any) -> None:
    async with in_task_lab(connectors={"roots": ["/"]}) as (lab, tasks, lease):
        page = lab.folder / "page"
        page.write_text("page")
        pages = [TaskResource(name="page", uri=UriSource(path.as_uri())) for path in (page, lab.folder / "missing")]
        tasks.start(lease, "t", "open('x', 'w').write('x')", resources=(pages[0],), outputs={"x": "x"})
        dataset = (await tasks.success("t")).outputs[0].dataset
        await tasks.until(lambda: [held for held in values(recorded, "hypha.worker.outputs.held") if held])
        await pull_bytes(lab.server, lab.peer, PullRequest(dataset=dataset, index=0), max_bytes=9)
        scheduler, job_id = lab.scheduler.endpoint, tasks.job_id
        push = PushOutput(job_id=job_id, delivery=uuid.uuid4(), to=lab.peer, files=(PushedFile(dataset, 0, "0"),))
        assert not (await rpc.call(scheduler, lab.peer, PUSH_OUTPUT, push)).accepted
        await rpc.call(scheduler, lab.peer, RELEASE_OUTPUTS, ReleaseOutputs(job_id=job_id, datasets=(dataset,)))
        digest = f"blake3:{blake3(b'x').hexdigest()}"
        header = PushHeader(tasks.name("t"), 0, "x", "0", 1, digest, scheduler.peer_id, delivery=uuid.uuid4())
        with pytest.raises(TransferRefusedError):
            await transfer.push(lab.server, lab.peer, b"x", header)
        tasks.start(lease, "u", resources=(pages[1],))
        assert (await tasks.end("u")).failed is not None
        tasks.start(lease, "v", "time.sleep(60)")
        tasks.start(lease, "v")
        tasks.start(lease, "x", timeout_ms=0)
        tasks.start(lease, "w")
        tasks.define(lease, "v", stop=Stop("enough"))
        assert (await tasks.end("v")).cancelled is not None
    assert missing(recorded, TASKS) == []
    assert sum(values(recorded, "hypha.worker.resource.io")) == 4


async def test_spans_of_reports_name_the_kind_of_report(in_lab: Any, recorded: Any) -> None:
    async with in_lab() as lab:
        reports = ["update", {"metrics": {"round": 1, "metrics": {"loss": 1.0}}}, "updated", "update-received"]
        await lab.start(f"for report in {reports!r}: post('/status/send', report)\n")
        await lab.scheduler.ended()
    kinds = [kind for span in recorded.spans if (kind := span.attributes.get("hypha.report"))]
    assert kinds == ["Update", "RoundMetrics", "Updated", "UpdateReceived"]


def test_use_of_starting_and_ending_processes_is_summed() -> None:
    accumulator = UsageAccumulator()
    first, second = (10, 1.0), (11, 2.0)
    assert accumulator.add_sample({first: ProcessUsage(2.0, 1.0, 100, 50, 1000)}) == ProcessUsage(
        2.0, 1.0, 100, 50, 1000
    )
    both = {first: ProcessUsage(3.0, 1.5, 150, 50, 900), second: ProcessUsage(5.0, 0.0, 10, 0, 300)}
    assert accumulator.add_sample(both) == ProcessUsage(6.0, 0.5, 60, 0, 1200)
    assert accumulator.add_sample({second: ProcessUsage(5.5, 0.0, 10, 7, 300)}) == ProcessUsage(0.5, 0.0, 0, 7, 300)
    assert accumulator.add_sample({(10, 9.0): ProcessUsage(0.25, 0.0, 1, 0, 10)}) == ProcessUsage(0.25, 0.0, 1, 0, 10)


def test_a_process_tree_is_read_and_an_ended_one_is_empty() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        seen = read_tree(os.getpid())
        assert {child.pid, os.getpid()} <= {pid for (pid, _), use in seen.items() if use.memory > 0}
        child.communicate(b"\n")
    assert read_tree(child.pid) == {}


async def test_a_job_is_counted_measured_and_traced(
    in_lab: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.1)  # the first sample may see a process that has just been forked

    least: list[float] = []
    began = time.monotonic()
    async with in_lab() as lab:
        await lab.start("while not os.path.exists(work_dir + '/go'): time.sleep(0.01)\n")
        await lab.scheduler.until(lambda: recorded.total("process.memory.usage") > 1 << 20)
        seen, count = time.monotonic(), len(recorded.values)
        await lab.scheduler.until(lambda: len(recorded.values) > count)
        least.append(time.monotonic() - seen)
        lab.let_all_go()
        await lab.scheduler.ended()
    lasted = time.monotonic() - began
    assert recorded.total("hypha.worker.tasks.started") == recorded.total("hypha.worker.tasks.ended") == 1
    assert recorded.total("hypha.worker.tasks.active") == 0
    assert least[0] < recorded.total("hypha.worker.task.duration", hypha_outcome="finished") < lasted
    assert {"process.memory.usage", "hypha.worker.prefetch.depth"} <= recorded.gone
    assert {"evaluate", "offer", "WorkerOffer", "execute task"} <= {span.name for span in recorded.spans}


JOB = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
OTHER = JOB.removesuffix("f-01") + "e-01"
STRANGE = "00-fedcba9876543210fedcba9876543210-0123456789abcdef-01"

SCRIPT = """
import os
time.sleep(0.3)
span = {"name": "round", "ago_ms": 250, "duration_ms": 200, "attributes": {"batches": 3, "loss": 0.5, "ok": True}}
span["inside"] = [{"name": "train", "ago_ms": 240, "duration_ms": 100, "error": "no data"}]
answers = [post("/telemetry/spans", {"spans": [span], "traceparent": os.environ.get("TRACEPARENT")})]
for bad in BAD:
    answers.append(post("/telemetry/spans", bad))
print(json.dumps(answers), flush=True)
"""
FINE = {"name": "x", "ago_ms": 1, "duration_ms": 1}
BAD: list[Any] = [
    [],
    {},
    {"spans": [{**FINE, "name": ""}]},
    {"spans": [{**FINE, "name": "x" * 65}]},
    {"spans": [{**FINE, "duration_ms": 2}]},
    {"spans": [{**FINE, "ago_ms": -1}]},
    {"spans": [{**FINE, "ago_ms": 1e9}]},
    {"spans": [{**FINE, "attributes": {"a": [1]}}]},
    {"spans": [{**FINE, "attributes": {"a": 2**63}}]},
    {"spans": [{**FINE, "attributes": {str(n): n for n in range(33)}}]},
    {"spans": [{**FINE, "error": "x" * 301}]},
    {"spans": [FINE] * 257},
    {"spans": [{**FINE, "inside": [{**FINE, "inside": [{**FINE, "inside": [{**FINE, "inside": [FINE]}]}]}]}]},
    {"spans": [FINE], "traceparent": STRANGE},
    {"spans": [FINE], "traceparent": "x" * 65},
]


@contextmanager
def exporting() -> Iterator[Collector]:
    with http_collector() as collector:
        files = {f"{kind}_pem": Path(kind) for kind in ("cert", "key", "trust")}
        keys: dict[str, Any] = {**files, "gateway_addresses": ["/ip4/127.0.0.1/tcp/1"]}
        config = NodeConfig.model_validate({**keys, "telemetry_endpoint": collector.url})
        export = open_export(config, service="hypha-worker", version="1", instance="12D3")
        try:
            yield collector
        finally:
            export.close()


async def test_an_executors_spans_are_in_the_trace_of_its_job(in_lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with exporting() as collector:
        async with in_lab() as lab:
            with instrumentation.span("job"):
                await lab.start(SCRIPT.replace("BAD", repr(BAD)))
            assert (await lab.scheduler.ended()).outcome == "finished"
    [printed] = [record.getMessage() for record in caplog.records if "[[200" in record.getMessage()]
    taken, *refused = json.loads(printed[printed.index("[[") :])
    assert taken == [200, {"recorded": 2}]
    assert len(refused) == len(BAD)
    for bad, (status, answer) in zip(BAD, refused, strict=True):
        assert (status, answer["error"]) == (400, "bad-request"), bad
    spans = {span.name: span for span in collector.spans}
    job, executed, outer, inner = spans["job"], spans["execute task"], spans["round"], spans["train"]
    assert {span.trace_id for span in (job, executed, outer, inner)} == {job.trace_id}
    assert outer.parent_span_id == executed.span_id
    assert inner.parent_span_id == outer.span_id
    assert abs(outer.end_time_unix_nano - outer.start_time_unix_nano - 200e6) < 50e6
    assert executed.start_time_unix_nano < outer.start_time_unix_nano < inner.start_time_unix_nano
    assert inner.end_time_unix_nano < outer.end_time_unix_nano < executed.end_time_unix_nano
    about = {pair.key: pair.value for pair in outer.attributes}
    assert (about["batches"].int_value, about["loss"].double_value, about["ok"].bool_value) == (3, 0.5, True)
    assert about["hypha.executor"].bool_value
    assert (inner.status.code, inner.status.message) == (2, "no data")
    assert "x" not in spans
    # FastAPI traces each request of the bridge if OpenTelemetry's global providers are set
    assert not [name for name in spans if name.startswith(("POST", "fastapi"))]


def report(**changes: Any) -> SpanReport:
    return SpanReport(spans=(ExecutorSpan(name="x", ago_ms=1.0, duration_ms=1.0),) * 3, **changes)


def test_without_a_collector_or_a_trace_spans_are_accepted_and_dropped() -> None:
    clock = iter(range(100)).__next__
    assert SpanRecorder(clock).record(report(), JOB) == 0
    with exporting() as collector:
        assert SpanRecorder(clock).record(report(), None) == 0
        assert SpanRecorder(clock).record(report(traceparent=OTHER), JOB) == 3
        with pytest.raises(BridgeError, match="not one of the job's trace"):
            SpanRecorder(clock).record(report(traceparent=STRANGE), JOB)
    assert {span.parent_span_id.hex() for span in collector.spans} == {OTHER.split("-")[2]}


def test_the_number_of_spans_per_job_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_SPANS_PER_JOB", 5)
    recorder = SpanRecorder(iter(range(100)).__next__)
    with exporting() as collector:
        assert [recorder.record(report(), JOB) for _ in range(3)] == [3, 2, 0]
    assert len(collector.spans) == 5
