"""The parameter server as a task: rounds over the network, missing members, refused updates."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from hypha_net import transfer
from hypha_net.errors import TransferError
from hypha_net.testing import MemoryEndpoint
from hypha_proto.commands import CommandAnswer, SetMembers
from hypha_proto.progress import Continue, Done, OuterStepTaken, ProgressError
from hypha_proto.round_membership import Member
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader
from hypha_proto.update_file import TensorFile, UpdateMetadata, write_update

InLab = Callable[..., None]


@dataclass
class Group:
    """Three training peers around a worker that runs the parameter server."""

    lab: Any
    peers: list[MemoryEndpoint]
    receivers: list[Any]
    lease: uuid.UUID

    def write(self, value: float, name: str = "update", shape: tuple[int, ...] = (4,)) -> Path:
        path: Path = self.lab.folder / f"{name}-{uuid.uuid4()}"
        array = np.full(shape, value, np.float32)
        write_update(path, {"w": shape}, [("w", array)], UpdateMetadata())
        return path

    async def push(self, who: int, number: int, path: Path, **changes: Any) -> None:
        size, digest = await transfer.describe(path)
        fields = {
            "job_id": self.lab.scheduler.job_id,
            "round": number,
            "kind": PSEUDO_GRADIENT,
            "name": "update",
            "size": size,
            "digest": digest,
            "scheduler": self.lab.scheduler.endpoint.peer_id,
        }
        await transfer.push(self.peers[who], self.lab.peer, path, PushHeader(**(fields | changes)))

    async def name(self, number: int, samples: dict[int, int], deadline_ms: int = 10_000) -> CommandAnswer:
        members = tuple(Member(peer=self.peers[who].peer_id, samples=count) for who, count in samples.items())
        message = SetMembers(round=number, members=members, deadline_ms=deadline_ms)
        scheduler = self.lab.scheduler
        answer: CommandAnswer = await scheduler.tasks.command(self.lease, scheduler.task_on(self.lease), message)
        return answer

    async def result(self, who: int, count: int) -> tuple[PushHeader, float]:
        """Wait until a peer has `count` outer updates; return the latest."""
        files = self.receivers[who].files
        await self.lab.scheduler.until(lambda: len(files) >= count)
        sender, header, content = files[count - 1]
        assert sender == self.lab.peer
        path = self.lab.folder / f"read-{uuid.uuid4()}"
        path.write_bytes(content)
        with TensorFile(path) as file:
            values = file.tensor("w")
        assert np.all(values == values.flat[0])
        return header, float(values.flat[0])


@asynccontextmanager
async def running(lab: Any, push_receiver: Any, *, members: bool | None = True) -> AsyncIterator[Group]:
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(lab.network.endpoint(f"trainer-{n}")) for n in range(3)]
        receivers = [push_receiver(peer, lab.folder / f"receiver-{n}") for n, peer in enumerate(peers)]
        for receiver in receivers:
            receiver.listen()
        spec = lab.aggregate_spec([p.peer_id for p in peers], [p.peer_id for p in peers], members=members)
        lease = await lab.scheduler.hire(lab.SERVER)
        await lab.scheduler.dispatch(lease, spec)
        yield Group(lab, peers, receivers, lease)


def done_after(count: int) -> Callable[[Any], Any]:
    heard: list[Any] = []

    def answer(report: Any) -> Any:
        assert isinstance(report.progress, OuterStepTaken)
        heard.append(report)
        return Done() if len(heard) == count else Continue()

    return answer


def test_rounds_are_averaged_by_samples_and_stepped_with_momentum(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(2)
        async with running(lab, push_receiver) as group:
            early = group.write(1.0)
            await group.push(0, 1, early)
            assert (await group.name(1, {0: 4, 1: 1, 2: 3})).accepted
            await group.push(1, 1, group.write(2.0))
            await group.push(2, 1, group.write(3.0))
            mean = (4 * 1.0 + 1 * 2.0 + 3 * 3.0) / 8
            for who in range(3):
                header, value = await group.result(who, 1)
                assert value == pytest.approx(0.7 * (mean + 0.9 * mean))
                assert (header.kind, header.round, header.job_id) == (OUTER_UPDATE, 1, lab.scheduler.job_id)
            assert (await group.name(2, {0: 1, 1: 1, 2: 1})).accepted
            for who in range(3):
                await group.push(who, 2, group.write(1.0))
            momentum = 0.9 * mean + 1.0
            _, value = await group.result(0, 2)
            assert value == pytest.approx(0.7 * (1.0 + 0.9 * momentum))
            end = await lab.scheduler.ended()
            assert (end.outcome, end.reason) == ("finished", "")
            assert lab.left_behind() == []
            assert all(report.lease == end.lease for report in lab.scheduler.reports)

    in_lab(case)


async def end_with_a_round_of_all_three(lab: Any, group: Any, *, refused: Sequence[tuple[int, int]] = ()) -> None:
    """Run the second and last round with zero updates, so that only the momentum of the first counts."""
    await group.name(2, {0: 1, 1: 1, 2: 1})
    for who in range(3):
        await group.push(who, 2, group.write(0.0))
    _, value = await group.result(2, 2)
    assert value == pytest.approx(0.7 * 0.9 * 0.9 * 3.0)
    told = [(each.round, each.peer) for each in lab.scheduler.refused]
    assert told == [(number, group.peers[who].peer_id) for number, who in refused]
    assert (await lab.scheduler.ended()).outcome == "finished"


def test_a_member_missing_at_the_deadline_is_left_out(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(2)
        async with running(lab, push_receiver) as group:
            await group.name(1, {0: 1, 1: 1, 2: 98}, deadline_ms=300)
            await group.push(0, 1, group.write(2.0))
            await group.push(1, 1, group.write(4.0))
            _, value = await group.result(2, 1)
            assert value == pytest.approx(0.7 * 1.9 * 3.0)
            assert lab.scheduler.refused[0].reason == "it did not arrive in time"  # reported before the step
            await group.push(2, 1, group.write(99.0))  # too late: accepted, and not counted
            await end_with_a_round_of_all_three(lab, group, refused=[(1, 2)])

    in_lab(case)


@pytest.mark.parametrize("begun", [False, True], ids=["sent then", "under way"])
def test_a_sender_removed_from_the_current_round_is_late(in_lab: InLab, push_receiver: Any, begun: bool) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(2)
        async with running(lab, push_receiver) as group, anyio.create_task_group() as tasks:
            await group.name(1, {0: 1, 1: 1, 2: 1})
            await group.push(0, 1, group.write(2.0))
            if begun:
                checked, go_on = anyio.Event(), anyio.Event()
                [running_task] = lab.worker.tasks.running
                check = running_task.execution._check_layout

                async def check_late(path: Path, size: int) -> None:
                    await check(path, size)
                    checked.set()
                    await go_on.wait()

                running_task.execution._check_layout = check_late
                tasks.start_soon(group.push, 2, 1, group.write(99.0))
                await checked.wait()
                running_task.execution._check_layout = check
                await group.name(1, {0: 1, 1: 1})
                go_on.set()
            else:
                await group.name(1, {0: 1, 1: 1})
                await group.push(2, 1, group.write(99.0))
            await group.push(1, 1, group.write(4.0))
            _, value = await group.result(2, 1)
            assert value == pytest.approx(0.7 * 1.9 * 3.0)
            await end_with_a_round_of_all_three(lab, group)

    in_lab(case)


def test_a_non_member_of_a_past_round_is_late_and_takes_part_in_the_next(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(2)
        async with running(lab, push_receiver) as group:
            await group.name(1, {0: 1, 1: 1})
            await group.push(0, 1, group.write(2.0))
            await group.push(1, 1, group.write(4.0))
            _, value = await group.result(2, 1)
            assert value == pytest.approx(0.7 * 1.9 * 3.0)
            await group.push(2, 1, group.write(99.0))  # accepted, and not counted
            await end_with_a_round_of_all_three(lab, group)

    in_lab(case)


def test_an_unreachable_peer_gets_no_update_and_the_others_do(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(1)
        async with running(lab, push_receiver) as group:
            lab.network.partition(lab.peer, group.peers[2].peer_id)
            await group.name(1, {0: 1, 1: 1})
            await group.push(0, 1, group.write(2.0))
            await group.push(1, 1, group.write(2.0))
            assert (await group.result(0, 1))[1] == (await group.result(1, 1))[1]
            assert (await lab.scheduler.ended()).outcome == "finished"

    in_lab(case)


def test_a_round_without_updates_fails_the_job_and_does_not_hang(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        async with running(lab, push_receiver) as group:
            await group.name(1, {0: 1}, deadline_ms=50)
            end = await lab.scheduler.ended()
            assert end.outcome == "failed"
            assert "no update of round 1 arrived" in end.reason

    in_lab(case)


def test_invalid_updates_are_refused_and_reported_to_the_scheduler(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(1)
        async with running(lab, push_receiver) as group:
            await group.name(1, {0: 1, 1: 1})
            await group.push(0, 1, group.write(2.0))
            junk = lab.folder / "junk"
            junk.write_bytes(bytes(100))
            good = group.write(1.0)
            for path, changes, who, number, reason in (
                (group.write(np.nan), {}, 1, 1, "NaN or infinity"),
                (group.write(1.0, shape=(5,)), {}, 1, 1, "does not match the first"),
                (junk, {}, 1, 1, "of no known kind"),
                (good, {}, 1, 7, "too far ahead"),
                (good, {"codec": "zip"}, 1, 1, "codec"),
                (good, {"job_id": uuid.uuid4()}, 1, 1, ""),
                (good, {"kind": OUTER_UPDATE}, 1, 1, ""),
            ):
                count = len(lab.scheduler.refused)
                with pytest.raises(TransferError):
                    await group.push(who, number, path, **changes)
                if reason:
                    await lab.scheduler.until(lambda count=count: len(lab.scheduler.refused) > count)
                    assert reason in lab.scheduler.refused[-1].reason
                    assert lab.scheduler.refused[-1].peer == group.peers[who].peer_id
            [job_dir] = (lab.folder / "work").glob("hypha-*")
            assert len(list(job_dir.glob("update-*"))) == 1, "refused files are deleted"
            await group.push(1, 1, group.write(4.0))
            _, value = await group.result(0, 1)
            assert value == pytest.approx(0.7 * 1.9 * 3.0)
            assert (await lab.scheduler.ended()).outcome == "finished"

    in_lab(case)


def test_without_announced_members_each_sender_counts_equally(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(2)
        async with running(lab, push_receiver, members=None) as group:
            for number in (1, 2):
                for who in range(3):
                    await group.push(who, number, group.write(float(who)))
                for who in range(3):
                    await group.result(who, number)
            first, second = (await group.result(0, 1))[1], (await group.result(0, 2))[1]
            assert first == pytest.approx(0.7 * 1.9)
            assert second == pytest.approx(0.7 * (1.0 + 0.9 * 1.9))
            await lab.scheduler.until(lambda: lab.scheduler.statuses == ["started", "ready", "finished"])

    in_lab(case)


def test_an_outer_step_that_exceeds_the_jobs_storage_fails_the_job(in_lab: InLab) -> None:
    """The update fits into the lease; momentum and result do not."""

    async def case(lab: Any) -> None:
        async with lab.network.endpoint("trainer") as trainer:
            spec = lab.aggregate_spec([trainer.peer_id], [trainer.peer_id], members=None)
            lease = await lab.scheduler.hire(lab.SERVER, cpu=1.0, storage=0.001)
            await lab.scheduler.dispatch(lease, spec)
            group = Group(lab, [trainer], [], lease)
            await group.push(0, 1, group.write(1.0, shape=(100_000,)))
            end = await lab.scheduler.ended()
            assert end.outcome == "failed"
            assert "of 1000000 bytes are used" in end.reason

    in_lab(case)


def test_an_error_from_the_scheduler_fails_the_job(in_lab: InLab, push_receiver: Any) -> None:
    async def case(lab: Any) -> None:
        lab.scheduler.answer = lambda _report: ProgressError()
        async with running(lab, push_receiver) as group:
            await group.name(1, {0: 1})
            await group.push(0, 1, group.write(2.0))
            end = await lab.scheduler.ended()
            assert end.outcome == "failed"
            assert "does not accept the outer step of round 1" in end.reason

    in_lab(case)


def test_a_round_starts_while_the_last_update_is_still_being_pushed(in_lab: InLab, push_receiver: Any) -> None:
    """The fastest member pushes its next update before the slowest has the last outer update."""

    async def case(lab: Any) -> None:
        lab.scheduler.answer = done_after(2)
        async with running(lab, push_receiver) as group:
            await group.name(1, {0: 1, 1: 1})
            await group.push(0, 1, group.write(1.0))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.push, 1, 1, group.write(1.0))
                await group.result(0, 1)
                await group.push(0, 2, group.write(1.0))
                await group.name(2, {0: 1, 1: 1})
                await group.push(1, 2, group.write(1.0))
                await group.result(1, 2)
            assert (await lab.scheduler.ended()).outcome == "finished"

    in_lab(case)
