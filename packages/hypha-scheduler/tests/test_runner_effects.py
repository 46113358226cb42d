"""Order of effects and journal records: what is on disk before what, and what happens when the disk fails."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.scripted_jobs import SPEC, Lab, QuietOperator, ScriptedStrategy, open_scripted_jobs

from hypha_net.errors import TransferRefusedError
from hypha_net.testing import simulate
from hypha_net.transfer import FilePushTarget
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import Acknowledged, ReportError
from hypha_proto.transfer import PushHeader, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.effect_queue import EffectQueue
from hypha_scheduler.jobs.journal import JOURNAL, Journal, read_journal
from hypha_scheduler.strategies.base import EmitEvent, Lease, PushTarget, StartTask, TaskRef, WriteJournal

pytestmark = pytest.mark.virtual_clock

ON_FSYNC = "hypha_proto.record_file.os.fsync"


class Disk:
    """Counts syncs, delays each until it is let go, and can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self.fails = False
        self.busy = anyio.Event()
        self.free = anyio.Event()
        monkeypatch.setattr(ON_FSYNC, self.fsync)
        monkeypatch.setattr(anyio.to_thread, "run_sync", self.run_sync)

    def fsync(self, _descriptor: int) -> None:
        self.syncs += 1
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def run_sync(self, work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        self.busy.set()
        await self.free.wait()
        return work(*arguments)

    def hold(self) -> None:
        self.busy, self.free = anyio.Event(), anyio.Event()


def record(number: int = 0) -> WriteJournal:
    return WriteJournal("step", {"number": number})


def event(name: str) -> EmitEvent:
    return EmitEvent(name, {})


@asynccontextmanager
async def open_queue(
    path: Path, *, names: list[str] | None = None
) -> AsyncIterator[tuple[EffectQueue, list[str], list[OSError]]]:
    """Open a queue whose effects are events, of which the names are listed when they are carried out."""
    carried_out: list[str] = [] if names is None else names
    errors: list[OSError] = []
    with Journal(path) as journal:
        queue = EffectQueue(journal, lambda effect: carried_out.append(effect.name), errors.append)  # type: ignore[union-attr]
        with anyio.fail_after(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(queue.run)
                yield queue, carried_out, errors
                tasks.cancel_scope.cancel()


async def test_records_submitted_together_share_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    async with open_queue(tmp_path / "j") as (queue, names, _errors):
        disk.free.set()
        assert await queue.wait(queue.submit(tuple(record(number) for number in range(10))))
        assert disk.syncs == 1
        disk.hold()
        queue.submit((record(),))
        await disk.busy.wait()
        tickets = [queue.submit((record(number), event(str(number)))) for number in range(10)]  # during that sync
        disk.free.set()
        assert all([await queue.wait(ticket) for ticket in tickets])
        assert disk.syncs == 2  # the one that waited for the disk covers what was written by then
        assert names == [str(number) for number in range(10)]


async def test_nothing_after_a_record_that_cannot_be_synced_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    async with open_queue(tmp_path / "j") as (queue, names, errors):
        disk.fails = True
        ticket = queue.submit((record(), event("after")))
        disk.free.set()
        assert not await queue.wait(ticket)
        later = queue.submit((event("later"), record()))
        assert not await queue.wait(later)
        assert names == []
        assert [error.errno for error in errors] == [errno.ENOSPC]


def test_task_whose_record_finds_no_room_will_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its lease has no task, and is released while the job pauses."""
    task = TaskRef("train", Lease(uuid.uuid4(), PeerId.from_public_key(bytes(32)), "train", 1.0))

    def raise_full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(tmp_path / JOURNAL) as journal:
        queue = EffectQueue(journal, lambda effect: None, lambda error: None)
        monkeypatch.setattr(journal, "append", raise_full)
        queue.submit((record(), StartTask(task, None)))  # type: ignore[arg-type]
        assert queue.is_full
        assert queue.will_start_on(task.lease.id)
        assert not queue.will_start_on(uuid.uuid4())


async def test_closed_queue_lets_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    async with open_queue(tmp_path / "j") as (queue, names, _errors):
        ticket = queue.submit((record(), event("after")))
        await disk.busy.wait()
        async with anyio.create_task_group() as tasks:
            answers: list[bool] = []

            async def wait() -> None:
                answers.append(await queue.wait(ticket))

            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            queue.close()
        assert (answers, names) == ([False], [])


STEPS = st.lists(st.lists(st.sampled_from(["event", "record", "nested", "pause"]), max_size=5), max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(0, 1000))
def test_effects_are_carried_out_in_order_whatever_happens_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[list[str]], seed: int
) -> None:
    """Several tasks submit effects, some of which submit further ones, while records are synced."""
    expected: list[int] = []
    found: list[int] = []
    on_disk: set[int] = set()
    path = tmp_path / uuid.uuid4().hex

    async def sync(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await anyio.sleep(0.01)
        on_disk.update(entry["number"] for entry in read_journal(path))
        done = work(*arguments)
        await anyio.sleep(0.01)
        return done

    def carry_out(queue: EffectQueue, effect: Any) -> None:
        number = effect.fields["number"]
        assert {entry for entry in expected if entry < number and entry in recorded} <= on_disk
        found.append(number)
        if effect.name == "nested":
            submit(queue, ["event"])

    recorded: set[int] = set()

    def submit(queue: EffectQueue, kinds: list[str]) -> int:
        effects = []
        for kind in kinds:
            number = len(expected)
            expected.append(number)
            recorded.update([number] if kind == "record" else [])
            fields = {"number": number}
            effects.append(WriteJournal("step", fields) if kind == "record" else EmitEvent(kind, fields))
        return queue.submit(tuple(effects))

    async def main() -> None:
        monkeypatch.setattr(anyio.to_thread, "run_sync", sync)
        with Journal(path) as journal, anyio.fail_after(100):
            queue: EffectQueue = EffectQueue(journal, lambda effect: carry_out(queue, effect), pytest.fail)  # type: ignore[arg-type]

            async def client(kinds: list[str]) -> None:
                for kind in kinds:
                    await (anyio.sleep(0.007) if kind == "pause" else anyio.lowlevel.checkpoint())
                    if kind != "pause":
                        assert await queue.wait(submit(queue, [kind, "event"]))

            async with anyio.create_task_group() as running:
                running.start_soon(queue.run)
                async with anyio.create_task_group() as clients:
                    for kinds in steps:
                        clients.start_soon(client, kinds)
                running.cancel_scope.cancel()
        assert found == [number for number in expected if number not in recorded]

    simulate(main, seed=seed)


# ------------------------------------------------------------------------------------------------- through the runner


class Recording(QuietOperator):
    """Records each report, push request and push before it answers."""

    def on_training_report(self, task: Any, progress: Any, now: float) -> Any:
        self.hear("progress", task, progress)
        return Acknowledged(), (record(), event("recorded"))

    def on_push_request(self, task: Any, header: Any, now: float) -> Any:
        return PushTarget(self.context.directory / "file", 1000), (record(),)

    def on_push_complete(self, task: Any, header: Any, path: Path, digest: str, now: float) -> Any:
        self.hear("pushed", path)
        return (record(),)


@asynccontextmanager
async def open_recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[tuple[Lab, Any, Disk]]:
    async with open_scripted_jobs(monkeypatch, tmp_path, ScriptedStrategy(Recording)) as lab:
        disk = Disk(monkeypatch)
        disk.free.set()
        operator = await lab.acquire()
        operator.act(StartTask(operator.task(), SPEC))
        await operator.until("update")
        disk.hold()
        yield lab, operator, disk
        await lab.ended()


async def test_report_is_answered_when_its_record_is_on_disk_also_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_recording(monkeypatch, tmp_path) as (lab, operator, disk):
        worker = lab.worker(operator.leases[0])
        answers: list[Any] = []
        request = uuid.uuid4()

        async def report() -> None:
            answers.append(await worker.report(lab.peer, id=request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(report)
            await disk.busy.wait()
            tasks.start_soon(report)  # repeated while the first one waits for the disk
            await anyio.sleep(5)
            assert answers == []
            disk.free.set()
        assert answers == [Acknowledged(), Acknowledged()]
        assert len(operator.told("progress")) == 1
        await lab.finish(operator)


@pytest.mark.parametrize("outcome", ["synced", "full"])
async def test_push_is_granted_and_receipted_when_its_records_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    async with open_recording(monkeypatch, tmp_path) as (lab, operator, disk):
        worker, digest = lab.worker(operator.leases[0]), "blake3:" + "0" * 64
        header = PushHeader(worker.last, 1, "k", "n", 0, digest, lab.peer)
        granted: list[Any] = []
        received: list[Any] = []

        async def ask() -> None:
            granted.append(await lab.service._push(worker.endpoint.peer_id, header))

        async def complete(target: FilePushTarget) -> None:
            try:
                received.append(await target.on_complete(0, header.digest))
            except TransferRefusedError as error:
                received.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await disk.busy.wait()
            await anyio.sleep(5)
            assert granted == []
            disk.free.set()
        [target] = granted
        assert isinstance(target, FilePushTarget)
        disk.hold()
        disk.fails = outcome == "full"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(complete, target)
            await disk.busy.wait()
            await anyio.sleep(5)
            assert received == []
            disk.free.set()
        if outcome == "full":
            assert isinstance(received[0], TransferRefusedError)
            [failure] = await lab.ended()
            assert isinstance(failure, JobFailedError)
            assert "No space left on device" in str(failure)
            assert isinstance(await lab.service._push(worker.endpoint.peer_id, header), Refusal)
        else:
            assert received == [None]
            await lab.finish(operator)


async def test_report_whose_record_cannot_be_synced_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_recording(monkeypatch, tmp_path) as (lab, operator, disk):
        worker = lab.worker(operator.leases[0])
        disk.fails = True
        disk.free.set()
        assert isinstance(await worker.report(lab.peer), ReportError)
        [failure] = await lab.ended()
        assert "No space left on device" in str(failure)
        events = (operator.context.directory / "metrics.jsonl").read_text()
        assert '"recorded"' not in events
        await worker.until(lambda: worker.released)
