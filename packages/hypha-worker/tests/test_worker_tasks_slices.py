"""Slices that the scheduler assigns to a running task one by one, and the results that the task sends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from support.task_bridge_client import EXECUTOR

from hypha_net import rpc, transfer
from hypha_proto.datasets import DATA, NO_FREE_SLICE, DataRequest, NotFound, SliceAssigned, WireError
from hypha_proto.tasks import SlicesSource, TaskResource
from hypha_proto.transfer import TASK_RESULT, PullRequest, Refusal

InTaskLab = Callable[..., Any]
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
        digest = f"blake3:{blake3(b'rows %d' % answer).hexdigest()}"
        return SliceAssigned(data_provider=lab.data.peer_id, index=answer, epoch=0, digest=digest, format="jsonl")

    async def resolve(_peer: Any, request: PullRequest) -> transfer.PullSource | Refusal:
        if request.index in unusable and request.name != "manifest":
            return Refusal(reason="it is damaged")
        path = lab.folder / f"rows-{request.index}"
        path.write_bytes(b"rows %d" % request.index)
        return transfer.PullSource(path)

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
        report = await tasks.end("t")
        assert report.finished is not None, report
        assert {(request.dataset, request.attempt) for request in requests} == {("rows", tasks.name("t"))}
        assert len(requests) == 4
        assert report.finished.bytes_received == 12


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


async def test_a_task_that_may_sends_results_to_its_scheduler(in_task_lab: InTaskLab, push_receiver: Any) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        receiver = push_receiver(lab.scheduler.endpoint, lab.folder / "results")
        receiver.listen()
        tasks.start(lease, "t", SEND + "assert status == 200, answer", sends=True)
        report = await tasks.end("t")
        assert report.finished is not None, report
        [(_, header, content)] = receiver.files
        assert header is not None
        assert (header.kind, header.name, header.round, header.samples) == (TASK_RESULT, "part-3.jsonl", 3, 1)
        assert (header.attempt, content) == (tasks.name("t"), b"{}")
        assert report.finished.bytes_sent == 2


@pytest.mark.parametrize("also", [[], ["12D3KooWRm8J3iL796zPFi2EtGGtUJn58AG67gcqRLvNLQXkmDoe"]])
async def test_other_tasks_and_other_peers_are_refused(in_task_lab: InTaskLab, also: list[str]) -> None:
    code = SEND.replace('[task["scheduler"]]', f'[task["scheduler"]] + {json.dumps(also)}')
    async with in_task_lab(executors=[EXECUTOR]) as (_lab, tasks, lease):
        tasks.start(lease, "t", code + "assert status == 403, answer", sends=bool(also) or None)
        assert (await tasks.end("t")).finished is not None
