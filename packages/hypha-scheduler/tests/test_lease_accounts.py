"""Accounts of a job's leases: what they cost, on disk, over restarts and kills, and the budget that they keep to."""

from __future__ import annotations

import csv
import io
import json
import os
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_jobs import SPEC, OpenJobs, ScriptedJob, ScriptedStrategy, role

from hypha_proto.ids import PeerId
from hypha_scheduler.cli import main
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.lease_accounts import FILE, AccountsFileError, LeaseAccounts, read_accounts
from hypha_scheduler.strategies.base import StartTask

pytestmark = pytest.mark.virtual_clock

PEER = PeerId.from_public_key(bytes(32))
PRICE = 100.0
"""Tokens per hour of the scripted workers."""
BEGINNING = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = BEGINNING

    def __call__(self) -> float:
        return self.now


def kill(accounts: LeaseAccounts, clock: Clock, folder: Path) -> None:
    """Leave the file as a killed scheduler does, with the time of the last mark."""
    accounts.mark()
    if (folder / FILE).exists():
        os.utime(folder / FILE, (clock.now, clock.now))


def test_a_lease_costs_its_price_for_its_time(tmp_path: Path) -> None:
    clock = Clock()
    accounts = LeaseAccounts(tmp_path, clock)
    first, second = uuid.uuid4(), uuid.uuid4()
    accounts.begin(first, PEER, "train", 3600.0, "gpu-3")
    clock.now += 10
    accounts.begin(second, PEER, "aggregate", 7200.0)
    assert (accounts.rate, accounts.spent()) == (3.0, 10.0)
    clock.now += 5
    accounts.end(first)
    accounts.end(first)  # of no effect
    clock.now += 1
    assert (accounts.rate, accounts.spent()) == (2.0, 15.0 + 12.0)
    accounts.close()
    one, two = read_accounts(tmp_path / FILE)
    assert (one.lease, one.name, one.role, one.seconds, one.tokens) == (str(first), "gpu-3", "train", 15.0, 15.0)
    assert (two.lease, two.name, two.role, two.seconds, two.tokens) == (str(second), None, "aggregate", 6.0, 12.0)
    assert one.has_ended
    assert two.has_ended


def test_leases_of_a_killed_scheduler_end_with_its_last_mark(tmp_path: Path) -> None:
    clock, lease = Clock(), uuid.uuid4()
    accounts = LeaseAccounts(tmp_path, clock)
    accounts.begin(lease, PEER, "train", 3600.0)
    clock.now += 20
    kill(accounts, clock, tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"lease": "cut sho')  # what a crash leaves
    os.utime(tmp_path / FILE, (clock.now, clock.now))
    [held] = read_accounts(tmp_path / FILE)
    assert (held.seconds, held.has_ended) == (20.0, False)
    clock.now += 100
    again = LeaseAccounts(tmp_path, clock)
    assert again.spent() == 20.0
    again.begin(lease, PEER, "train", 3600.0)
    clock.now += 3
    again.close()
    assert [(account.seconds, account.has_ended) for account in read_accounts(tmp_path / FILE)] == [
        (20.0, True),
        (3.0, True),
    ]


def test_a_lease_taken_back_before_its_expiry_is_charged_once(tmp_path: Path) -> None:
    clock, lease = Clock(), uuid.uuid4()
    accounts = LeaseAccounts(tmp_path, clock)
    accounts.begin(lease, PEER, "train", 3600.0)
    clock.now += 20
    accounts.end(lease, in_seconds=8.0)  # its worker charges until then
    accounts.close()
    clock.now += 2
    again = LeaseAccounts(tmp_path, clock)
    assert again.spent() == 28.0
    again.begin(lease, PEER, "train", 3600.0)
    assert again.spent() == 22.0
    clock.now += 4
    again.close()
    assert sum(account.tokens for account in read_accounts(tmp_path / FILE)) == 26.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "restart", "kill"]), st.integers(0, 3)), max_size=30))
