"""Rounds as a training worker sees them: contributions, commits, outer updates, and members that come and go."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from support.task_settings import all_of, training
from support.training_bridge import ATTEMPT, JOB, NEW_WEIGHTS, RANGES, WEIGHTS, Rounds, open_client, open_rounds

from hypha_net import retries, rpc, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint
from hypha_proto.bridge_api import ASSIGNED, ROUND_CLOSED, ReceivedFile, RoundJoined, Transfer
from hypha_proto.codec import to_plain
from hypha_proto.commands import ChangeServer
from hypha_proto.contributions import (
    MAX_RANGES,
    AwaitCommit,
    CommitStatus,
    Contribution,
    ContributionKnown,
    SampleRange,
    StateContribution,
)
from hypha_proto.datasets import DATA, DataRequest, SliceAssigned
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JOIN_ROUND, JoinRound, RoundToJoin
from hypha_proto.job_spec import (
    One,
    PeersReference,
    Reference,
    SliceAddress,
)
from hypha_proto.tasks import TaskSpec
from hypha_proto.transfer import NO_JOB, NO_ROOM, OTHER_FILE, OUTER_UPDATE, PushHeader
from hypha_worker.bridge.receive_queue import QUEUE_LIMIT
from hypha_worker.errors import BridgeError
from hypha_worker.tasks.spec_references import named_peers, with_secrets, without_secrets

InRounds = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch, quick_retries: None) -> None:
    for name in ("ROUND", "UPDATE", "MISSED_UPDATE"):
        monkeypatch.setattr(retries, name, RetryPolicy("test", (0.01,), True))


@pytest.fixture
def in_rounds(tmp_path: Path) -> InRounds:
    return partial(open_rounds, tmp_path)


@pytest.fixture
def in_joined(tmp_path: Path) -> InRounds:
    """Return a function that opens a job of term 2 whose executor joins."""
    return partial(open_rounds, tmp_path, join=True)


# ---------------------------------------------------------------------------------------------------- contributions


async def test_an_update_is_stated_to_the_scheduler_before_it_is_pushed(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        sent = await rounds.send()
        statement, header = rounds.history
        assert isinstance(statement, StateContribution)
        assert isinstance(header, PushHeader)
        assert (statement.attempt, statement.round, statement.samples) == (ATTEMPT, 1, 30)
        assert statement.update == sent.checksum == header.digest
        assert statement.contribution == header.contribution
        assert statement.contribution is not None
        assert statement.contribution.ranges == RANGES
        assert header.term == 2


async def test_an_executor_that_states_nothing_is_stated_as_such(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        await rounds.send(contribution=None)
        statement, header = rounds.history
        assert statement.contribution is header.contribution is None
        assert (statement.samples, header.term) == (30, 2)


async def test_an_update_that_the_scheduler_does_not_accept_is_not_pushed(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        rounds.known = ContributionKnown(accepted=False, reason="slice 3 was assigned to another worker")
        with pytest.raises(BridgeError, match="round 1: slice 3 was assigned to another worker") as refused:
            await rounds.send()
        assert (refused.value.status, refused.value.kind) == (409, "update-refused")
        assert rounds.got(PushHeader) == []


@pytest.mark.parametrize(
    ("term", "stated", "answer"),
    [(2, {}, (409, "update-refused")), (None, {"contribution": None}, (502, "peer-failed"))],
    ids=["costs its executor the round", "without terms is a failure of the peer"],
)
async def test_an_update_that_the_parameter_server_refuses(
    in_rounds: InRounds, term: int | None, stated: dict[str, Any], answer: tuple[int, str]
) -> None:
    async with in_rounds(term=term) as rounds:
        rounds.refused_push = "tensor 'a' has NaN"
        with pytest.raises(BridgeError, match="tensor 'a' has NaN") as refused:
            await rounds.send(**stated)
        assert (refused.value.status, refused.value.kind) == answer


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"round": 2}, "contribution.round: 2 is not 1"),
        ({"update": f"blake3:{9:064x}"}, "contribution.update: blake3:0"),
        ({"optimizer": "lost"}, "contribution.optimizer: 'lost'"),
        ({"ranges": (*RANGES, SampleRange(epoch=0, slice=4, first=5, end=5))}, r"contribution.ranges\[2\]: first 5 "),
        ({"ranges": RANGES[:1] * (MAX_RANGES + 1)}, f"contribution.ranges: {MAX_RANGES + 1} are more than"),
    ],
)
async def test_a_contribution_that_does_not_describe_the_update_is_refused(
    in_rounds: InRounds, changes: dict[str, Any], named: str
) -> None:
    async with in_rounds() as rounds:
        with pytest.raises(BridgeError, match=named) as refused:
            await rounds.send(**changes)
        assert refused.value.status == 400
        assert rounds.history == []


async def test_a_file_that_is_no_update_has_no_contribution(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        (rounds.work_dir / "u").write_bytes(b"x")
        _, digest = await transfer.describe(b"x")
        stated = Contribution(
            round=1, weights=WEIGHTS, ranges=(), batches=0, batch_size=1, seed=0, optimizer="reset", update=digest
        )
        with pytest.raises(BridgeError, match="contribution: only a file for the peers of `updates`"):
            await rounds.backend.send(Transfer(all_of(rounds.scheduler.peer_id), "u", round=1, contribution=stated))


async def test_jobs_without_terms_have_no_commits(in_rounds: InRounds) -> None:
    async with in_rounds(term=None) as rounds:
        await rounds.send()
        [header] = rounds.history
        assert isinstance(header, PushHeader)
        assert header.term is header.contribution is None
        await rounds.push()
        claimed = await rounds.receive()
        assert (claimed.round, claimed.weights) == (1, None)


HOSTILE_FIELDS = (
    '"seed": -1',
    '"seed": NaN',
    '"seed": 1e400',
    f'"seed": {2**64}',
    f'"seed": {"9" * 10_000}',
    '"batches": 1.5',
    f'"batches": {2**32}',
    f'"weights": "blake3:{"0" * 100_000}"',
    f'"ranges": {"[" * 100_000}',
    '"ranges": [{"epoch": 0, "slice": 0, "first": 0, "end": Infinity}]',
    '"ranges": [{"epoch": 4294967296, "slice": 0, "first": 0, "end": 1}]',
    '"optimizer": null',
)
"""Fields of a contribution that stand after, and thus replace, those that are right."""


async def test_the_bridge_takes_contributions_over_http(in_rounds: InRounds, short: Path) -> None:
    async with in_rounds() as rounds:
        content = b"over http"
        (rounds.work_dir / "u").write_bytes(content)
        _, digest = await transfer.describe(content)
        stated = {
            "round": 1,
            "weights": WEIGHTS,
            "ranges": [{"epoch": 0, "slice": 3, "first": 0, "end": 16}],
            "batches": 1,
            "batch_size": 16,
            "seed": 5,
            "optimizer": "reset",
            "update": digest,
        }
        body = {"resource": to_plain(Reference, rounds.config.updates), "path": "u", "round": 1}
        async with open_client(rounds.backend, short / "b.sock") as client:
            answer = await client.post("/resources/send", json=body | {"contribution": stated})
            assert (answer.status_code, answer.json()["checksum"]) == (200, digest)
            rounds.known = ContributionKnown(accepted=False, reason="no")
            answer = await client.post("/resources/send", json=body | {"contribution": stated})
            assert (answer.status_code, answer.json()["error"]) == (409, "update-refused")
            for wrong in HOSTILE_FIELDS:
                text = json.dumps(body | {"contribution": stated | {"last": 0}}).replace('"last": 0', wrong)
                answer = await client.post("/resources/send", content=text)
                assert (answer.status_code, answer.json()["error"]) == (400, "bad-request"), wrong
        [header] = rounds.got(PushHeader)
        assert header.contribution.optimizer == "reset"


# ----------------------------------------------------------------------------------------------------- outer updates


async def test_an_outer_update_is_handed_over_when_it_is_committed(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        digest = await rounds.push()
        await rounds.until_asked(2)  # not committed yet: asked again
        assert rounds.waiting_files() == 1
        got: list[ReceivedFile] = []

        async def wait() -> None:
            got.append(await rounds.receive())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await rounds.until_asked(4)
            assert got == []
            rounds.commit(digest, CommitStatus(committed=True, weights=NEW_WEIGHTS))
        [claimed] = got
        assert (claimed.round, claimed.kind, claimed.weights) == (1, OUTER_UPDATE, NEW_WEIGHTS)
        assert (rounds.work_dir / claimed.path).read_bytes() == b"outer"
        assert rounds.waiting_files() == 0
        question = rounds.got(AwaitCommit)[0]
        assert (question.attempt, question.round, question.update) == (ATTEMPT, 1, digest)


async def test_an_outer_update_that_is_never_committed_is_deleted(
    in_rounds: InRounds, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_rounds() as rounds:
        wrong, right = await rounds.push(b"wrong"), await rounds.push(b"right")
        await rounds.until_asked(2)
        rounds.commit(wrong, CommitStatus(committed=False, reason="round 1 has another outer update"))
        rounds.commit(right, CommitStatus(committed=True))
        claimed = await rounds.receive()
        assert (rounds.work_dir / claimed.path).read_bytes() == b"right"
        while rounds.waiting_files():
            await anyio.lowlevel.checkpoint()
        assert recorded.total("hypha.worker.outer_updates.discarded") == 1
        assert "is not committed: round 1 has another outer update" in caplog.text
        rounds.commit(wrong, CommitStatus(committed=True))  # a later parameter server computes the same
        await rounds.push(b"wrong")
        await rounds.receive()


async def test_other_deliveries_do_not_wait_for_a_commit(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        await rounds.push(b"first", 1)
        await rounds.until_asked(1)
        await rounds.push(b"other", kind=OTHER_FILE)
        assert (await rounds.receive()).kind == OTHER_FILE
        second = await rounds.push(b"second", 2)
        rounds.commit(second, CommitStatus(committed=True))
        assert (await rounds.receive()).round == 2
        assert rounds.waiting_files() == 1


async def test_few_outer_updates_wait_for_a_commit(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        for number in range(QUEUE_LIMIT):
            await rounds.push(b"%d" % number, 1)
        with pytest.raises(TransferRefusedError, match=f"{QUEUE_LIMIT} files wait"):
            await rounds.push(b"one more", 1)
        assert rounds.waiting_files() == QUEUE_LIMIT


async def test_an_outer_update_that_is_pushed_again_is_handed_over_once(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        digest = await rounds.push()
        await rounds.push(name="the same under another name")
        assert rounds.waiting_files() == 1
        rounds.commit(digest, CommitStatus(committed=True))
        await rounds.receive()
        asked = len(rounds.got(AwaitCommit))
        await rounds.push()
        other = await rounds.push(b"next", 2)
        rounds.commit(other, CommitStatus(committed=True))
        assert (await rounds.receive()).round == 2
        assert {question.update for question in rounds.got(AwaitCommit)[asked:]} == {other}


async def test_outer_updates_of_an_older_term_are_refused(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        with pytest.raises(TransferRefusedError, match="term: 1 is over, the parameter server of term 2"):
            await rounds.push(b"old", term=1)
        await rounds.push(b"new", 1, term=4)
        with pytest.raises(TransferRefusedError, match="term: 3 is over, the parameter server of term 4"):
            await rounds.push(b"second", 2, term=3)
        assert rounds.waiting_files() == 1


# --------------------------------------------------------------------------------------------- weights and positions


async def assign_slice(rounds: Rounds, **positions: int | None) -> None:
    """Let the scheduler assign the same slice again and again, and serve it."""
    _, digest = await transfer.describe(b"slice")

    async def assign(_peer: PeerId, _request: DataRequest) -> SliceAssigned:
        return SliceAssigned(rounds.scheduler.peer_id, index=3, epoch=1, digest=digest, **positions)

    rpc.serve(rounds.scheduler, DATA, assign)


async def test_the_newest_weights_are_fetched_each_time(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        reference = rounds.config.weights
        assert reference is not None
        for content in (b"weights of round 1", b"weights of round 2"):
            rounds.served[0] = content
            [file] = await rounds.backend.fetch(Transfer(reference, "weights"))
            assert file.path == "weights/weights.safetensors"
            assert (rounds.work_dir / file.path).read_bytes() == content


def test_weights_may_come_from_a_peer_that_no_other_reference_names() -> None:
    scheduler, server, other = (PeerId.from_public_key(bytes([number]) * 32) for number in range(3))
    address = SliceAddress(dataset="w", index=0)
    weights = PeersReference(peers=(other,), strategy=One(), resource=address)
    config = training(scheduler, server, weights=weights)
    spec = TaskSpec(executor="train/x", training=config)
    assert other in named_peers(spec)
    shown = without_secrets(config)
    assert shown.weights == weights
    assert with_secrets(spec, shown.model.artifact) == config.model.artifact


@pytest.mark.parametrize(
    ("first", "end", "metadata"),
    [(None, None, {}), (16, 48, {"first": "16", "end": "48"}), (None, 16, {"end": "16"}), (16, None, {"first": "16"})],
)
async def test_the_metadata_of_a_slice_has_its_positions(
    in_rounds: InRounds, first: int | None, end: int | None, metadata: dict[str, str]
) -> None:
    async with in_rounds() as rounds:
        await assign_slice(rounds, first=first, end=end)
        [file] = await rounds.backend.fetch(Transfer(rounds.config.data, "slices"))
        assert {name: file.metadata[name] for name in ("slice", "epoch")} == {"slice": "3", "epoch": "1"}
        assert {name: text for name, text in file.metadata.items() if name in ("first", "end")} == metadata


async def test_slices_that_are_fetched_at_a_time_are_numbered_in_the_order_of_their_assignment(
    in_rounds: InRounds,
) -> None:
    async with in_rounds() as rounds:
        _, digest = await transfer.describe(b"slice")
        asking = most = count = 0

        async def assign(_peer: PeerId, _request: DataRequest) -> SliceAssigned:
            nonlocal asking, most, count
            asking, count = asking + 1, count + 1
            most, index = max(most, asking), 10 + count
            await anyio.sleep(0.01 * (5 - count))  # the first answers take longest
            asking -= 1
            return SliceAssigned(data_provider=rounds.scheduler.peer_id, index=index, epoch=0, digest=digest)

        rpc.serve(rounds.scheduler, DATA, assign)
        found: dict[str, str] = {}

        async def fetch(number: int) -> None:
            [file] = await rounds.backend.fetch(Transfer(rounds.config.data, f"slices/{number}"))
            found[file.metadata[ASSIGNED]] = file.metadata["slice"]

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(fetch, number)
        assert found == {"0": "11", "1": "12", "2": "13", "3": "14"}
        assert most == 1


async def test_a_slice_without_positions_to_use_is_an_error(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        await assign_slice(rounds, first=9, end=9)
        with pytest.raises(BridgeError, match="first 9 is not before end 9"):
            await rounds.backend.fetch(Transfer(rounds.config.data, "slices"))


# ---------------------------------------------------------------------------------------------------------------- join


OUTER = SliceAddress(dataset=f"{JOB}/weights", index=7)


async def joined(rounds: Rounds, number: int = 1) -> None:
    rounds.joins.append(RoundToJoin(round=number))
    await rounds.backend.training("").join_round()


async def test_an_executor_is_told_its_round_when_the_scheduler_has_decided(in_joined: InRounds, short: Path) -> None:
    async with in_joined() as rounds:
        rounds.joins += [RoundToJoin(), RoundToJoin(), RoundToJoin(round=4, weights=NEW_WEIGHTS)]
        async with open_client(rounds.backend, short / "b.sock") as client:
            answer = await client.post("/rounds/join")
            assert (answer.status_code, answer.json()) == (200, {"round": 4, "weights": NEW_WEIGHTS})
            rounds.joins.append(RoundToJoin(reason="it was replaced"))
            answer = await client.post("/rounds/join", json={})
            assert (answer.status_code, answer.json()["error"]) == (410, "never-joins")
            assert "it was replaced" in answer.json()["detail"]
        assert len(rounds.got(JoinRound)) == 4


async def test_a_join_waits_for_a_scheduler_that_is_away(in_joined: InRounds) -> None:
    async with in_joined() as rounds:
        rounds.network.partition(rounds.worker.peer_id, rounds.scheduler.peer_id)
        got: list[RoundJoined] = []

        async def join() -> None:
            got.append(await rounds.backend.training("").join_round())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(join)
            await anyio.wait_all_tasks_blocked()
            rounds.joins.append(RoundToJoin(round=2))
            rounds.network.heal(rounds.worker.peer_id, rounds.scheduler.peer_id)
        assert got == [RoundJoined(round=2)]


async def test_jobs_without_rounds_to_join_say_so(in_joined: InRounds) -> None:
    async with in_joined(join=None) as rounds:
        with pytest.raises(BridgeError) as refused:
            await rounds.backend.training("").join_round()
        assert refused.value.status == 400


async def test_outer_updates_before_the_joined_round_do_not_wait_for_the_executor(in_joined: InRounds) -> None:
    """An executor that prepares for long must not find, nor store, an outer update of each round meanwhile."""
    async with in_joined() as rounds:
        with pytest.raises(TransferRefusedError, match="does not take part in round 3"):
            await rounds.push(b"three", 3)
        await joined(rounds, 4)
        with pytest.raises(TransferRefusedError, match="does not take part in round 3"):
            await rounds.push(b"three", 3)
        rounds.commit(await rounds.push(b"four", 4), CommitStatus(committed=True))
        await anyio.wait_all_tasks_blocked()  # it is committed, and waits for the executor
        await joined(rounds, 6)
        assert rounds.waiting_files() == 0
        rounds.commit(await rounds.push(b"six", 6), CommitStatus(committed=True))
        assert (await rounds.receive()).round == 6


async def test_an_outer_update_that_waits_for_its_commit_is_dropped_when_the_executor_begins_anew(
    in_joined: InRounds,
) -> None:
    async with in_joined() as rounds:
        await joined(rounds)
        digest = await rounds.push(b"one", 1)
        await rounds.until_asked(1)
        await joined(rounds, 2)
        rounds.commit(digest, CommitStatus(committed=True))
        rounds.commit(await rounds.push(b"two", 2), CommitStatus(committed=True))
        assert (await rounds.receive()).round == 2
        assert rounds.waiting_files() == 0


async def test_an_executor_that_does_not_ask_takes_outer_updates_from_its_first_slice_on(in_joined: InRounds) -> None:
    async with in_joined(first_round=3) as rounds:
        await assign_slice(rounds)
        with pytest.raises(TransferRefusedError, match="does not take part in round 3"):
            await rounds.push(b"three", 3)
        await rounds.backend.fetch(Transfer(rounds.config.data, "slices"))
        rounds.commit(await rounds.push(b"three", 3), CommitStatus(committed=True))
        assert (await rounds.receive()).round == 3


# --------------------------------------------------------------------------------------------------------- closed round


async def test_an_update_of_a_round_that_goes_on_without_it_is_answered_with_round_closed(in_joined: InRounds) -> None:
    async with in_joined() as rounds:
        await joined(rounds)
        rounds.known = ContributionKnown(accepted=False, reason="the round is closed", rejoin=True)
        with pytest.raises(BridgeError, match="the round is closed; ask /rounds/join") as closed:
            await rounds.send()
        assert (closed.value.status, closed.value.kind) == (409, ROUND_CLOSED)
        assert rounds.got(PushHeader) == []
        with pytest.raises(TransferRefusedError, match="does not take part in round 1"):
            await rounds.push(b"one", 1)


async def test_an_executor_that_never_joined_is_told_that_its_update_is_refused(in_joined: InRounds) -> None:
    """It knows this answer only, and goes on with the outer updates of the others."""
    async with in_joined() as rounds:
        rounds.known = ContributionKnown(accepted=False, reason="the round is closed", rejoin=True)
        with pytest.raises(BridgeError) as refused:
            await rounds.send()
        assert (refused.value.status, refused.value.kind) == (409, "update-refused")


# ------------------------------------------------------------------------------------------- another parameter server


@asynccontextmanager
async def in_two_servers(in_joined: InRounds) -> AsyncIterator[tuple[Rounds, MemoryEndpoint]]:
    """Open a second peer that may become the parameter server; the executor has joined round 1."""
    async with in_joined() as rounds, rounds.network.endpoint("second-server") as second:
        transfer.serve_pushes(second, rounds.accept)
        await joined(rounds)
        yield rounds, second


async def test_later_updates_go_to_the_new_parameter_server_and_outer_updates_come_from_it(in_joined: InRounds) -> None:
    async with in_two_servers(in_joined) as (rounds, second):
        known = rounds.change_server(second, 3, 1)
        assert (known.accepted, known.sends) == (True, None)
        sent = await rounds.send()
        assert list(sent.sent) == [str(second.peer_id)]
        assert rounds.got(PushHeader)[-1].term == 3
        with pytest.raises(TransferRefusedError, match="not one of the peers that send results"):
            await rounds.push(b"old", 1, term=2)
        with pytest.raises(TransferRefusedError, match="term: 2 is over"):
            await rounds.push(b"old", 1, term=2, sender=second)
        rounds.commit(await rounds.push(b"new", 1, term=3, sender=second), CommitStatus(committed=True))
        wanted = Transfer(rounds.config.results, "received")
        received = await rounds.backend.receive(wanted)  # the executor names the server that it knows
        assert received is not None
        assert received.from_peer == second.peer_id


async def test_a_delivered_update_of_the_open_round_is_sent_to_the_new_parameter_server(in_joined: InRounds) -> None:
    async with in_two_servers(in_joined) as (rounds, second):
        sent = await rounds.send(b"first")
        (rounds.work_dir / "u").unlink()  # it stays open
        known = rounds.change_server(second, 3, 1)
        assert (known.accepted, known.sends) == (True, sent.checksum)
        await rounds.until_got(PushHeader, 2)
        first, again = rounds.got(PushHeader)
        assert again == msgspec.structs.replace(first, term=3)
        assert rounds.received[sent.checksum] == b"first"
        assert len(rounds.got(StateContribution)) == 1
        assert rounds.change_server(second, 3, 1) == known  # repeated: nothing is sent again
        rounds.change_server(rounds.server, 4, 2)  # the update is not of round 2
        sent = await rounds.send(b"second", 2)
        assert [(header.round, header.term) for header in rounds.got(PushHeader)] == [(1, 2), (1, 3), (2, 4)]


@pytest.mark.parametrize("away", ["unreachable", NO_JOB, NO_ROOM, "term: 2 is not 3, the term"])
async def test_an_update_waits_while_the_parameter_server_is_away_and_goes_to_the_new_one(
    in_joined: InRounds, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hypha_worker.bridge.update_sender")
    async with in_two_servers(in_joined) as (rounds, second):
        if away == "unreachable":
            rounds.network.partition(rounds.worker.peer_id, rounds.server.peer_id)
        else:
            rounds.refused_push = f"{away} of job {JOB}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rounds.send)
            while "is sent again in" not in caplog.text:
                await anyio.sleep(0.01)
            rounds.refused_push = None
            known = rounds.change_server(second, 3, 1)
            assert known.sends == rounds.got(StateContribution)[0].update
        [header] = [header for header in rounds.got(PushHeader) if header.term == 3]
        assert header.digest == known.sends


async def test_an_update_that_cannot_be_pushed_is_given_up_when_the_round_goes_on_without_it(
    in_joined: InRounds,
) -> None:
    async with in_two_servers(in_joined) as (rounds, _second):
        rounds.network.partition(rounds.worker.peer_id, rounds.server.peer_id)
        async with anyio.create_task_group() as tasks:

            async def close_round() -> None:
                await rounds.until_got(StateContribution, 1)
                rounds.known = ContributionKnown(accepted=False, reason="it came late", rejoin=True)

            tasks.start_soon(close_round)
            with pytest.raises(BridgeError, match="it came late") as closed:
                await rounds.send()
        assert closed.value.kind == ROUND_CLOSED


async def test_an_update_is_pushed_to_the_same_parameter_server_when_it_is_back(in_joined: InRounds) -> None:
    async with in_two_servers(in_joined) as (rounds, _second):
        rounds.network.partition(rounds.worker.peer_id, rounds.server.peer_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rounds.send)
            await rounds.until_got(StateContribution, 2)  # it is stated again before each repetition
            rounds.network.heal(rounds.worker.peer_id, rounds.server.peer_id)
        assert [header.term for header in rounds.got(PushHeader)] == [2]


async def test_an_outer_update_that_was_not_delivered_is_pulled_from_the_scheduler(in_joined: InRounds) -> None:
    async with in_two_servers(in_joined) as (rounds, second):
        await rounds.send()
        rounds.served[OUTER.index] = b"outer of 1"
        _, digest = await transfer.describe(b"outer of 1")
        rounds.commits[digest] = CommitStatus(committed=True, weights=NEW_WEIGHTS)
        assert rounds.change_server(second, 3, 2, update=digest, outer_update=OUTER).accepted
        claimed = await rounds.receive()
        assert (claimed.round, claimed.kind, claimed.weights) == (1, "outer-update", NEW_WEIGHTS)
        assert (rounds.work_dir / claimed.path).read_bytes() == b"outer of 1"
        assert rounds.waiting_files() == 0


async def test_an_outer_update_that_has_arrived_or_is_not_wanted_is_not_pulled(in_joined: InRounds) -> None:
    async with in_two_servers(in_joined) as (rounds, second):
        digest = await rounds.push(b"outer of 1", 1)
        rounds.commit(digest, CommitStatus(committed=True))
        await rounds.receive()
        rounds.change_server(second, 3, 2, update=digest, outer_update=OUTER)
        await joined(rounds, 5)
        other = f"blake3:{5:064x}"
        rounds.change_server(rounds.server, 4, 5, update=other, outer_update=OUTER)
        rounds.commit(await rounds.push(b"outer of 5", 5, term=4), CommitStatus(committed=True))
        assert (await rounds.receive()).round == 5
        assert rounds.pulled == []
        assert other not in {question.update for question in rounds.got(AwaitCommit)}


async def test_changes_of_older_terms_are_refused(in_joined: InRounds) -> None:
    async with in_two_servers(in_joined) as (rounds, second):
        assert rounds.change_server(second, 3, 1).accepted
        for term, reason in (
            (2, "term: 2 is over, the parameter server of term 3"),
            (3, "is the parameter server of term 3"),
        ):
            answer = rounds.change_server(rounds.server, term, 1)
            assert not answer.accepted
            assert reason in answer.reason
        await rounds.send()
        assert rounds.got(PushHeader)[-1].term == 3


# --------------------------------------------------------------------------------------------------------- whole worker


async def test_a_command_changes_the_parameter_server_of_a_running_task(in_lab: Any) -> None:
    async with in_lab() as lab:
        lease = await lab.start("time.sleep(60)", lab.train_spec(term=1))
        tasks, task = lab.scheduler.tasks, lab.scheduler.task_on(lease)
        for term, accepted, reason in ((2, True, ""), (1, False, "term: 1 is over")):
            command = ChangeServer(term=term, server=lab.data.peer_id, round=1)
            answer = await tasks.command(lease, task, command)
            assert (answer.accepted, answer.sends) == (accepted, None)
            assert reason in answer.reason
        answer = await tasks.command(lease, "other", command)
        assert not answer.accepted
        assert "does not run on this lease" in answer.reason


JOINS = """
bridge = Bridge("bridge")
bridge.request("POST", "/rounds/join", "{}")
answer = bridge.getresponse()
assert json.loads(answer.read()) == {"round": 5}, answer.status
print("joined", flush=True)
sys.exit(CODE)
"""


async def test_a_job_is_dispatched_again_on_the_lease_of_its_dead_executor(in_lab: Any) -> None:
    async with in_lab() as lab:

        async def join(_peer: PeerId, _question: JoinRound) -> RoundToJoin:
            return RoundToJoin(round=5)

        rpc.serve(lab.scheduler.endpoint, JOIN_ROUND, join)
        spec = lab.train_spec(term=1, join=True)
        lab.write_script(JOINS.replace("CODE", "75"))
        lease = await lab.scheduler.hire()
        for attempt in (1, 2, 3):
            assert await lab.scheduler.dispatch(lease, spec, "train", attempt) == "started"
            end = await lab.scheduler.ended()
            assert (end.outcome, end.exit_code, end.attempt) == ("failed", 75, attempt)
            assert end.last_lines == ("joined",)
            assert lab.left_behind() == []
