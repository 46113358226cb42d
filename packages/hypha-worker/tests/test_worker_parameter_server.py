"""The parameter server: rounds, refusals before the mean, its momentum, a scheduler that is away or out of space."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from support.waiting import until

from hypha_net import retries, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint
from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import Command, CommandAnswer, SetMembers, SetWorkers
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Nesterov, One, PeersReference, SliceAddress, UriReference
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.round_membership import Member
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.training_reports import Continue, Done, ReportError
from hypha_proto.transfer import NO_ROOM, OUTER_UPDATE, PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal
from hypha_proto.update_file import UpdateMetadata, write_update

TERM = 2
RATE, FACTOR = 0.7, 0.9
InLab = Callable[..., Any]
Float32 = NDArray[np.float32]


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch, quick_retries: None) -> None:
    monkeypatch.setattr(retries, "UPDATE", RetryPolicy("test", (0.01,), True))


@dataclass
class TermLab:
    """A parameter server, the scheduler that gets its outer updates, and trainers."""

    lab: Any
    trainers: list[MemoryEndpoint]
    scheduler: Any
    """`PushReceiver` of the scheduler."""
    lease: uuid.UUID
    receivers: list[Any]

    def write(self, values: Any, metadata: UpdateMetadata | None = None) -> Path:
        path: Path = self.lab.folder / f"update-{uuid.uuid4()}"
        array = np.asarray(values, np.float32)
        write_update(path, {"w": array.shape}, [("w", array)], metadata or UpdateMetadata())
        return path

    async def push(self, who: int, number: int, path: Path, **changes: Any) -> str:
        """Push an update as a trainer; return its digest."""
        size, digest = await transfer.describe(path)
        fields = {
            "attempt": self.lab.scheduler.sender,
            "round": number,
            "kind": PSEUDO_GRADIENT,
            "name": "update",
            "size": size,
            "digest": digest,
            "term": TERM,
            "scheduler": self.lab.scheduler.endpoint.peer_id,
        }
        await transfer.push(self.trainers[who], self.lab.peer, path, PushHeader(**(fields | changes)))
        return digest

    async def announce(
        self,
        number: int,
        digests: tuple[str | None, ...] = (None, None),
        samples: tuple[int, ...] = (1, 1),
        who: tuple[int, ...] = (0, 1),
        deadline_ms: int = 10_000,
    ) -> CommandAnswer:
        members = tuple(
            Member(peer=self.trainers[number].peer_id, samples=count, update=digest)
            for number, digest, count in zip(who, digests, samples, strict=False)
        )
        return await self.command(SetMembers(round=number, members=members, deadline_ms=deadline_ms))

    async def set_workers(self, *who: int) -> CommandAnswer:
        """Announce which trainers are workers of the job."""
        return await self.command(SetWorkers(tuple(self.trainers[number].peer_id for number in who)))

    async def command(self, command: Command) -> CommandAnswer:
        """Send a command to the parameter server; return its answer."""
        scheduler = self.lab.scheduler
        answer: CommandAnswer = await scheduler.tasks.command(self.lease, scheduler.task_on(self.lease), command)
        return answer

    async def take_round(self, number: int, values: Any, who: tuple[int, ...] = (0, 1), **changes: Any) -> Float32:
        """Announce the members of a round and push their equal updates; return the outer update."""
        await self.announce(number, who=who)
        for each in who:
            await self.push(each, number, self.write(values), **changes)
        return await self.outer_update(number)

    async def outer_update(self, number: int) -> Float32:
        """Wait until the scheduler has the outer update of a round; return its values."""
        await self.lab.scheduler.until(lambda: len(self.scheduler.files) >= number)
        _, header, content = self.scheduler.files[number - 1]
        assert (header.round, header.term) == (number, TERM)
        path = self.lab.folder / f"read-{uuid.uuid4()}"
        path.write_bytes(content)
        with TensorFile(path) as file:
            return np.array(file.tensor("w"))

    async def refused(self, who: int, reason: str) -> None:
        """Wait until the scheduler has heard why an update of a trainer is refused."""
        peer = self.trainers[who].peer_id
        await self.lab.scheduler.until(
            lambda: any(each.peer == peer and reason in each.reason for each in self.lab.scheduler.refused)
        )


def momentum_reference(scheduler: PeerId) -> PeersReference:
    return PeersReference(peers=(scheduler,), strategy=One(), resource=SliceAddress(dataset="momentum", index=0))


def serve_momentum(lab: Any, arrays: dict[str, Float32], dtype: str = "F32") -> None:
    path = lab.folder / "momentum"
    with TensorFileWriter(path, {name: TensorInfo(dtype, array.shape) for name, array in arrays.items()}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)

    async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(path) if request.dataset == "momentum" else Refusal(reason="no")

    transfer.serve_pulls(lab.scheduler.endpoint, resolve)


@pytest.fixture
def in_term(in_lab: InLab) -> Callable[..., Any]:
    """Return a function that opens a parameter server for `rounds` rounds, and checks that the job finishes.

    Without rounds it is not checked. With a third trainer, this one is no worker at first.
    """

    @asynccontextmanager
    async def opened(
        rounds: int = 1,
        *,
        trainers: int = 2,
        arrays: dict[str, Float32] | None = None,
        dtype: str = "F32",
        resources: dict[str, float] | None = None,
        **changes: Any,
    ) -> AsyncIterator[TermLab]:
        async with in_lab() as lab, AsyncExitStack() as stack:
            lab.scheduler.answer = lambda _: Done() if len(lab.scheduler.reports) == rounds else Continue()
            opening = [lab.network.endpoint(f"trainer-{number}") for number in range(trainers)]
            endpoints = [await stack.enter_async_context(each) for each in opening]
            receivers = [lab.receive_pushes(endpoint) for endpoint in endpoints]
            scheduler = lab.receive_pushes(lab.scheduler.endpoint)
            own = lab.scheduler.endpoint.peer_id
            peers = [endpoint.peer_id for endpoint in endpoints[:2]]
            fields = {"term": TERM} | ({} if arrays is None else {"momentum": momentum_reference(own)}) | changes
            if arrays is not None:
                serve_momentum(lab, arrays, dtype)
            lease = await lab.scheduler.hire(lab.SERVER, **(resources or {}))
            await lab.scheduler.dispatch(lease, lab.aggregate_spec(peers, [*peers, own], **fields))
            yield TermLab(lab, endpoints, scheduler, lease, receivers)
            if rounds:
                end = await lab.scheduler.ended()
                assert (end.outcome, end.reason) == ("finished", "")
                assert lab.left_behind() == []

    return opened


InTerm = Callable[..., Any]

# --------------------------------------------------------------------------------------------------------------- rounds


async def test_rounds_are_averaged_by_samples_and_stepped_with_momentum(in_term: InTerm) -> None:
    async with in_term(rounds=2) as lab:
        await lab.push(0, 1, lab.write([1.0, 1.0]))  # before its members are announced
        assert (await lab.announce(1, samples=(4, 2))).accepted
        await lab.push(1, 1, lab.write([2.5, 2.5]))
        mean = (4 * 1.0 + 2 * 2.5) / 6
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * mean, rtol=1e-6)
        second = await lab.take_round(2, [3.0, 3.0])
        momentum = FACTOR * mean + 3.0
        np.testing.assert_allclose(second, RATE * (3.0 + FACTOR * momentum), rtol=1e-6)
        for receiver in lab.receivers:
            await lab.lab.scheduler.until(lambda receiver=receiver: receiver.files)
            sender, header, _ = receiver.files[0]
            assert sender == lab.lab.peer
            assert (header.kind, header.round, header.term) == (OUTER_UPDATE, 1, TERM)
            assert header.attempt.job_id == lab.lab.scheduler.job_id
        assert {report.attempt for report in lab.lab.scheduler.reports} == {header.attempt}


async def end_with_a_round_of_both(lab: TermLab) -> None:
    """Run the second and last round with zero updates, so that only the momentum of the first counts."""
    np.testing.assert_allclose(await lab.take_round(2, [0.0, 0.0]), RATE * FACTOR**2 * 2.0, rtol=1e-6)


@pytest.mark.parametrize("missing_member", [True, False], ids=["member that is missing", "no member"])
async def test_an_update_that_comes_after_its_round_is_taken_and_does_not_count(
    in_term: InTerm, missing_member: bool
) -> None:
    async with in_term(rounds=2) as lab:
        await lab.announce(1, samples=(1, 98), who=(0, 1) if missing_member else (0,), deadline_ms=300)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 2.0, rtol=1e-6)
        told = [(each.round, each.peer, each.reason) for each in lab.lab.scheduler.refused]
        late = (1, lab.trainers[1].peer_id, "it did not arrive in time")  # reported before the step
        assert told == ([late] if missing_member else [])
        await lab.push(1, 1, lab.write([99.0, 99.0]))
        await end_with_a_round_of_both(lab)


@pytest.mark.parametrize("begun", [False, True], ids=["sent then", "under way"])
async def test_a_sender_removed_from_the_current_round_is_late(in_term: InTerm, begun: bool) -> None:
    async with in_term(rounds=2) as lab:
        await lab.announce(1)
        if begun:
            checked, go_on = anyio.Event(), anyio.Event()
            [running_task] = lab.lab.worker.tasks.running
            check = running_task.execution._inspect

            async def check_late(path: Path, size: int) -> float:
                norm: float = await check(path, size)
                checked.set()
                await go_on.wait()
                return norm

            running_task.execution._inspect = check_late
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lab.push, 1, 1, lab.write([99.0, 99.0]))
                await checked.wait()
                running_task.execution._inspect = check
                await lab.announce(1, who=(0,))
                go_on.set()
        else:
            await lab.announce(1, who=(0,))
            await lab.push(1, 1, lab.write([99.0, 99.0]))
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 2.0, rtol=1e-6)
        assert lab.lab.scheduler.refused == []
        await end_with_a_round_of_both(lab)


async def test_a_round_starts_while_the_last_outer_update_is_still_being_pushed(in_term: InTerm) -> None:
    """The fastest member pushes its next update before the slowest has the last outer update."""
    async with in_term(rounds=2) as lab:
        await lab.announce(1)
        await lab.push(0, 1, lab.write([1.0, 1.0]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lab.push, 1, 1, lab.write([1.0, 1.0]))
            await lab.lab.scheduler.until(lambda: lab.receivers[0].files)
            await lab.push(0, 2, lab.write([2.0, 1.0]))
            await lab.announce(2)
            await lab.push(1, 2, lab.write([2.0, 1.0]))
        await lab.outer_update(2)


async def test_an_outer_step_that_exceeds_the_storage_of_its_task_fails_it(in_term: InTerm) -> None:
    """The update fits into the lease; momentum and result do not."""
    async with in_term(rounds=0, resources={"cpu": 1.0, "storage": 0.001}) as lab:
        await lab.announce(1, who=(0,))
        await lab.push(0, 1, lab.write(np.ones(100_000)))
        assert "of 1000000 bytes are used" in await lab.lab.scheduler.failure()


async def test_an_error_from_the_scheduler_fails_the_task(in_term: InTerm) -> None:
    async with in_term(rounds=0) as lab:
        lab.lab.scheduler.answer = lambda _report: ReportError()
        await lab.announce(1, who=(0,))
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        assert "does not accept the outer step of round 1" in await lab.lab.scheduler.failure()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([np.nan, 1.0], "NaN or infinity"),
        ([np.inf, 1.0], "NaN or infinity"),
        ([3e38, 1.0], "beyond 1e"),
        ([1.0, 1.0, 1.0], "does not match the first"),
    ],
    ids=["NaN", "infinity", "overflow", "wrong shape"],
)
async def test_bad_updates_are_refused_before_the_mean_and_the_job_goes_on(
    in_term: InTerm, values: list[float], reason: str
) -> None:
    async with in_term(rounds=2) as lab:
        await lab.take_round(1, [0.0, 0.0])
        await lab.announce(2)
        await lab.push(0, 2, lab.write([2.0, 2.0]))
        with pytest.raises(TransferRefusedError, match=reason):
            await lab.push(1, 2, lab.write(values))
        await lab.refused(1, reason)
        await lab.announce(2, who=(0,))
        np.testing.assert_allclose(await lab.outer_update(2), RATE * (1 + FACTOR) * 2.0, rtol=1e-6)


async def test_an_update_a_million_times_too_large_does_not_count(in_term: InTerm) -> None:
    async with in_term(rounds=2) as lab:
        await lab.announce(1)
        await lab.push(0, 1, lab.write([3e6, 3e6]))
        await lab.push(1, 1, lab.write([2.0, 2.0]))
        await lab.refused(0, "its norm 4.24e+06 is over 10 times that of other updates")
        await lab.announce(1, who=(1,))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 2.0, rtol=1e-6)
        await lab.announce(2, who=(0,))
        await lab.push(0, 2, lab.write([3e6, 3e6]))  # all alone, against the round before
        await lab.refused(0, "over 10 times")
        await lab.take_round(2, [0.0, 0.0], who=(1,))


@pytest.mark.parametrize("term", [1, 3])
async def test_an_update_for_another_term_is_refused_and_counts_when_it_is_sent_under_this_one(
    in_term: InTerm, term: int
) -> None:
    """Its worker has not heard of the new parameter server yet: that is no fault of the update."""
    async with in_term() as lab:
        await lab.announce(1)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        update = lab.write([4.0, 4.0])
        with pytest.raises(TransferRefusedError, match=f"term: {term} is not 2"):
            await lab.push(1, 1, update, term=term)
        await lab.push(1, 1, update)
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 3.0, rtol=1e-6)
        assert lab.lab.scheduler.refused == []


async def test_an_update_of_the_wrong_shape_that_comes_first_is_not_the_measure(in_term: InTerm) -> None:
    """In the first round the layout with the most samples is that of the model."""
    async with in_term(rounds=2) as lab:
        await lab.announce(1, samples=(1, 3))
        await lab.push(0, 1, lab.write([9.0, 9.0, 9.0]))
        await lab.push(0, 2, lab.write([8.0, 8.0, 8.0]))  # a round ahead
        await lab.push(1, 1, lab.write([3.0, 3.0]))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 3.0, rtol=1e-6)
        await lab.refused(0, "tensor 'w' is F32 [3], expected F32 [2]")
        with pytest.raises(TransferRefusedError, match="does not match the first"):
            await lab.push(0, 2, lab.write([7.0, 7.0, 7.0]))
        await lab.push(1, 2, lab.write([0.0, 0.0]))
        await lab.announce(2, who=(1,))
        np.testing.assert_allclose(await lab.outer_update(2), RATE * FACTOR**2 * 3.0, rtol=1e-6)
        assert [(each.round, each.peer) for each in lab.lab.scheduler.refused] == [
            (number, lab.trainers[0].peer_id) for number in (1, 2)
        ]


@pytest.mark.parametrize("announced_first", [True, False])
async def test_an_update_with_another_digest_than_stated_is_refused_and_deleted(
    in_term: InTerm, announced_first: bool
) -> None:
    async with in_term() as lab:
        honest = [lab.write([2.0, 2.0]), lab.write([4.0, 4.0])]
        digests = [(await transfer.describe(path))[1] for path in honest]
        if announced_first:
            await lab.announce(1, tuple(digests))
        await lab.push(0, 1, honest[0])
        told = pytest.raises(TransferRefusedError, match=r"update: the digest .* which its worker has stated")
        with told if announced_first else nullcontext():
            await lab.push(1, 1, lab.write([9.0, 9.0]))
        if not announced_first:
            await lab.announce(1, tuple(digests))
        await lab.refused(1, "has stated for round 1")
        [job_dir] = (lab.lab.folder / "work").glob("hypha-*")
        assert len(list(job_dir.glob("update-*"))) == 1
        await lab.announce(1, (digests[0],), who=(0,))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 2.0, rtol=1e-6)


@pytest.mark.parametrize("good_comes_first", [False, True])
async def test_nothing_of_a_sender_counts_in_a_round_in_which_an_update_of_it_was_refused(
    in_term: InTerm, good_comes_first: bool
) -> None:
    """The scheduler hears of the refusal and gives the samples to others: a good update must not be averaged."""
    async with in_term(rounds=2) as lab:
        await lab.announce(1)
        if good_comes_first:
            await lab.push(1, 1, lab.write([4.0, 4.0]))
        with pytest.raises(TransferRefusedError, match="NaN"):
            await lab.push(1, 1, lab.write([np.nan, 1.0]))
        with pytest.raises(TransferRefusedError, match="was refused in round 1 before"):
            await lab.push(1, 1, lab.write([5.0, 5.0]))
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        await lab.announce(1, who=(0,))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 2.0, rtol=1e-6)
        await end_with_a_round_of_both(lab)


async def test_a_file_that_is_no_update_of_this_job_is_refused_and_deleted(in_term: InTerm) -> None:
    async with in_term() as lab:
        await lab.announce(1)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        junk, good = lab.lab.folder / "junk", lab.write([1.0, 1.0])
        junk.write_bytes(bytes(100))
        for path, number, changes, reason in (
            (junk, 1, {}, "of no known kind"),
            (good, 7, {}, "too far ahead"),
            (good, 1, {"codec": "zip"}, "codec"),
            (good, 1, {"attempt": AttemptId(uuid.uuid4(), "sender", 0)}, ""),
            (good, 1, {"kind": OUTER_UPDATE}, ""),
        ):
            with pytest.raises(TransferRefusedError):
                await lab.push(1, number, path, **changes)
            if reason:
                await lab.refused(1, reason)
        [job_dir] = (lab.lab.folder / "work").glob("hypha-*")
        assert len(list(job_dir.glob("update-*"))) == 1
        await lab.announce(1, who=(0,))
        await lab.outer_update(1)


async def test_an_update_that_counted_in_an_earlier_round_is_refused(in_term: InTerm) -> None:
    async with in_term(rounds=2) as lab:
        replayed = lab.write([4.0, 4.0])
        await lab.announce(1)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        await lab.push(1, 1, replayed)
        await lab.outer_update(1)
        with pytest.raises(TransferRefusedError, match=r"has sent .* for another round already"):
            await lab.push(1, 2, replayed)
        await lab.refused(1, "for another round already")
        await lab.push(0, 2, replayed)  # another member may have computed the same
        await lab.announce(2, who=(0,))
        momentum = FACTOR * 3.0 + 4.0
        np.testing.assert_allclose(await lab.outer_update(2), RATE * (4.0 + FACTOR * momentum), rtol=1e-6)


async def test_workers_that_state_nothing_take_part(in_term: InTerm) -> None:
    """Their headers have neither term nor contribution, and their digests are not announced."""
    async with in_term() as lab:
        np.testing.assert_allclose(await lab.take_round(1, [3.0, 3.0], term=None), RATE * (1 + FACTOR) * 3.0, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------- momentum


async def test_a_new_parameter_server_goes_on_with_the_momentum_of_the_scheduler(in_term: InTerm) -> None:
    """Equal to the bit to a parameter server that has taken all steps itself."""
    rng = np.random.default_rng(3)
    updates = [[rng.normal(0, 0.01, 5).astype("f4") for _ in range(2)] for _ in range(4)]
    whole: list[Float32] = []
    resumed: list[Float32] = []

    async def take_steps(lab: TermLab, chosen: list[list[Float32]], into: list[Float32]) -> None:
        for number, of_members in enumerate(chosen, 1):
            await lab.announce(number)
            for who, values in enumerate(of_members):
                await lab.push(who, number, lab.write(values))
            into.append(await lab.outer_update(number))

    async with in_term(rounds=4) as lab:
        await take_steps(lab, updates, whole)
    momentum: Float32 | float = 0.0
    for update in whole[:2]:
        momentum = derive_momentum(update, momentum, Nesterov(learning_rate=RATE, momentum=FACTOR, nesterov=True))
    async with in_term(rounds=2, arrays={"w": momentum}) as lab:
        await take_steps(lab, updates[2:], resumed)
    np.testing.assert_array_equal(np.array(resumed), np.array(whole[2:]))


@pytest.mark.parametrize(
    ("momentum", "reason"),
    [
        ({"arrays": {"w": np.array([1.0, np.nan], "f4")}}, "tensor 'w' holds NaN or infinity"),
        (
            {"arrays": {"w": np.ones(2, "f4")}, "dtype": "BF16"},
            "tensor 'w' is BF16, and the momentum is float32",
        ),
        ({"momentum": momentum_reference(PeerId.from_public_key(bytes(32)))}, ""),
        ({"momentum": UriReference(value="https://a.org/x")}, "the reference names no file of a peer"),
    ],
    ids=["NaN", "bfloat16", "not there", "not of a peer"],
)
async def test_a_momentum_that_cannot_be_used_fails_the_job(
    in_term: InTerm, momentum: dict[str, Any], reason: str
) -> None:
    async with in_term(rounds=0, **momentum) as lab:
        assert f"momentum: {reason}" in await lab.lab.scheduler.failure()


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"w": np.ones(3, "f4")}, r"tensor 'w' is \[2\], expected \[3\]"),
        ({"w": np.ones(2, "f4"), "b": np.ones(1, "f4")}, "tensor 'b' is missing"),
        ({}, "tensor 'w' has no momentum"),
    ],
    ids=["shape", "missing", "more"],
)
async def test_updates_that_do_not_fit_the_momentum_are_refused(
    in_term: InTerm, arrays: dict[str, Float32], reason: str
) -> None:
    async with in_term(rounds=0, arrays=arrays) as lab:
        with pytest.raises(TransferRefusedError, match=f"does not match the momentum of this job: {reason}"):
            await lab.push(0, 1, lab.write([1.0, 1.0]))


# -------------------------------------------------------------------------------------------- scheduler away, or full


def refuse_pushes(lab: TermLab, reason: str, count: int) -> list[str]:
    """Let the scheduler refuse the next pushes; return the list of what it has refused."""
    refused: list[str] = []
    accept = lab.scheduler.accept

    async def refuse(peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        if len(refused) < count:
            refused.append(reason)
            return Refusal(reason=reason)
        return await accept(peer, header)  # type: ignore[no-any-return]

    transfer.serve_pushes(lab.lab.scheduler.endpoint, refuse)
    return refused


async def test_the_outer_update_waits_for_room_at_the_scheduler(in_term: InTerm) -> None:
    async with in_term() as lab:
        refused = refuse_pushes(lab, f"{NO_ROOM}: 5 bytes are free", 30)
        await lab.take_round(1, [3.0, 3.0])
        assert len(refused) == 30


async def test_an_outer_update_that_the_scheduler_refuses_is_reported_all_the_same(in_term: InTerm) -> None:
    """It may have it already, because a receipt was lost: its answer to the report decides."""
    async with in_term() as lab:
        refused = refuse_pushes(lab, "round 1 is committed", 1000)
        await lab.announce(1)
        for who in range(2):
            await lab.push(who, 1, lab.write([3.0, 3.0]))
        await lab.lab.scheduler.until(lambda: lab.lab.scheduler.reports)
        assert 1 < len(refused) < 20


async def test_the_outer_update_and_the_report_wait_for_a_scheduler_that_is_away(
    in_term: InTerm, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_term() as lab:
        away = lab.lab.peer, lab.lab.scheduler.endpoint.peer_id
        await lab.announce(1)
        await lab.push(0, 1, lab.write([3.0, 3.0]))
        lab.lab.network.partition(*away)
        await lab.push(1, 1, lab.write([3.0, 3.0]))
        for receiver in lab.receivers:
            await lab.lab.scheduler.until(lambda receiver=receiver: receiver.files)
        await until(lambda: "did not reach the scheduler" in caplog.text, 20)
        lab.lab.network.heal(*away)
        await lab.outer_update(1)


# -------------------------------------------------------------------------------------- workers that come and go


JOINED = 2
"""A trainer that is no worker at first."""


async def test_a_worker_that_joins_takes_part_and_one_that_left_gets_nothing(in_term: InTerm) -> None:
    async with in_term(rounds=2, trainers=3) as lab:
        await lab.announce(1)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        assert (await lab.set_workers(0, JOINED)).accepted
        await lab.push(JOINED, 2, lab.write([4.0, 4.0]))  # before its round is announced
        await lab.announce(1, who=(0,))
        await lab.outer_update(1)
        await lab.announce(2, who=(0, JOINED))
        await lab.push(0, 2, lab.write([0.0, 0.0]))
        momentum = FACTOR * 2.0 + 2.0
        np.testing.assert_allclose(await lab.outer_update(2), RATE * (2.0 + FACTOR * momentum), rtol=1e-6)
    assert [len(receiver.files) for receiver in lab.receivers] == [2, 0, 2]
    assert lab.lab.scheduler.refused == []


async def test_an_update_that_overtakes_the_announcement_of_its_worker_waits_for_it(in_term: InTerm) -> None:
    async with in_term(trainers=3) as lab:
        await lab.set_workers(0, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lab.push, JOINED, 1, lab.write([4.0, 4.0]))
            [run] = lab.lab.worker.tasks.running
            await lab.lab.scheduler.until(lambda: run.execution._unannounced)
            await lab.set_workers(0, 1, JOINED)
        await lab.announce(1, who=(JOINED,))
        np.testing.assert_allclose(await lab.outer_update(1), RATE * (1 + FACTOR) * 4.0, rtol=1e-6)


async def test_an_update_of_a_peer_that_is_no_worker_is_refused_and_not_reported(
    in_term: InTerm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.executors.parameter_server.server.ANNOUNCEMENT_WAIT", 0.05)
    async with in_term() as lab:
        await lab.set_workers(0)
        with pytest.raises(TransferRefusedError, match="is not a worker of this job"):
            await lab.push(1, 1, lab.write([9.0, 9.0]))
        await lab.take_round(1, [2.0, 2.0], who=(0,))
        assert lab.lab.scheduler.refused == []


async def test_a_round_goes_on_when_the_scheduler_alone_has_its_outer_update(
    in_term: InTerm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that are gone cost the others no time, and one warning each."""
    monkeypatch.setattr("hypha_worker.executors.parameter_server.outer_push.PATIENCE", 0.05)
    async with in_term() as lab:
        await lab.announce(1)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        for receiver in lab.receivers:
            receiver.refuse = "the job is ending"
        await lab.push(1, 1, lab.write([2.0, 2.0]))
        await lab.outer_update(1)
        await lab.lab.scheduler.until(lambda: lab.lab.scheduler.reports)
    told = [record for record in caplog.records if "outer update of round 1 did not reach" in record.getMessage()]
    assert len(told) == 2


