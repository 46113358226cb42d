"""A draining worker: what it refuses, what it lets end, whom it tells, and the command by which its owner drains it."""

from __future__ import annotations

import json
import socket
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import trio.testing
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from hypha_net import rpc
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain, DrainReceived
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import All, PeersReference
from hypha_proto.leases import SAY_GOODBYE, Goodbye, GoodbyeReceived
from hypha_worker.cli import main
from hypha_worker.control.commands import parse_timeout
from hypha_worker.control.server import ControlServer, parse_request, socket_path

InLab = Callable[..., Any]

REPORT = "post('/status/send', {'status': {'batch_size': 8}})\n"
UNTIL_TOLD = f"{REPORT}while not os.path.exists(work_dir + '/go'):\n    time.sleep(0.01)\n"
"""A job that has reported once and ends when a file appears in its folder."""
FOREVER = f"{REPORT}time.sleep(60)\n"


@dataclass
class Told:
    """What a scheduler hears of a drain."""

    drains: list[Drain] = field(default_factory=list)
    goodbyes: list[Goodbye] = field(default_factory=list)

    def listen(self, lab: Any) -> None:
        async def on_drain(_peer: PeerId, message: Drain) -> DrainReceived:
            self.drains.append(message)
            lab.scheduler.tasks.notify()
            return DrainReceived()

        async def on_goodbye(_peer: PeerId, message: Goodbye) -> GoodbyeReceived:
            self.goodbyes.append(message)
            return GoodbyeReceived()

        rpc.serve(lab.scheduler.endpoint, ANNOUNCE_DRAIN, on_drain)
        rpc.serve(lab.scheduler.endpoint, SAY_GOODBYE, on_goodbye)


async def start_job(lab: Any, script: str) -> uuid.UUID:
    """Run a script as a task until it has reported; return its lease."""
    count = len(lab.scheduler.reports)
    nobody = PeersReference(peers=(), strategy=All())  # so that several such tasks may run at once
    lease: uuid.UUID = await lab.start(script, lab.train_spec(results=nobody))
    await lab.scheduler.until(lambda: len(lab.scheduler.reports) > count)
    return lease


@pytest.mark.parametrize("is_released", [False, True])
async def test_drain_waits_for_the_report_of_a_job_that_has_just_ended(in_lab: InLab, is_released: bool) -> None:
    """Unless its scheduler has released the lease meanwhile: it acknowledges nothing on its stream any more."""
    async with in_lab() as lab:
        lease = await lab.start(UNTIL_TOLD.removeprefix(REPORT))
        await lab.scheduler.until(lambda: "ready" in lab.scheduler.statuses)
        lab.network.partition(lab.peer, lab.scheduler.endpoint.peer_id)
        [run] = lab.worker.tasks.running
        lab.let_all_go()
        await run.ended.wait()
        assert lab.worker.tasks.running == ()
        ended: list[Any] = []
        async with anyio.create_task_group() as tasks:

            async def drain() -> None:
                ended.append(await lab.worker.draining.run())

            tasks.start_soon(drain)
            lab.worker.draining.request(3600.0, "its owner drains it")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not ended
            if is_released:
                lab.scheduler.tasks.refuse = "no job of this scheduler holds that lease"
            lab.network.heal(lab.peer, lab.scheduler.endpoint.peer_id)
            if is_released:
                assert await lab.scheduler.release(lab.peer, lease)
            else:
                assert (await lab.scheduler.ended()).outcome == "finished"
        assert ended == [()]


async def test_drain_ends_with_its_time_although_jobs_run(in_lab: InLab) -> None:
    async with in_lab() as lab:
        lease = await start_job(lab, FOREVER)
        lab.worker.draining.request(3600.0, "its owner drains it")
        lab.worker.draining.request(0.2, "it was told to end")  # a later request may shorten it
        lab.worker.draining.request(7200.0, "its owner drains it")  # and not make it longer
        [left] = await lab.worker.draining.run()
        assert left.lease.id == lease


async def test_drain_without_a_job_is_over_at_once_and_not_announced(in_lab: InLab) -> None:
    async with in_lab() as lab:
        told = Told()
        told.listen(lab)
        await lab.scheduler.hire()
        lab.worker.draining.request(3600.0, "its owner drains it")
        assert await lab.worker.draining.run() == ()
        assert told.drains == []


async def test_draining_worker_starts_no_job_on_a_further_lease(in_lab: InLab) -> None:
    async with in_lab() as lab:
        running, idle = await start_job(lab, FOREVER), await lab.scheduler.hire()
        lab.worker.draining.request(60.0, "its owner drains it")
        assert await lab.scheduler.dispatch(idle, lab.train_spec()) == "cancelled"
        assert "drains" in (await lab.scheduler.ended()).reason
        assert [run.lease.id for run in lab.worker.tasks.running] == [running]


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_sigterm_drains_a_worker_which_says_so_and_returns(on_site: Any) -> None:
    async with on_site() as site:
        told = Told()
        told.listen(site.lab)
        running, idle = await start_job(site.lab, UNTIL_TOLD), await site.lab.scheduler.hire()
        assert (await site.health()).healthy
        site.terminated.set()
        await site.until_draining()
        [message] = await site.lab.scheduler.until(lambda: told.drains)
        assert (set(message.leases), message.reason) == ({running, idle}, "it was told to end")
        assert not site.ended.is_set()
        site.lab.let_all_go()
        await site.ended.wait()
        assert [end.outcome for end in site.lab.scheduler.ends] == ["finished"]
        assert [set(goodbye.leases) for goodbye in told.goodbyes] == [{running, idle}]


