"""Members that come and go, as a training worker sees them: joining, closed rounds, another parameter server."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from support.training_bridge import JOB, NEW_WEIGHTS, Rounds, open_rounds

from hypha_net import retries, rpc, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint
from hypha_proto.bridge_api import ROUND_CLOSED, RoundJoined, Transfer
from hypha_proto.commands import ChangeServer
from hypha_proto.contributions import AwaitCommit, CommitStatus, ContributionKnown, StateContribution
from hypha_proto.datasets import DATA, DataRequest, SliceAssigned
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JOIN_ROUND, JoinRound, RoundToJoin
from hypha_proto.job_spec import SliceAddress
from hypha_proto.transfer import NO_JOB, NO_ROOM, PushHeader
from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.unix_socket import SocketPlace
from hypha_worker.errors import BridgeError

OUTER = SliceAddress(dataset=f"{JOB}/weights", index=7)
InRounds = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch, quick_retries: None) -> None:
    for name in ("ROUND", "UPDATE", "MISSED_UPDATE"):
        monkeypatch.setattr(retries, name, RetryPolicy("test", (0.01,), True))


@pytest.fixture
def in_rounds(tmp_path: Path) -> InRounds:
    """Return a function that opens a job of term 2 whose executor joins."""
    return lambda **changes: open_rounds(tmp_path, **({"join": True} | changes))


@asynccontextmanager
async def open_client(rounds: Rounds) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the bridge at a socket, whose path must be short, and connect a client to it."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as folder:
        place = SocketPlace(Path(folder) / "bridge.sock")
        transport = httpx.AsyncHTTPTransport(uds=str(place.path))
        async with (
            open_bridge(rounds.backend, place, lambda _pid: True),
            httpx.AsyncClient(transport=transport, base_url="http://bridge", timeout=10) as client,
        ):
            yield client


async def joined(rounds: Rounds, number: int = 1) -> None:
    rounds.joins.append(RoundToJoin(round=number))
    await rounds.backend.training("").join_round()


# ---------------------------------------------------------------------------------------------------------------- join


async def test_an_executor_is_told_its_round_when_the_scheduler_has_decided(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        rounds.joins += [RoundToJoin(), RoundToJoin(), RoundToJoin(round=4, weights=NEW_WEIGHTS)]
        async with open_client(rounds) as client:
            answer = await client.post("/rounds/join")
            assert (answer.status_code, answer.json()) == (200, {"round": 4, "weights": NEW_WEIGHTS})
            rounds.joins.append(RoundToJoin(reason="it was replaced"))
            answer = await client.post("/rounds/join", json={})
            assert (answer.status_code, answer.json()["error"]) == (410, "never-joins")
            assert "it was replaced" in answer.json()["detail"]
        assert len(rounds.got(JoinRound)) == 4


async def test_a_join_waits_for_a_scheduler_that_is_away(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
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


async def test_jobs_without_rounds_to_join_say_so(in_rounds: InRounds) -> None:
    async with in_rounds(join=None) as rounds:
        with pytest.raises(BridgeError) as refused:
            await rounds.backend.training("").join_round()
        assert refused.value.status == 400


async def test_outer_updates_before_the_joined_round_do_not_wait_for_the_executor(in_rounds: InRounds) -> None:
    """An executor that prepares for long must not find, nor store, an outer update of each round meanwhile."""
    async with in_rounds() as rounds:
        with pytest.raises(TransferRefusedError, match="does not take part in round 3"):
            await rounds.push(b"three", 3)
        await joined(rounds, 4)
        with pytest.raises(TransferRefusedError, match="does not take part in round 3"):
            await rounds.push(b"three", 3)
        rounds.commit(await rounds.push(b"four", 4), CommitStatus(committed=True))
        assert (await rounds.next_file()).header.round == 4
        await joined(rounds, 6)
        assert rounds.waiting_files() == 0
        rounds.commit(await rounds.push(b"six", 6), CommitStatus(committed=True))
        assert rounds.claim(await rounds.next_file()).round == 6


async def test_an_outer_update_that_waits_for_its_commit_is_dropped_when_the_executor_begins_anew(
    in_rounds: InRounds,
) -> None:
    async with in_rounds() as rounds:
        await joined(rounds)
        digest = await rounds.push(b"one", 1)
        await rounds.until_asked(1)
        await joined(rounds, 2)
        rounds.commit(digest, CommitStatus(committed=True))
        rounds.commit(await rounds.push(b"two", 2), CommitStatus(committed=True))
        assert rounds.claim(await rounds.next_file()).round == 2
        assert rounds.waiting_files() == 0


async def test_an_executor_that_does_not_ask_takes_outer_updates_from_its_first_slice_on(in_rounds: InRounds) -> None:
    async with in_rounds(first_round=3) as rounds:
        _, digest = await transfer.describe(b"slice")

        async def assign(_peer: PeerId, _request: DataRequest) -> SliceAssigned:
            return SliceAssigned(data_provider=rounds.scheduler.peer_id, index=3, epoch=1, digest=digest)

        rpc.serve(rounds.scheduler, DATA, assign)
        with pytest.raises(TransferRefusedError, match="does not take part in round 3"):
            await rounds.push(b"three", 3)
        await rounds.backend.fetch(Transfer(rounds.config.data, "slices"))
        rounds.commit(await rounds.push(b"three", 3), CommitStatus(committed=True))
        assert rounds.claim(await rounds.next_file()).round == 3


# --------------------------------------------------------------------------------------------------------- closed round


async def test_an_update_of_a_round_that_goes_on_without_it_is_answered_with_round_closed(in_rounds: InRounds) -> None:
    async with in_rounds() as rounds:
        await joined(rounds)
        rounds.known = ContributionKnown(accepted=False, reason="the round is closed", rejoin=True)
        with pytest.raises(BridgeError, match="the round is closed; ask /rounds/join") as closed:
            await rounds.send()
        assert (closed.value.status, closed.value.kind) == (409, ROUND_CLOSED)
        assert rounds.got(PushHeader) == []
        with pytest.raises(TransferRefusedError, match="does not take part in round 1"):
            await rounds.push(b"one", 1)


async def test_an_executor_that_never_joined_is_told_that_its_update_is_refused(in_rounds: InRounds) -> None:
    """It knows this answer only, and goes on with the outer updates of the others."""
    async with in_rounds() as rounds:
        rounds.known = ContributionKnown(accepted=False, reason="the round is closed", rejoin=True)
        with pytest.raises(BridgeError) as refused:
            await rounds.send()
        assert (refused.value.status, refused.value.kind) == (409, "update-refused")


# ------------------------------------------------------------------------------------------- another parameter server


@asynccontextmanager
async def in_two_servers(in_rounds: InRounds) -> AsyncIterator[tuple[Rounds, MemoryEndpoint]]:
    """Open a second peer that may become the parameter server; the executor has joined round 1."""
    async with in_rounds() as rounds, rounds.network.endpoint("second-server") as second:
        transfer.serve_pushes(second, rounds.accept)
        await joined(rounds)
        yield rounds, second


async def test_later_updates_go_to_the_new_parameter_server_and_outer_updates_come_from_it(in_rounds: InRounds) -> None:
    async with in_two_servers(in_rounds) as (rounds, second):
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
        pending = await rounds.backend.next_pending_file(wanted)  # the executor names the server that it knows
        assert pending is not None
        assert rounds.claim(pending).from_peer == second.peer_id


async def test_a_delivered_update_of_the_open_round_is_sent_to_the_new_parameter_server(in_rounds: InRounds) -> None:
    async with in_two_servers(in_rounds) as (rounds, second):
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
    in_rounds: InRounds, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hypha_worker.bridge.update_sender")
    async with in_two_servers(in_rounds) as (rounds, second):
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
    in_rounds: InRounds,
) -> None:
    async with in_two_servers(in_rounds) as (rounds, _second):
        rounds.network.partition(rounds.worker.peer_id, rounds.server.peer_id)
        async with anyio.create_task_group() as tasks:

            async def close_round() -> None:
                await rounds.until_got(StateContribution, 1)
                rounds.known = ContributionKnown(accepted=False, reason="it came late", rejoin=True)

            tasks.start_soon(close_round)
            with pytest.raises(BridgeError, match="it came late") as closed:
                await rounds.send()
        assert closed.value.kind == ROUND_CLOSED


async def test_an_update_is_pushed_to_the_same_parameter_server_when_it_is_back(in_rounds: InRounds) -> None:
    async with in_two_servers(in_rounds) as (rounds, _second):
        rounds.network.partition(rounds.worker.peer_id, rounds.server.peer_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rounds.send)
            await rounds.until_got(StateContribution, 2)  # it is stated again before each repetition
            rounds.network.heal(rounds.worker.peer_id, rounds.server.peer_id)
        assert [header.term for header in rounds.got(PushHeader)] == [2]


async def test_an_outer_update_that_was_not_delivered_is_pulled_from_the_scheduler(in_rounds: InRounds) -> None:
    async with in_two_servers(in_rounds) as (rounds, second):
        await rounds.send()
        rounds.served[OUTER.index] = b"outer of 1"
        _, digest = await transfer.describe(b"outer of 1")
        rounds.commits[digest] = CommitStatus(committed=True, weights=NEW_WEIGHTS)
        assert rounds.change_server(second, 3, 2, update=digest, outer_update=OUTER).accepted
        claimed = rounds.claim(await rounds.next_file())
        assert (claimed.round, claimed.kind, claimed.weights) == (1, "outer-update", NEW_WEIGHTS)
        assert (rounds.work_dir / claimed.path).read_bytes() == b"outer of 1"
        assert rounds.waiting_files() == 0


async def test_an_outer_update_that_has_arrived_or_is_not_wanted_is_not_pulled(in_rounds: InRounds) -> None:
    async with in_two_servers(in_rounds) as (rounds, second):
        digest = await rounds.push(b"outer of 1", 1)
        rounds.commit(digest, CommitStatus(committed=True))
        rounds.claim(await rounds.next_file())
        rounds.change_server(second, 3, 2, update=digest, outer_update=OUTER)
        await joined(rounds, 5)
        other = f"blake3:{5:064x}"
        rounds.change_server(rounds.server, 4, 5, update=other, outer_update=OUTER)
        rounds.commit(await rounds.push(b"outer of 5", 5, term=4), CommitStatus(committed=True))
        assert rounds.claim(await rounds.next_file()).round == 5
        assert rounds.pulled == []
        assert other not in {question.update for question in rounds.got(AwaitCommit)}


async def test_changes_of_older_terms_are_refused(in_rounds: InRounds) -> None:
    async with in_two_servers(in_rounds) as (rounds, second):
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
