"""What an owner sees of a worker and does to it: status, the reasons for no offer, pause and resume."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from hypha_net import pubsub, rpc
from hypha_proto.ids import PeerId
from hypha_proto.leases import Rejection
from hypha_proto.offers import WORKER_REQUESTS, ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_proto.worker_status import DESCRIBE_WORKER, DescribeWorker, OfferedExecutor
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.bidding.request_history import KEPT_REQUESTS, LOG_INTERVAL, RequestHistory
from hypha_worker.cli import main
from hypha_worker.control.display import render_status

WAITS = "while not os.path.exists(work_dir + '/go'):\n    time.sleep(0.01)\n"
PEER = PeerId.parse("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")


def received(name: str = "script") -> ReceivedRequest:
    spec = WorkerSpec(resources=Resources(cpu=1.0), executor=(ExecutorDescriptor("train", name),))
    request = WorkerRequest(id=uuid.uuid4(), spec=spec, bid=10.0, timeout_ms=1000)
    return ReceivedRequest(PEER, request, 0.0)


def reason(code: str) -> Rejection:
    return Rejection(code=code, text=f"because of {code}")


def test_first_refusal_of_each_kind_is_logged_then_one_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    history = RequestHistory(clock=lambda: now, wall_clock=lambda: now)
    with caplog.at_level(logging.INFO, "hypha_worker.bidding.request_history"):
        for code in ("price", "price", "busy", "price"):
            history.note_refusal(received(), [reason(code)])
        now = LOG_INTERVAL - 1
        history.note_refusal(received(), [reason("price")])
        now = LOG_INTERVAL
        history.note_refusal(received(), [reason("price")])
        history.note_refusal(received(), ())
    assert [record.getMessage().removeprefix(f"no offer to scheduler {PEER}: ") for record in caplog.records] == [
        "because of price",
        "because of busy",
        "because of price (3 more since it was last logged)",
        "other requests were chosen, or its scheduler has published it again",
    ]


def test_only_the_last_requests_are_kept() -> None:
    history = RequestHistory(clock=lambda: 0.0, wall_clock=lambda: 0.0)
    for number in range(KEPT_REQUESTS + 5):
        history.note_offer(received(), float(number))
    assert [request.price for request in history.decided] == [float(number) for number in range(5, KEPT_REQUESTS + 5)]


async def status(site: Any) -> dict[str, Any]:
    result = await site.command("status", "--format", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


async def test_status_shows_gateways_leases_jobs_and_requests(on_site: Any) -> None:
    async with on_site() as site:
        gateway = site.lab.scheduler.endpoint.peer_id
        site.node.endpoint.gateway_peers = {"/ip4/192.0.2.1/tcp/4001": gateway, "/ip4/192.0.2.2/tcp/4001": None}
        lease = await site.start_job(WAITS)
        cheap = site.lab.scheduler.request(bid=1.0, cpu=1.0)
        await pubsub.publish(site.lab.scheduler.endpoint, WORKER_REQUESTS, cheap)
        while (found := await status(site))["requests"][0]["bid"] != 1.0:
            await anyio.sleep(0.05)
        assert (found["state"], found["ready"]) == ("running", True)
        assert [entry["peer"] for entry in found["gateways"]] == [str(gateway), None]
        [held] = [entry for entry in found["leases"] if entry["lease"] == str(lease)]
        [job] = found["jobs"]
        assert (held["state"], held["scheduler"], held["job"]) == ("held", str(gateway), job["job"])
        assert (job["lease"], job["scheduler"], job["price"]) == (str(lease), str(gateway), 100.0)
        assert job["executor"] == "train/script"
        assert job["since"].endswith("Z")
        assert found["requests"][0]["reasons"] == ["the bid of 1 is below 50, the least this worker accepts"]
        assert found["requests"][-1]["price"] == 100.0
        text = (await site.command("status")).stdout
        assert "  /ip4/192.0.2.2/tcp/4001  not connected" in text
        assert (
            f"{job['job']} task {job['task']}  train/script  scheduler {gateway}, since {job['since']}, price 100"
            in text
        )
        assert "bid 1: no offer: the bid of 1 is below 50" in text


async def test_paused_worker_makes_no_offers_also_after_a_restart_and_its_jobs_go_on(on_site: Any) -> None:
    async with on_site() as site:
        await site.start_job(WAITS)
        result = await site.command("pause")
        assert (result.exit_code, result.stdout) == (0, "paused: no more offers, also after a restart; 1 jobs go on\n")
        assert (await status(site))["state"] == "paused"
        assert [each.code for each in await site.lab.scheduler.why_not(site.lab.peer)] == ["paused"]
        told = await rpc.call(site.lab.scheduler.endpoint, site.lab.peer, DESCRIBE_WORKER, DescribeWorker())
        assert (told.tasks, told.price, [each.code for each in told.rejections]) == (1, 50.0, ["paused"])
        assert OfferedExecutor("train", "script", "process") in told.executors
        assert told.free.cpu == told.total.cpu - 1.0
        await pubsub.publish(site.lab.scheduler.endpoint, WORKER_REQUESTS, site.lab.scheduler.request(cpu=1.0))
        while "its owner has paused" not in str((await status(site))["requests"][0]["reasons"]):
            await anyio.sleep(0.05)
        site.lab.let_all_go()
        assert (await site.lab.scheduler.ended()).outcome == "finished"
    async with on_site() as site:
        assert (await status(site))["state"] == "paused"
        assert [each.code for each in await site.lab.scheduler.why_not(site.lab.peer)] == ["paused"]
        assert (await site.command("resume")).stdout == "resumed\n"
        assert (await status(site))["state"] == "running"
        await site.lab.scheduler.hire()
    async with on_site() as site:
        assert (await status(site))["state"] == "running"


def test_texts_of_peers_are_escaped_for_a_terminal() -> None:
    request = {"at": "now", "scheduler": "s", "executors": ["\x1b[2J"], "resources": {}, "bid": 1.0, "price": 1.0}
    shown = render_status(
        {"state": "running", "ready": False, "reason": "starting", "peer_id": "p", "names": {}, "free": {},
         "excluded": [], "earned_today": 0.5, "open_files": 64,
         "gateways": [], "leases": [], "jobs": [], "requests": [request]}
    )  # fmt: skip
    assert "\\x1b[2J" in shown
    assert "\x1b" not in shown
    assert shown.startswith("running, not ready: starting\n")
    assert "0.5 tokens earned" in shown
    assert "at most 64 open files and connections (ulimit -n), allow 1024" in shown


@pytest.mark.parametrize("command", ["status", "pause", "resume"])
def test_commands_say_that_no_worker_runs(command: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(main, [command, "--socket", str(tmp_path / "worker.sock")])
    assert found.exit_code == 3
    assert f"no worker listens at {tmp_path / 'worker.sock'}" in found.stderr
    assert CliRunner().invoke(main, [command]).exit_code == 2
