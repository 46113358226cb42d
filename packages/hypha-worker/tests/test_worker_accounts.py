"""The accounts of a worker: what its leases earn, on disk, over restarts and kills, and as its owner reads them."""

from __future__ import annotations

import csv
import io
import json
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hypha_net.node.accounts import parse_since
from hypha_net.peer_names import learn_name
from hypha_proto.ids import PeerId
from hypha_proto.resources import Resources
from hypha_worker.accounts import storage
from hypha_worker.accounts.book import HELD_INTERVAL, AccountBook
from hypha_worker.accounts.storage import STALE_AFTER, AccountFiles, LeaseAccount, earned_since, read_accounts
from hypha_worker.cli import main
from hypha_worker.leasing.capacity import Allocation, Capacity
from hypha_worker.leasing.lease_manager import Lease, LeaseManager
from hypha_worker.work_dir import control_folder

PEER = PeerId.parse("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")
JOB = uuid.UUID(int=7)


class Site:
    """A worker's leases and their accounts, on a clock of its own."""

    def __init__(self, folder: Path, start: float = 1000.0) -> None:
        self.folder, self.now = folder, start
        self.leases = LeaseManager(Capacity(Resources(cpu=8.0)))
        self.book = AccountBook(folder, wall_clock=lambda: self.now)
        self.book.open()
        self.leases.on_held = self.book.add

    def hold(self, price: float = 3600.0) -> uuid.UUID:
        lease = uuid.uuid4()
        self.leases.offer(Lease(lease, PEER, uuid.uuid4(), Allocation(Resources(cpu=1.0)), price, self.now + 0.5))
        self.leases.renew(lease, PEER, self.now)
        return lease

    def pass_time(self, seconds: float, *leases: uuid.UUID) -> None:
        """Let time pass, with renewals each second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for lease in leases:
                self.leases.renew(lease, PEER, self.now)
            self.leases.sweep(self.now)
            self.store()

    def store(self) -> None:
        """Do what `AccountBook.run` does each second."""
        self.book._store(self.book._take_changes(self.now))

    def read(self) -> list[LeaseAccount]:
        return read_accounts(self.folder, self.now)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.book.close()


def test_a_lease_is_accounted_with_its_job_and_how_that_ended(site: Site) -> None:
    finished, idle = site.hold(), site.hold(price=0.0)
    site.leases.attach_task(finished, PEER, site.now, job_id=JOB)
    site.pass_time(6, finished, idle)
    assert [(each.outcome, each.seconds) for each in site.read()] == [("running", 6.0)] * 2
    site.leases.detach_task(finished, outcome="finished")
    for lease in (finished, idle):
        site.leases.release(lease, PEER)
    site.store()
    first, second = site.read()
    assert (first.lease, first.job, first.scheduler) == (str(finished), str(JOB), str(PEER))
    assert (first.seconds, first.price, first.tokens, first.outcome) == (6.0, 3600.0, 6.0, "finished")
    assert (second.job, second.seconds, second.tokens, second.outcome) == (None, 6.0, 0.0, "released")
    assert [stat.S_IMODE(path.stat().st_mode) for path in control_folder(site.folder).glob("accounts*")] == [0o600] * 3


def test_a_killed_worker_loses_at_most_ten_seconds_and_counts_nothing_twice(tmp_path: Path) -> None:
    site = Site(tmp_path)
    ended, held = site.hold(), site.hold()
    site.pass_time(3, ended, held)
    site.leases.release(ended, PEER)
    site.pass_time(20, held)
    kept = site.read()
    assert [each.outcome for each in kept] == ["released", "running"]
    assert 23.0 - kept[1].seconds <= 10.0
    assert [each.outcome for each in read_accounts(tmp_path, site.now + STALE_AFTER + HELD_INTERVAL + 1)][
        1
    ] == "interrupted"
    site.book._files.close()  # type: ignore[union-attr] # it is killed: nothing more is stored, and its lock is gone
    again = Site(tmp_path, site.now + 1)
    new = again.hold()
    again.pass_time(2, new)
    again.book.close()
    outcomes = {each.lease: each.outcome for each in again.read()}
    assert outcomes == {str(ended): "released", str(held): "interrupted", str(new): "worker-ended"}
    assert sum(each.seconds for each in again.read()) == 3.0 + kept[1].seconds + 2.0


def test_a_line_that_was_not_written_to_its_end_harms_no_other(site: Site) -> None:
    first = site.hold()
    site.pass_time(1, first)
    site.leases.release(first, PEER)
    site.store()
    with (control_folder(site.folder) / "accounts.jsonl").open("ab") as file:
        file.write(b'{"lease": "torn\xff"}\n{"lease": "torn')
    second = site.hold()
    site.leases.release(second, PEER)
    site.store()
    assert [each.lease for each in site.read()] == [str(first), str(second)]


def test_the_file_is_rotated_and_the_one_before_it_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_SIZE", 500)
    for _ in range(12):
        lease = site.hold()
        site.pass_time(1, lease)
        site.leases.release(lease, PEER)
        site.store()
    assert all(path.stat().st_size < 1000 for path in control_folder(site.folder).glob("accounts*.jsonl"))
    assert 2 <= len(site.read()) < 12
    assert site.read()[-1].lease == str(lease)


def test_accounts_that_cannot_be_stored_are_stored_later(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_self: AccountFiles, _accounts: Any) -> None:
        raise OSError(28, "No space left on device")

    lease = site.hold()
    with monkeypatch.context() as patched:
        patched.setattr(AccountFiles, "append", fail)
        site.leases.release(lease, PEER)
        site.store()
        site.store()
    assert caplog.text.count("the accounts cannot be stored and are kept in memory: [Errno 28]") == 1
    assert site.read() == []
    site.store()
    assert [each.lease for each in site.read()] == [str(lease)]


def test_a_second_worker_with_the_same_folder_keeps_no_accounts(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    second = Site(site.folder)
    assert "the accounts of this worker are not kept: " in caplog.text
    second.hold()
    second.book.close()
    assert site.read() == []


@pytest.mark.parametrize("content", [b'[{"lease": "torn', b'[{"lease": "\xff"}]'])
def test_damaged_accounts_are_reported_and_leave_nothing_locked(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    Site(tmp_path).book.close()
    damaged = control_folder(tmp_path) / "accounts-held.json"
    damaged.write_bytes(content)
    refused = Site(tmp_path)
    assert f"the accounts of this worker are not kept: {damaged} is damaged: " in caplog.text
    damaged.unlink()
    site = Site(tmp_path)  # while the one that was refused lives
    lease = site.hold()
    for each in (refused, site):
        each.book.close()
    assert [each.lease for each in site.read()] == [str(lease)]


def test_owner_reads_the_accounts_as_text_json_and_csv(site: Site, worker_toml: str) -> None:
    learn_name(PEER, "training")
    lease = site.hold()
    site.leases.attach_task(lease, PEER, site.now, job_id=JOB)
    site.pass_time(4, lease)
    site.leases.detach_task(lease, outcome="failed")
    site.leases.release(lease, PEER)
    site.store()

    def run(*options: str) -> str:
        result = CliRunner().invoke(main, ["accounts", "--config", worker_toml, *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    [row] = json.loads(run("--format", "json"))
    assert row == {
        "lease": str(lease), "job": str(JOB), "scheduler": str(PEER), "began": "1970-01-01T00:16:40Z",
        "updated": "1970-01-01T00:16:44Z", "seconds": 4.0, "price": 3600.0, "tokens": 4.0, "outcome": "failed",
        "name": "training",
    }  # fmt: skip
    assert list(csv.DictReader(io.StringIO(run("--format", "csv")))) == [{key: str(row[key]) for key in row}]
    assert f"  scheduler training…{str(PEER)[-6:]}  " in run()
    assert run().endswith("  4.0 s at 3600 an hour = 4.0000 tokens  failed\n1 leases, 4.0 s, 4.0000 tokens\n")
    assert json.loads(run("--format", "json", "--since", "1d")) == []
    assert json.loads(run("--format", "json", "--since", "1970-01-01T00:16:44+00:00")) == [row]
    wrong = CliRunner().invoke(main, ["accounts", "--config", worker_toml, "--since", "yesterday"])
    assert wrong.exit_code == 2
    assert "'yesterday' is no period: write a duration such as 30m" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 910.0),
        ("1m", 940.0),
        ("0.1h", 640.0),
        ("1970-01-01T00:00:07+00:00", 7.0),
        ("1970-01-02T00:00Z", 86400.0),
    ],
)
def test_periods(text: str, expected: float) -> None:
    assert parse_since(text, 1000.0) == expected


def test_earnings_since_a_time_are_the_part_of_each_lease_after_it() -> None:
    def account(began: float, updated: float, tokens: float) -> LeaseAccount:
        return LeaseAccount("l", None, "s", began, updated, updated - began, 1.0, tokens, "finished")

    leases = [account(0, 50, 7), account(50, 150, 10), account(120, 130, 3), account(140, 140, 0)]
    assert earned_since(leases, 100.0) == pytest.approx(5 + 3)
