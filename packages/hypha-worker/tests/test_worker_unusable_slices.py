"""Slices that no provider has as announced, and a full disk: what the executor, the scheduler and the worker do."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from hypha_net import retries, rpc, transfer
from hypha_net.retries import RetryPolicy
from hypha_proto.datasets import DATA, DataRequest, NotFound, SliceAssigned, UnusableSlice
from hypha_proto.leases import SAY_GOODBYE, Goodbye, GoodbyeReceived
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_worker.service import open_worker

InLab = Callable[..., Any]
FETCH = """
status, answer = post("/resources/fetch", {"resource": config["data"], "path": "slices"})
print("ERROR executor: %d %s" % (status, answer), flush=True)
"""


def serve(lab: Any, usable: set[int]) -> list[DataRequest]:
    """Let the scheduler assign slices 0, 1, …, of which the data node has only `usable` ones; return the requests."""
    requests: list[DataRequest] = []
    path = lab.folder / "slice"
    path.write_bytes(b"slice")
    digest = f"blake3:{blake3(b'slice').hexdigest()}"

    async def assign(_peer: Any, request: DataRequest) -> SliceAssigned | NotFound:
        requests.append(request)
        return SliceAssigned(data_provider=lab.data.peer_id, index=len(requests) - 1, epoch=4, digest=digest)

    async def resolve(_peer: Any, request: PullRequest) -> transfer.PullSource | Refusal:
        if request.index in usable or request.name == "manifest":
            return transfer.PullSource(path, digest)
        return Refusal(reason=f"slice {request.index} is not what was announced")

    rpc.serve(lab.scheduler.endpoint, DATA, assign)
    transfer.serve_pulls(lab.data, resolve)
    return requests


async def test_the_next_slice_takes_the_place_of_an_unusable_one_which_is_reported(in_lab: InLab) -> None:
    async with in_lab() as lab:
        requests = serve(lab, {2})
        await lab.start(FETCH + "sys.exit(0 if answer[0]['metadata']['slice'] == '2' else 1)")
        end = await lab.scheduler.ended()
        assert end.outcome == "finished", end
        assert requests[0].unusable is None
        reports = [request.unusable for request in requests[1:]]
        assert [(report.index, report.epoch) for report in reports if report] == [(0, 4), (1, 4)]
        assert len({request.id for request in requests}) == 3
        for report in reports:
            assert isinstance(report, UnusableSlice)
            [failure] = report.failures
            assert failure.provider == lab.data.peer_id
            assert "not what was announced" in failure.reason


async def test_a_fetch_ends_when_every_slice_is_unusable(in_lab: InLab) -> None:
    async with in_lab() as lab:
        requests = serve(lab, set())
        await lab.start(FETCH + "sys.exit(0 if status == 502 else 1)")
        end = await lab.scheduler.ended()
        assert end.outcome == "finished", end
        assert len(requests) == 1 + retries.UNUSABLE_SLICE.times


async def test_a_full_disk_gives_the_work_back_at_once(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(retries, "NO_PROVIDER", RetryPolicy("test", (60.0,)))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.ERROR, "hypha_worker.tasks.task_run"):
        async with in_lab() as lab:
            serve(lab, {0})
            lease = await lab.start(FETCH + "time.sleep(60)")
            end = await lab.scheduler.ended()
            assert end.outcome == "cancelled"
            assert str(lab.folder / "work") in end.reason
            assert "No space left on device" in end.reason
            assert "free some space there" in end.reason
            assert await lab.scheduler.release(lab.peer, lease)
            assert lab.worker.lease_manager.free.resources.cpu == 2.0
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "is given back to its scheduler" in record.getMessage()
    assert "No space left on device" in record.getMessage()


async def test_an_outer_update_that_finds_no_room_gives_the_work_back(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    async with in_lab() as lab:
        await lab.start("time.sleep(60)")
        path = lab.folder / "outer"
        path.write_bytes(b"update")
        size, digest = await transfer.describe(path)
        scheduler = lab.scheduler.endpoint.peer_id
        header = PushHeader(lab.scheduler.sender, 1, OUTER_UPDATE, "u", size, digest, scheduler)
        with pytest.raises(transfer.TransferRefusedError, match="no room"):
            await transfer.push(lab.server, lab.peer, path, header)
        end = await lab.scheduler.until(lambda: lab.scheduler.ends and lab.scheduler.ends[-1])
        assert end.outcome == "cancelled"
        assert str(lab.folder / "work") in end.reason
        assert "No space left on device" in end.reason


async def test_an_executor_that_cannot_write_gives_the_work_back(in_lab: InLab) -> None:
    async with in_lab() as lab:
        await lab.start("print('ERROR executor: /data: No space left on device', flush=True); sys.exit(74)")
        end = await lab.scheduler.ended()
        assert end.outcome == "cancelled"
        assert end.reason == "ERROR executor: /data: No space left on device"


@pytest.mark.parametrize("knows", [True, False])
async def test_a_worker_that_shuts_down_says_goodbye_for_its_leases(
    make_config: Any, in_lab: InLab, knows: bool
) -> None:
    heard: list[tuple[Any, Goodbye]] = []
    only = ExecutorDescriptor("train", "only")

    async def goodbye(peer: Any, message: Goodbye) -> GoodbyeReceived:
        heard.append((peer, message))
        return GoodbyeReceived()

    async with in_lab() as lab:
        if knows:
            rpc.serve(lab.scheduler.endpoint, SAY_GOODBYE, goodbye)
        executor = {"class": "train", "name": "only", "runtime": "process", "cmd": sys.executable}
        config = make_config(lab.folder / "second", executors=[executor])
        async with lab.network.endpoint("second") as endpoint:
            async with open_worker(config, endpoint):
                leases = {await lab.scheduler.hire(only), await lab.scheduler.hire(only)}
            assert [peer for peer, _ in heard] == ([endpoint.peer_id] if knows else [])
            assert all(set(message.leases) == leases for _, message in heard)
            assert all(message.reason == "the worker is shutting down" for _, message in heard)