def test_what_is_spent_is_what_the_file_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Whatever begins, ends, is restarted and is killed, one second at a time."""
    folder, clock = tmp_path_factory.mktemp("job"), Clock()
    leases, held = [uuid.UUID(int=number) for number in range(4)], set[uuid.UUID]()
    accounts, expected = LeaseAccounts(folder, clock), 0
    for what, number in steps:
        clock.now += 1
        expected += len(held)
        if what == "begin" and leases[number] not in held:
            accounts.begin(leases[number], PEER, "train", 3600.0)
            held.add(leases[number])
        elif what == "end":
            accounts.end(leases[number])
            held.discard(leases[number])
        elif what in ("restart", "kill"):
            if what == "kill":
                kill(accounts, clock, folder)
            else:
                accounts.close()
            held.clear()
            accounts = LeaseAccounts(folder, clock)
        assert accounts.spent() == expected
        assert accounts.rate == len(held)
    accounts.close()
    assert sum(account.tokens for account in read_accounts(folder / FILE)) == expected


def test_accounts_go_on_where_they_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    accounts = LeaseAccounts(tmp_path, clock)
    (tmp_path / FILE).mkdir()
    for number in range(2):
        accounts.begin(uuid.UUID(int=number), PEER, "train", 3600.0)
    clock.now += 5
    assert accounts.spent() == 10.0
    accounts.close()
    assert len([record for record in caplog.records if "accounts of leases are incomplete" in record.message]) == 1


def test_a_file_with_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "job"
    folder.mkdir(parents=True)
    (folder / FILE).write_text('{"lease": 1}\n')
    with pytest.raises(AccountsFileError, match=f"{FILE}:1: no account of a lease"):
        LeaseAccounts(folder)
    config = tmp_path / "scheduler.toml"
    config.write_text('output_dir = "runs"\n')
    said = CliRunner().invoke(main, ["accounts", "--config", str(config)])
    assert said.exit_code == 1
    assert f"the accounts cannot be read: {folder / FILE}:1: no account of a lease" in said.output


def test_the_command_lists_the_leases_of_all_jobs(tmp_path: Path) -> None:
    clock = Clock()
    for number, job in enumerate(["one", "two"]):
        folder = tmp_path / "runs" / job
        folder.mkdir(parents=True)
        accounts = LeaseAccounts(folder, clock)
        accounts.begin(uuid.UUID(int=number), PEER, "train", 3600.0, "gpu-3" if number else None)
        clock.now += 60
        accounts.close()
    config = tmp_path / "scheduler.toml"
    config.write_text('output_dir = "runs"\n')

    def said(*options: str) -> str:
        done = CliRunner().invoke(main, ["accounts", "--config", str(config), *options])
        assert done.exit_code == 0, done.output
        return done.output

    first, second, total = said().splitlines()
    assert first == (
        f"2027-01-15T08:00:00Z  job one  …{str(PEER)[-6:]} (train)  lease {uuid.UUID(int=0)}  60.0 s at 3600 an hour = "
        "60.0000 tokens"
    )
    assert f"job two  gpu-3…{str(PEER)[-6:]} (train)" in second
    assert total == "2 leases, 120.0 s, 120.0000 tokens"
    rows: list[dict[str, Any]] = json.loads(said("--format", "json"))
    assert [(row["job"], row["tokens"], row["ended"]) for row in rows] == [("one", 60.0, True), ("two", 60.0, True)]
    table = list(csv.DictReader(io.StringIO(said("--format", "csv"))))
    assert [(row["job"], row["worker"], row["name"]) for row in table] == [
        ("one", str(PEER), ""),
        ("two", str(PEER), "gpu-3"),
    ]
    assert json.loads(said("--format", "json", "--since", "2027-01-15T08:01:30Z")) == rows[1:]
    refused = CliRunner().invoke(main, ["accounts", "--config", str(config), "--since", "lately"])
    assert refused.exit_code == 2
    assert "'lately' is no period" in refused.output


async def test_a_job_is_cancelled_before_it_spends_more_than_its_budget(open_jobs: OpenJobs) -> None:
    strategy = ScriptedStrategy(demand=[role(count=3, minimum=3)])
    budget = 3 * 60 * PRICE / 3600  # three workers for a minute
    times: list[float] = []
    async with open_jobs(strategy) as lab:
        operator = await lab.acquire(ScriptedJob(budget=budget))
        began = anyio.current_time()
        operator.act(*(StartTask(operator.task(f"task-{number}", number), SPEC) for number in range(3)))
        lab.endpoint.gateway_peers = {"/ip4/10.0.0.1/tcp/4001": None}
        await anyio.sleep(20)
        assert lab.results == []
        [error] = await lab.ended()
        times.append(anyio.current_time() - began)
        assert isinstance(error, JobFailedError)
        assert "its budget of 5 tokens has to last until its leases have ended" in str(error)
        assert "`hypha-scheduler resume` continues it" in str(error)
        assert [len(worker.released) for worker in lab.workers] == [1, 1, 1]
    [file] = lab.service.host.runs.glob(f"*/{FILE}")
    spent = sum(account.tokens for account in read_accounts(file))
    assert budget * 0.7 < spent < budget
    assert 40 < times[0] < 60
    [last] = [json.loads(line) for line in file.with_name("metrics.jsonl").read_text().splitlines()][-1:]
    assert (last["event"], last["cancelled"]) == ("failed", True)