async def test_owner_drains_a_worker_and_waits_for_its_end(on_site: Any) -> None:
    async with on_site() as site:
        told = Told()
        told.listen(site.lab)
        running = await start_job(site.lab, UNTIL_TOLD)
        assert stat.S_IMODE(site.socket.stat().st_mode) == 0o600
        results: list[Result] = []
        async with anyio.create_task_group() as tasks:

            async def drain() -> None:
                results.append(await site.command("drain", "--timeout", "3000"))

            tasks.start_soon(drain)
            [message] = await site.lab.scheduler.until(lambda: told.drains)
            assert not results
            site.lab.let_all_go()
        [result] = results
        assert result.exit_code == 0, result.output
        begun, over = lines(result)
        scheduler = site.lab.scheduler
        job = {"job_id": str(scheduler.job_id), "task": scheduler.task_on(running), "executor": "train/script"}
        job |= {"lease": str(running), "scheduler": str(scheduler.endpoint.peer_id)}
        assert begun == {"draining": True, "seconds": pytest.approx(3000, abs=60), "jobs": [job]}
        assert over == {"drained": True, "cancelled": []}
        assert 2_900_000 < message.left_ms <= 3_000_000
        await site.ended.wait()


async def test_owner_is_told_which_jobs_were_cancelled(on_site: Any) -> None:
    async with on_site() as site:
        running = await start_job(site.lab, FOREVER)
        result = await site.command("drain", "--timeout", "0.1")
        assert result.exit_code == 1
        assert [job["lease"] for job in lines(result)[1]["cancelled"]] == [str(running)]
        assert "1 jobs did not end in time and were cancelled" in result.stderr


async def test_sigterm_shortens_the_drain_of_a_command(on_site: Any) -> None:
    async with on_site(drain_timeout=0.2) as site:
        await start_job(site.lab, FOREVER)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(site.command, "drain", "--timeout", "3600")
            await site.until_draining()
            site.terminated.set()
            await site.ended.wait()
        assert [end.outcome for end in site.lab.scheduler.ends] == ["cancelled"]


async def test_owner_hears_of_a_worker_that_ends_before_its_drain(on_site: Any) -> None:
    results: list[Result] = []
    async with on_site() as site:
        await start_job(site.lab, FOREVER)

        async def drain() -> None:
            with anyio.CancelScope(shield=True):
                results.append(await site.command("drain"))

        site.node.tasks.start_soon(drain)
        await site.until_draining()
    [result] = results
    assert result.exit_code == 1
    assert "the worker ended before it was drained" in result.stderr


async def test_drain_is_refused_with_the_reason_and_the_worker_goes_on(on_site: Any) -> None:
    async with on_site() as site:
        for request, reason in (
            (b"", "not JSON"),
            (b"[" * 3000, "nested"),
            (b"x" * 5000, "larger than 4096 bytes"),
            (b'{"stop": {}}', "no such command: 'stop'"),
            (b'{"drain": {"timeout": -1}}', "drain.timeout: -1 is not a number of seconds"),
            (b'{"drain": {"timeout": true}}', "drain.timeout: True is not a number of seconds"),
        ):
            async with await anyio.connect_unix(site.socket) as stream:
                await stream.send(request)
                await stream.send_eof()
                assert reason in json.loads(await stream.receive())["error"]
        assert (await site.health()).healthy


async def test_socket_of_a_killed_worker_is_replaced_and_that_of_a_running_one_kept(
    on_site: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "work" / "control").mkdir(parents=True, mode=0o750)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path(tmp_path / "work")))  # nobody listens
    async with on_site() as site:
        before = site.socket.stat().st_ino
        blocked = tmp_path / "blocked"
        blocked.mkdir()
        (blocked / "control").write_text("a file where the folder should be")
        await ControlServer(blocked, {}).serve()
        assert f"hypha-worker drain cannot reach this worker, SIGTERM drains it: {blocked}" in caplog.text
        await ControlServer(site.socket.parent.parent, {}).serve()
        assert site.socket.stat().st_ino == before
        assert (await site.command("drain")).exit_code == 0
    assert "another worker uses this work_dir" in caplog.text


def test_worker_is_found_by_its_configuration(tmp_path: Path, worker_toml: str) -> None:
    found = CliRunner().invoke(main, ["drain", "--config", worker_toml])
    assert found.exit_code == 3
    assert f"no worker listens at {tmp_path / 'control' / 'worker.sock'}" in found.stderr
    for wrong in (["drain"], ["drain", "--config", str(tmp_path / "none.toml")], ["drain", "--timeout", "-1"]):
        assert CliRunner().invoke(main, wrong).exit_code == 2


@given(data=st.binary(max_size=200) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_what_is_no_request_is_a_value_error(data: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_timeout(parse_request(data if isinstance(data, bytes) else b'{"drain": %s}' % data.encode())[1])
