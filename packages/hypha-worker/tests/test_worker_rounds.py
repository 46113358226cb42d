"""Rounds as a training worker sees them: contributions before updates, commits before outer updates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from support.training_bridge import ATTEMPT, NEW_WEIGHTS, RANGES, WEIGHTS, make_config, open_rounds

from hypha_net import retries, rpc, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.retries import RetryPolicy
from hypha_proto.bridge_api import ASSIGNED, Transfer
from hypha_proto.codec import to_plain
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
from hypha_proto.job_spec import (
    All,
    One,
    PeersReference,
    Reference,
    SliceAddress,
)
from hypha_proto.tasks import TaskSpec
from hypha_proto.transfer import OTHER_FILE, OUTER_UPDATE, PushHeader
from hypha_worker.bridge.receive_queue import QUEUE_LIMIT
from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.uncommitted_updates import PendingFile
from hypha_worker.bridge.unix_socket import SocketPlace
from hypha_worker.errors import BridgeError
from hypha_worker.tasks.spec_references import named_peers, with_secrets, without_secrets


@pytest.fixture(autouse=True)
def quick_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "ROUND", RetryPolicy("test", (0.01,), True))


@pytest.fixture
def in_rounds(tmp_path: Path) -> Callable[..., Any]:
    return partial(open_rounds, tmp_path)


InRounds = Callable[..., Any]


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


async def test_an_update_that_the_parameter_server_refuses_costs_its_executor_the_round(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        rounds.refused_push = "tensor 'a' has NaN"
        with pytest.raises(BridgeError, match="tensor 'a' has NaN") as refused:
            await rounds.send()
        assert (refused.value.status, refused.value.kind) == (409, "update-refused")


async def test_a_refused_update_of_a_job_without_terms_is_a_failure_of_the_peer(in_rounds: InRounds) -> None:
    async with in_rounds(term=None) as rounds:
        rounds.refused_push = "tensor 'a' has NaN"
        with pytest.raises(BridgeError, match="tensor 'a' has NaN") as refused:
            await rounds.send(contribution=None)
        assert (refused.value.status, refused.value.kind) == (502, "peer-failed")


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
        reference = PeersReference(peers=(rounds.scheduler.peer_id,), strategy=All())
        (rounds.work_dir / "u").write_bytes(b"x")
        _, digest = await transfer.describe(b"x")
        stated = Contribution(
            round=1, weights=WEIGHTS, ranges=(), batches=0, batch_size=1, seed=0, optimizer="reset", update=digest
        )
        with pytest.raises(BridgeError, match="contribution: only a file for the peers of `updates`"):
            await rounds.backend.send(Transfer(reference, "u", round=1, contribution=stated))


async def test_jobs_without_terms_have_no_commits(in_rounds: InRounds) -> None:
    async with in_rounds(term=None) as rounds:
        await rounds.send()
        [header] = rounds.history
        assert isinstance(header, PushHeader)
        assert header.term is header.contribution is None
        await rounds.push()
        claimed = rounds.claim(await rounds.next_file())
        assert (claimed.round, claimed.weights) == (1, None)


async def test_a_contribution_waits_for_a_scheduler_that_is_away(
    in_rounds: InRounds, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hypha_worker.bridge.round_commits")
    async with in_rounds() as rounds:
        rounds.network.partition(rounds.worker.peer_id, rounds.scheduler.peer_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rounds.send)
            while "StateContribution of job" not in caplog.text:
                await anyio.lowlevel.checkpoint()
            assert rounds.history == []
            rounds.network.heal(rounds.worker.peer_id, rounds.scheduler.peer_id)
        assert [type(message) for message in rounds.history] == [StateContribution, PushHeader]


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


async def test_the_bridge_takes_contributions_over_http(in_rounds: InRounds) -> None:
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
        with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as folder:
            path = Path(folder) / "b.sock"
            async with (
                open_bridge(rounds.backend, SocketPlace(path), lambda _pid: True),
                httpx.AsyncClient(
                    transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://bridge", timeout=20
                ) as client,
            ):
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
        got: list[PendingFile] = []

        async def wait() -> None:
            got.append(await rounds.next_file())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await rounds.until_asked(4)
            assert got == []
            rounds.commit(digest, CommitStatus(committed=True, weights=NEW_WEIGHTS))
        claimed = rounds.claim(got[0])
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
        claimed = rounds.claim(await rounds.next_file())
        assert (rounds.work_dir / claimed.path).read_bytes() == b"right"
        while rounds.waiting_files():
            await anyio.lowlevel.checkpoint()
        assert recorded.total("hypha.worker.outer_updates.discarded") == 1
        assert "is not committed: round 1 has another outer update" in caplog.text
        rounds.commit(wrong, CommitStatus(committed=True))  # a later parameter server computes the same
        await rounds.push(b"wrong")
        rounds.claim(await rounds.next_file())


async def test_other_deliveries_do_not_wait_for_a_commit(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        await rounds.push(b"first", 1)
        await rounds.until_asked(1)
        await rounds.push(b"other", kind=OTHER_FILE)
        assert rounds.claim(await rounds.next_file()).kind == OTHER_FILE
        second = await rounds.push(b"second", 2)
        rounds.commit(second, CommitStatus(committed=True))
        assert rounds.claim(await rounds.next_file()).round == 2
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
        rounds.claim(await rounds.next_file())
        asked = len(rounds.got(AwaitCommit))
        await rounds.push()
        other = await rounds.push(b"next", 2)
        rounds.commit(other, CommitStatus(committed=True))
        assert rounds.claim(await rounds.next_file()).round == 2
        assert {question.update for question in rounds.got(AwaitCommit)[asked:]} == {other}


async def test_outer_updates_of_an_older_term_are_refused(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        with pytest.raises(TransferRefusedError, match="term: 1 is over, the parameter server of term 2"):
            await rounds.push(b"old", term=1)
        await rounds.push(b"new", 1, term=4)
        with pytest.raises(TransferRefusedError, match="term: 3 is over, the parameter server of term 4"):
            await rounds.push(b"second", 2, term=3)
        assert rounds.waiting_files() == 1


async def test_a_commit_is_asked_for_again_when_the_scheduler_is_back(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        rounds.network.partition(rounds.worker.peer_id, rounds.scheduler.peer_id)
        digest = await rounds.push()
        rounds.commit(digest, CommitStatus(committed=True, weights=NEW_WEIGHTS))
        assert rounds.waiting_files() == 1
        rounds.network.heal(rounds.worker.peer_id, rounds.scheduler.peer_id)
        assert rounds.claim(await rounds.next_file()).weights == NEW_WEIGHTS


# --------------------------------------------------------------------------------------------- weights and positions


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
    class Peer:
        def __init__(self, number: int) -> None:
            self.peer_id = PeerId.from_public_key(bytes([number]) * 32)

    scheduler, server, other = (Peer(number) for number in range(3))
    address = SliceAddress(dataset="w", index=0)
    weights = PeersReference(peers=(other.peer_id,), strategy=One(), resource=address)
    config = make_config(scheduler, server, weights=weights)  # type: ignore[arg-type]
    spec = TaskSpec(executor="train/x", training=config)
    assert other.peer_id in named_peers(spec)
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
        _, digest = await transfer.describe(b"slice")

        async def assign(_peer: PeerId, _request: DataRequest) -> SliceAssigned:
            peer = rounds.scheduler.peer_id
            return SliceAssigned(data_provider=peer, index=3, epoch=1, digest=digest, first=first, end=end)

        rpc.serve(rounds.scheduler, DATA, assign)
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

        async def assign(_peer: PeerId, _request: DataRequest) -> SliceAssigned:
            return SliceAssigned(data_provider=rounds.scheduler.peer_id, index=3, first=9, end=9)

        rpc.serve(rounds.scheduler, DATA, assign)
        with pytest.raises(BridgeError, match="first 9 is not before end 9"):
            await rounds.backend.fetch(Transfer(rounds.config.data, "slices"))


# ------------------------------------------------------------------------------------------------------ whole worker