async def test_a_member_that_does_not_answer_holds_no_round_up(
    in_term: InTerm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.executors.parameter_server.outer_push.PATIENCE", 0.05)
    stopped = anyio.Event()

    async def hang(_peer: PeerId, _header: PushHeader) -> Refusal:
        await stopped.wait()
        return Refusal(reason="it has been stopped")

    async with in_term(rounds=2) as lab:
        transfer.serve_pushes(lab.trainers[1], hang)
        for number, who in ((1, (0, 1)), (2, (0,))):
            await lab.take_round(number, [number, 2.0], who)
        await lab.set_workers(0)  # it is released: nothing is pushed to it any more
        assert [len(receiver.files) for receiver in lab.receivers] == [2, 0]


async def test_a_member_that_is_back_after_its_round_gets_the_outer_update(
    in_term: InTerm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its update counts, and its executor waits for the outer update of this round."""
    monkeypatch.setattr("hypha_worker.executors.parameter_server.outer_push.PATIENCE", 0.05)
    async with in_term(rounds=2) as lab:
        away = lab.lab.peer, lab.trainers[1].peer_id
        await lab.announce(1)
        await lab.push(1, 1, lab.write([2.0, 2.0]))
        lab.lab.network.partition(*away)
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        await lab.outer_update(1)
        await until(lambda: "did not reach" in caplog.text, 20)
        lab.lab.network.heal(*away)
        await lab.lab.scheduler.until(lambda: lab.receivers[1].files)
        await lab.take_round(2, [1.0, 2.0], who=(0,))
    assert caplog.text.count("outer update of round 1 did not reach") == 1


async def test_members_whose_updates_never_came_are_reported_and_others_announced(in_term: InTerm) -> None:
    """The only worker that had stated an update died before it was pushed."""
    async with in_term() as lab:
        await lab.announce(1, who=(1,), deadline_ms=20)
        await lab.lab.scheduler.until(lambda: lab.lab.scheduler.refused)
        [missing] = lab.lab.scheduler.refused
        assert (missing.round, missing.peer, missing.missing) == (1, lab.trainers[1].peer_id, True)
        await lab.take_round(1, [2.0, 2.0], who=(0,))


async def test_a_parameter_server_that_gets_no_update_twice_fails(in_term: InTerm) -> None:
    async with in_term(rounds=0) as lab:
        await lab.announce(1, deadline_ms=20)
        await lab.lab.scheduler.until(lambda: len(lab.lab.scheduler.refused) == 2)
        await lab.announce(1, deadline_ms=20)
        assert "no update of round 1 arrived" in await lab.lab.scheduler.failure()


async def test_a_full_disk_gives_the_work_back_with_the_path(in_term: InTerm, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/outer-1.safetensors")

    monkeypatch.setattr("hypha_proto.outer_step.outer_step", step)
    async with in_term(rounds=0) as lab:
        await lab.announce(1, who=(0,))
        await lab.push(0, 1, lab.write([2.0, 2.0]))
        end = await lab.lab.scheduler.ended()
        assert end.outcome == "cancelled"
        assert "/disk/outer-1.safetensors: No space left on device" in end.reason


async def test_an_update_for_which_there_is_no_room_gives_the_work_back(
    in_term: InTerm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_term(rounds=0) as lab:
        await lab.announce(1, who=(0,))
        update = lab.write([2.0, 2.0])

        def allocate(*_arguments: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/update")

        monkeypatch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(TransferRefusedError, match=NO_ROOM):
            await lab.push(0, 1, update)
        end = await lab.lab.scheduler.ended()
        assert end.outcome == "cancelled"
        assert "No space left on device" in end.reason
