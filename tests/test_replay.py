"""Replay of a job with a real model: dropout, batch norm, uneven members, a late update, parts of slices, two runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.recorded_job import CHANGING, MODULE, NET, PEERS, ROUNDS, UNEVEN, record_job, write_journal

from hypha.accelerate_executor.options import OwnerOptions
from hypha.accelerate_executor.replay.__main__ import replay
from hypha_proto.ids import PeerId
from hypha_scheduler.cli import main
from hypha_scheduler.replay import ReplayRefusedError, plan_replay
from hypha_scheduler.strategies.replayable import ReplayOptions

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the model's class, and compute with one thread."""
    installed = tmp_path_factory.mktemp("installed")
    (installed / f"{MODULE}.py").write_text(NET)
    sys.path.insert(0, str(installed))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    sys.path.remove(str(installed))
    sys.modules.pop(MODULE, None)


@pytest.fixture(scope="module")
def recorded(net: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train a job; return its directory and the folder of its slices."""
    return record_job(tmp_path_factory.mktemp("recorded"))


class Copy:
    """A copy of the job's directory that a test may damage."""

    def __init__(self, directory: Path, data: Path, scratch: Path) -> None:
        self.directory, self.data, self.scratch = directory, data, scratch

    def records(self) -> list[Any]:
        return [json.loads(line) for line in (self.directory / "journal.jsonl").read_text().splitlines()]

    def change(self, number: int, change: Callable[[Any], object]) -> None:
        """Change the record of a round."""
        records = self.records()
        [record] = [found for found in records if found.get("record") == "round" and found["round"] == number]
        change(record)
        write_journal(self.directory, records)

    def replay(self) -> bool:
        """Replay in this process; the output is on standard output."""
        plan = plan_replay(self.directory, ReplayOptions(self.data, threads=1))
        self.scratch.mkdir()
        return replay(plan, OwnerOptions(frozenset({MODULE})), self.scratch)


def copy_of(recorded: tuple[Path, Path], folder: Path) -> Copy:
    directory, data = recorded
    shutil.copytree(directory, folder / "job")
    shutil.copytree(data, folder / "points")
    return Copy(folder / "job", folder / "points", folder / "scratch")


@pytest.fixture
def job(recorded: tuple[Path, Path], tmp_path: Path) -> Copy:
    return copy_of(recorded, tmp_path)


@pytest.fixture(scope="module")
def changing(net: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train a job whose members come and go; return as `recorded`."""
    return record_job(tmp_path_factory.mktemp("changing"), CHANGING)


@pytest.fixture
def changing_job(changing: tuple[Path, Path], tmp_path: Path) -> Copy:
    return copy_of(changing, tmp_path)


def flip(digest: str) -> str:
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


def test_a_job_is_equal_to_the_bit(job: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.replay()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "round 1: equal to the bit: 2 updates, the outer update and the weights",
        "round 2: equal to the bit: 1 update, the outer update and the weights",
        "round 3: equal to the bit: 2 updates, the outer update and the weights",
        "round 4: equal to the bit: 2 updates, the outer update and the weights",
        "proven: 4 rounds equal to the bit",
    ]


def test_a_job_whose_members_come_and_go_is_equal_to_the_bit(
    changing_job: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    """One begins anew after a round, one is started again with micro-batches, one joins; the server is replaced."""
    assert changing_job.replay()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "round 1: equal to the bit: 2 updates, the outer update and the weights",
        "round 2: equal to the bit: 2 updates, the outer update and the weights",
        "round 3: equal to the bit: 1 update, the outer update and the weights",
        "round 4: equal to the bit: 3 updates, the outer update and the weights",
        "round 5: equal to the bit: 3 updates, the outer update and the weights",
        "proven: 5 rounds equal to the bit",
    ]
    plan = plan_replay(changing_job.directory, ReplayOptions(changing_job.data, threads=1))
    members = [{PEERS.index(update.peer): update.member for update in found.members} for found in plan.rounds]
    assert members == [{0: 0, 1: 1}, {0: 0, 1: 1}, {2: 2}, {0: 0, 1: 1, 2: 2}, {0: 0, 1: 1, 2: 2}]


def test_workers_of_different_memory_compute_the_batches_of_a_job_in_different_parts(
    net: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hypha.accelerate_executor.train.micro_batch_size.resident_bytes", lambda: 0)
    directory, data = record_job(tmp_path, UNEVEN)
    job = Copy(directory, data, tmp_path / "scratch")
    members = [member for record in job.records() if record["record"] == "round" for member in record["members"]]
    sizes = {(PEERS.index(PeerId.parse(m["peer"])), m["contribution"].get("micro_batch")) for m in members}
    assert sizes == {(0, 4), (1, 2)}
    assert {member["contribution"]["batch_size"] for member in members} == {8}
    assert job.replay()
    assert capsys.readouterr().out.splitlines()[-1] == "proven: 3 rounds equal to the bit"


@pytest.mark.parametrize(
    ("changes", "number", "said"),
    [
        ({"optimizer": "kept"}, 4, "it kept its optimizer state from round 3, which could not be computed for it"),
        ({"micro_batch": None}, 5, "the update of"),
    ],
)
def test_another_life_of_an_executor_is_found_in_the_record(
    changing_job: Copy, changes: dict[str, Any], number: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(record: Any) -> None:
        [member] = [found for found in record["members"] if found["peer"] == str(PEERS[1])]
        member["contribution"] |= changes

    changing_job.change(number, change)
    assert not changing_job.replay()
    printed = capsys.readouterr().out
    assert said in printed
    assert f"round {number}: equal to the bit" not in printed


def test_digests_suffice_without_kept_updates(job: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(job.directory / "updates")
    assert job.replay()
    assert f"proven: {ROUNDS} rounds equal to the bit" in capsys.readouterr().out


def _change_ranges(record: Any, change: Callable[[list[int]], None]) -> None:
    """Change the first range of the first member, as its executor stated it and as the scheduler recorded it."""
    member = record["members"][0]
    change(member["ranges"][0])
    stated = member["contribution"]["ranges"][0]
    stated["epoch"], stated["slice"], stated["first"], stated["end"] = member["ranges"][0]


def _shift(found: list[int]) -> None:
    found[2], found[3] = (found[2] - 1, found[3] - 1) if found[2] else (found[2] + 1, found[3] + 1)


def _state(record: Any, **changes: Any) -> None:
    record["members"][0]["contribution"] |= changes


def _change_update(record: Any) -> None:
    member = record["members"][0]
    member["update"] = member["contribution"]["update"] = flip(member["update"])


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "digest of an update": (_change_update, f"the update of {PEERS[0]} is blake3:"),
    "range": (lambda record: _change_ranges(record, _shift), f"the update of {PEERS[0]} is blake3:"),
    "epoch": (
        lambda record: _change_ranges(record, lambda found: found.__setitem__(0, 7)),
        f"the update of {PEERS[0]} is blake3:",
    ),
    "seed": (lambda record: _state(record, seed=1), f"the update of {PEERS[0]} has the seed 1"),
    "optimizer": (lambda record: _state(record, optimizer="reset"), f"the update of {PEERS[0]} is blake3:"),
    "start": (lambda record: _state(record, weights=flip(record["weights"])), "it began from the weights blake3:"),
    "weights": (lambda record: record.update(weights=flip(record["weights"])), "the weights after it are blake3:"),
    "weights before": (
        lambda record: record.update(weights_before=flip(record["weights_before"])),
        "the weights before it are blake3:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_in_the_record_is_named(job: Copy, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = CHANGES[what]
    job.change(2, change)
    assert not job.replay()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("round 1: equal to the bit")
    assert lines[0].startswith(("round 2: differs", "round 2: not provable"))
    assert said in lines[1]
    assert lines[-1].startswith("not proven: ")


def test_the_digest_of_an_outer_update_is_named_without_kept_ones(
    job: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(job.directory / "updates")
    job.change(2, lambda record: record.update(update=flip(record["update"])))
    assert not job.replay()
    printed = capsys.readouterr().out
    assert "the outer update is blake3:" in printed
    assert "only digests can be compared" in printed
    assert "the rounds after 2 could not be computed" in printed


def test_an_unstated_contribution_is_said_to_be_one(job: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    job.change(1, lambda record: record["members"][1].update(contribution=None))
    assert not job.replay()
    printed = capsys.readouterr().out
    assert f"the update of {PEERS[1]}: its executor stated nothing about it" in printed
    assert "round 2: equal to the bit" in printed  # of the other member alone
    assert f"the update of {PEERS[1]}: it kept its optimizer state from round 2" in printed


def test_a_false_statement_that_did_not_count_proves_nothing_wrong(
    job: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(record: Any) -> None:
        stated = record["unused"][0]["contribution"]
        false = stated | {"round": 3, "update": flip(stated["update"]), "weights": record["weights_before"]}
        false["ranges"] = [{"epoch": 0, "slice": 99, "first": 0, "end": 8}]
        record["unused"].append({"peer": str(PEERS[2]), "why": "no such slice", "ranges": [], "contribution": false})

    job.change(3, add)
    assert job.replay()
    assert f"the update of {PEERS[2]}, which did not count, cannot be computed" in capsys.readouterr().out


REFUSED: dict[str, tuple[Callable[[Copy], object], str]] = {
    "start model": (lambda job: (job.directory / "start-model" / "torch_model.json").write_text("{}"), "has changed"),
    "no start model": (lambda job: shutil.rmtree(job.directory / "start-model"), "the start model is missing"),
    "manifest": (lambda job: (job.directory / "manifest.json").write_text("{}"), "manifest has changed"),
    "slice": (lambda job: (job.data / "1.safetensors").write_bytes(b"x"), "slice 1 of dataset 'points' has changed"),
    "no slice": (lambda job: (job.data / "2.safetensors").unlink(), "slice 2 of dataset 'points' is missing"),
    "kept update": (
        lambda job: (job.directory / "updates" / "round-2.safetensors").write_bytes(b"x"),
        "the outer update of round 2 has the digest",
    ),
    "no journal": (lambda job: (job.directory / "journal.jsonl").unlink(), "there is no journal.jsonl"),
    "journal": (lambda job: (job.directory / "journal.jsonl").write_text("{\n"), "line 1 of the journal is malformed"),
    "another type": (
        lambda job: write_journal(job.directory, [{"format": 2, "job": {"type": "inference"}}]),
        "the job is of type 'inference', which cannot be computed again",
    ),
    "no round": (lambda job: write_journal(job.directory, job.records()[:3]), "no round is recorded"),
    "round": (lambda job: write_journal(job.directory, [*job.records()[:4], *job.records()[5:]]), "line 5"),
    "weight": (
        lambda job: job.change(2, lambda record: record["members"][0].update(samples=9)),
        "its weight is 9 samples",
    ),
    "ranges": (
        lambda job: job.change(2, lambda record: _shift(record["members"][0]["ranges"][0])),
        "and its executor stated",
    ),
    "digest": (lambda job: job.change(2, lambda record: record.update(weights="blake3:1")), "weights"),
    "member": (lambda job: job.change(2, lambda record: record.update(members=[])), "has no member"),
    "position": (
        lambda job: job.change(2, lambda record: _change_ranges(record, lambda found: found.__setitem__(1, 77))),
        "it names slice 77, and the dataset has 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_of_the_job_is_refused_by_name(job: Copy, what: str) -> None:
    damage, said = REFUSED[what]
    damage(job)
    before = {path: path.stat().st_mtime_ns for path in job.directory.rglob("*")}
    result = CliRunner().invoke(main, ["replay", str(job.directory), "--data", str(job.data)])
    assert (result.exit_code, said in result.output) == (2, True), result.output
    assert {path: path.stat().st_mtime_ns for path in job.directory.rglob("*")} == before


def test_the_folder_of_the_slices_must_be_named(job: Copy) -> None:
    with pytest.raises(ReplayRefusedError, match="name the folder of the slices of dataset 'points' with --data"):
        plan_replay(job.directory, ReplayOptions())
    with pytest.raises(ReplayRefusedError, match="there is no such folder"):
        plan_replay(job.directory, ReplayOptions(job.directory / "elsewhere"))


@pytest.mark.nightly
def test_the_command_proves_a_job(job: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.scratch / "installed").mkdir(parents=True)
    (job.scratch / "installed" / f"{MODULE}.py").write_text(NET)
    monkeypatch.setenv("PYTHONPATH", str(job.scratch / "installed"))
    executor = f"{sys.executable} -m hypha.accelerate_executor.replay --allow-module {MODULE}"
    command = ["replay", str(job.directory), "--data", str(job.data), "--threads", "1", "--executor", executor]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"proven: {ROUNDS} rounds equal to the bit"
    assert len(result.output.splitlines()) == ROUNDS + 1


def test_another_machines_rounding_is_within_the_tolerance(
    job: Copy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rounded_otherwise(layer: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.double()
        return torch.nn.functional.linear(values.double(), layer.weight.double(), bias).float()

    monkeypatch.setattr(torch.nn.Linear, "forward", rounded_otherwise)
    assert job.replay()
    *lines, verdict = capsys.readouterr().out.splitlines()
    rounds = [line for line in lines if line.startswith("round")]
    assert len(rounds) == ROUNDS
    assert all("differs within the tolerance; 0 of" in line for line in rounds)
    assert all("largest difference of the outer update" in line and "tolerance" in line for line in rounds)
    assert verdict.startswith("proven within the tolerance: 4 rounds, 0 equal to the bit")


def test_a_changed_range_is_found_on_another_machine(
    job: Copy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda layer, values: forward(layer, values * (1 + 1e-6)))
    job.change(2, lambda record: _change_ranges(record, _shift))
    assert not job.replay()
    assert "round 2: differs; 0 of 1 update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/nowhere/python", "--executor: /nowhere/python: No such file"),
        ("false", "the executor ended with status 1 and without a verdict"),
        ("true", "the executor ended with status 0 and without a verdict"),
        ("", "--executor: the command is empty"),
    ],
)
def test_an_executor_without_a_verdict_proves_nothing(job: Copy, command: str, said: str) -> None:
    arguments = ["replay", str(job.directory), "--data", str(job.data), "--executor", command]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_an_update_is_that_of_the_member_that_its_worker_was_when_it_stated_it(changing_job: Copy) -> None:
    """A worker was lost after it had stated an update that counts, and came again under another number."""
    records = changing_job.records()
    place = next(line for line, found in enumerate(records) if found.get("record") == "round" and found["round"] == 5)
    [member] = [found for found in records[place]["members"] if found["peer"] == str(PEERS[0])]
    contributed = {"record": "contributed", "worker": member["peer"], "round": 5} | {
        name: member[name] for name in ("samples", "batches", "update", "ranges", "contribution")
    }
    announced = {"record": "announced", "round": 5, "term": 2}
    announced |= {"members": [[found["peer"], found["samples"]] for found in records[place]["members"]]}
    left = {"record": "left", "worker": member["peer"], "reason": "lost"}
    joined = {"record": "joined", "worker": member["peer"], "member": 9}
    write_journal(changing_job.directory, [*records[:place], contributed, announced, left, joined, *records[place:]])
    plan = plan_replay(changing_job.directory, ReplayOptions(changing_job.data, threads=1))
    assert {update.member for update in plan.rounds[4].members if update.peer == PEERS[0]} == {0}
