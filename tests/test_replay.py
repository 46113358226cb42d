"""Replay of a job with a real model: dropout, batch norm, uneven members, a late update, parts of slices, two runs.

`RESUMED` is resumed once: the second run has another second member, and both begin without optimizer state. In
`CHANGING` members come and go: a round goes on without one, which begins anew; the executor of another one dies and is
started again with smaller micro-batches; a third one joins; the parameter server is replaced. In `UNEVEN` the leases
of the members have different amounts of memory.

The members are the executor's own training loops, each in a thread; only one trains at a time, since torch's random
generator is the process's. A scripted bridge hands out parts of slices and decides when a round ends.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy
import torch
from blake3 import blake3
from click.testing import CliRunner
from msgspec.structs import replace

from hypha.accelerate_executor.bridge.client import Bridge, Fetched, OuterUpdates, Received
from hypha.accelerate_executor.bridge.spans import Spans
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.diloco.batch_reporter import BatchReporter
from hypha.accelerate_executor.diloco.loop import LoopTiming, TrainingLoop
from hypha.accelerate_executor.distributed.accelerator import CpuBackend
from hypha.accelerate_executor.distributed.process_group import SingleProcess
from hypha.accelerate_executor.errors import RoundWentOn
from hypha.accelerate_executor.modeling.torch import write_torch_model
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.replay.__main__ import replay
from hypha.accelerate_executor.training_setup import build_setup
from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
from hypha_proto.bridge_api import MEMORY_VARIABLE, RoundJoined
from hypha_proto.codec import to_json
from hypha_proto.contributions import Contribution
from hypha_proto.datasets import Manifest, SliceEntry
from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.global_model import GlobalModel
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Reference, TrainConfig, UriReference
from hypha_proto.outer_step import outer_step
from hypha_proto.training_reports import (
    Acknowledged,
    Continue,
    Done,
    ReportAnswer,
    TrainedBatch,
    TrainingReport,
    UpdateMerged,
)
from hypha_proto.update_file import UpdateMetadata, open_update
from hypha_scheduler.cli import main
from hypha_scheduler.errors import JobRefusedError
from hypha_scheduler.replay import plan_replay
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.records import ContributedRecord, UnusedRecord, round_record
from hypha_scheduler.strategies.diloco.sample_ledger import SampleSpan
from hypha_scheduler.strategies.diloco.specs import PlacedJob, outer_optimizer
from hypha_scheduler.strategies.replayable import ReplayOptions

PEERS = tuple(PeerId(bytes((0, 36, 8, 1, 18, 32)) + bytes((number,)) * 32) for number in range(3))
SERVER = PeerId(bytes((0, 36, 8, 1, 18, 32)) + b"s" * 32)


@dataclass(frozen=True)
class Life:
    """Rounds of one executor process."""

    peer: int
    rounds: range
    member: int
    """Member number of its worker."""
    micro_batch: int | None = None
    memory: int | None = None
    """Bytes of main memory of its lease."""


@dataclass(frozen=True)
class Appointment:
    """A term of a parameter server."""

    begin: int
    """Its first round."""
    workers: Mapping[int, int]
    """Member number of each peer, in the order of the record."""
    continues: bool = False


@dataclass(frozen=True)
class Script:
    """What happens in a job."""

    batches: Sequence[Mapping[int, int]]
    """Batches of each peer in each round."""
    lives: Sequence[Sequence[Life]]
    """Processes, those of each run of the scheduler in turn."""
    terms: Sequence[Appointment]
    late: tuple[int, int] = (0, 0)
    """Round and peer whose update does not count."""
    closed: tuple[int, int] = (0, 0)
    """Round and peer that the round goes on without: its executor is told to begin anew."""
    joined: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Peer and its member number, by the round with which it begins."""
    joins: bool = False
    """Whether executors ask with which round they begin."""


RESUMED = Script(
    batches=({0: 4, 1: 2}, {0: 3, 1: 1}, {0: 5, 1: 3}, {0: 2, 2: 4}),
    lives=(
        (Life(0, range(1, 4), 0), Life(1, range(1, 4), 1)),
        (Life(0, range(4, 5), 0), Life(2, range(4, 5), 1)),
    ),
    terms=(Appointment(1, {0: 0, 1: 1}), Appointment(4, {0: 0, 2: 1})),
    late=(2, 1),
)
CHANGING = Script(
    batches=({0: 4, 1: 2}, {0: 3, 1: 1}, {0: 5, 2: 3}, {0: 2, 1: 4, 2: 1}, {0: 1, 1: 2, 2: 3}),
    lives=(
        (
            Life(0, range(1, 6), 0),
            Life(1, range(1, 3), 1),
            Life(1, range(4, 6), 1, micro_batch=3),
            Life(2, range(3, 6), 2),
        ),
    ),
    terms=(Appointment(1, {0: 0, 1: 1}), Appointment(4, {2: 2, 1: 1, 0: 0}, continues=True)),
    closed=(3, 0),
    joined={3: (2, 2), 4: (1, 1)},
    joins=True,
)
UNEVEN = Script(
    batches=({0: 2, 1: 1}, {0: 1, 1: 2}, {0: 2, 1: 2}),
    lives=((Life(0, range(1, 4), 0, memory=9000), Life(1, range(1, 4), 1, memory=1)),),
    terms=(Appointment(1, {0: 0, 1: 1}),),
)
"""Workers whose memory suffices for half a batch, and for nothing."""
ROUNDS = len(RESUMED.batches)
SLICES = (40, 24, 57)
"""Samples of each slice."""
PART = 19
"""Largest number of samples that are handed out at once."""
NET = """
import torch

# a bias before a batch norm has no gradient but rounding, of which AdamW makes whole steps

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(12, 16, bias=False)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.4)
        self.outer = torch.nn.Linear(16, 3)

    def forward(self, values, labels):
        hidden = self.drop(torch.relu(self.norm(self.inner(values))))
        return torch.nn.functional.cross_entropy(self.outer(hidden), labels)
"""
MODULE = "recorded_net"
JOB: Mapping[str, Any] = {
    "type": "diloco",
    "seed": 5,
    "dataset": {"dataset": "points"},
    "model": {"path": "start-model", "type": "torch", "input_names": ["values", "labels"]},
    "inner_optimizer": {"learning_rate": 0.01, "schedule": "cosine-with-warmup", "warmup_steps": 2},
    "outer_optimizer": {"learning_rate": 0.7, "momentum": 0.9},
    "rounds": {"update_rounds": 4, "avg_samples_between_updates": 48, "batch_size": 8, "keep_updates": True},
    "resources": {"num_workers": 2},
}


class Slices:
    """Hands out every second part of the slices to a member, in passes over the dataset."""

    def __init__(self, folder: Path, member: int) -> None:
        self.folder = folder
        self._parts = itertools.islice(self._all(), member, None, len(PEERS))

    def _all(self) -> Iterator[tuple[int, int, int, int]]:
        for epoch in range(100):
            for index, samples in enumerate(SLICES):
                for first in range(0, samples, PART):
                    yield epoch, index, first, min(samples, first + PART)

    def fetch(self, target: Path) -> list[Fetched]:
        epoch, index, first, end = next(self._parts)
        target.mkdir(parents=True)
        path = Path(shutil.copy(self.folder / f"{index}.safetensors", target))
        return [Fetched(path, {"slice": str(index), "epoch": str(epoch), "first": str(first), "end": str(end)})]


class Scheduler:
    """Scheduler and parameter server of the job: collects updates, takes the outer step, writes the journal."""

    def __init__(self, directory: Path, job: DilocoJobConfig, script: Script) -> None:
        self.directory, self.job, self.script = directory, job, script
        self.turn = threading.Lock()
        self.stated: defaultdict[int, dict[int, tuple[Path, Contribution]]] = defaultdict(dict)
        self.arrived: dict[int, threading.Event] = {
            number: threading.Event() for number in range(1, len(script.batches) + 1)
        }
        self.weights: dict[int, str] = {}
        self.records: list[Mapping[str, Any]] = []
        self._model = GlobalModel(directory / "start-model", directory / "outer-state", outer_optimizer(job))
        self._unused: list[UnusedRecord] = []
        self.term = 0
        self._begin_round(1)

    @property
    def momentum(self) -> Path:
        return self.directory.parent / "momentum.safetensors"

    def _begin_round(self, number: int) -> None:
        for term, appointment in enumerate(self.script.terms, 1):
            if appointment.begin == number:
                self._begin_term(term, appointment)
        if (found := self.script.joined.get(number)) is not None:
            peer, member = found
            self.records.append({"record": "joined", "worker": str(PEERS[peer]), "member": member, "round": number})

    def _begin_term(self, term: int, appointment: Appointment) -> None:
        """Appoint a parameter server, which begins with the momentum that the scheduler has."""
        self.term = term
        record: dict[str, Any] = {"record": "term", "term": term, "server": str(SERVER)}
        record["workers"] = [str(PEERS[peer]) for peer in appointment.workers]
        if appointment.continues:
            record |= {"members": list(appointment.workers.values()), "continues": True}
        self.records.append(record)
        self.momentum.unlink(missing_ok=True)
        if last := max(self.weights, default=0):
            shutil.copy(self._model.directory(last) / "momentum.safetensors", self.momentum)

    def weights_of(self, number: int) -> Path:
        return self._model.directory(number) / "weights.safetensors"

    def update_of(self, number: int) -> Path:
        return self.directory / "updates" / f"round-{number}.safetensors"

    def state(self, member: int, number: int, path: Path, contribution: Contribution) -> None:
        kept = self.directory.parent / f"stated-{number}-{member}.safetensors"
        shutil.copy(path, kept)
        self.stated[number][member] = kept, contribution
        expected = self.script.batches[number - 1].keys() - (
            {self.script.closed[1]} if number == self.script.closed[0] else set()
        )
        if len(self.stated[number]) == len(expected):
            self._commit(number)

    def _commit(self, number: int) -> None:
        counting = [
            (member, *found)
            for member, found in sorted(self.stated[number].items())
            if (number, member) != self.script.late
        ]
        updates = [self._member(number, member, about) for member, _, about in counting]
        file, metadata = open_update(counting[0][1])
        file.close()
        outer_step(
            [(path, float(update.samples)) for (_, path, _), update in zip(counting, updates, strict=True)],
            self.momentum,
            self.update_of(number),
            outer_optimizer(self.job),
            UpdateMetadata(round=number, statistics=metadata.statistics),
        )
        state = self._model.add(self.update_of(number), number)
        record = round_record(number, self.term, updates, self._unused, state, 1.0)
        self.records.append({"record": record.kind, **record.fields})
        peer = self.script.late[1]
        late = self.stated[number].get(peer) if number == self.script.late[0] else None
        self._unused = []
        if late is not None:
            ranges = _spans(late[1])
            self._unused = [UnusedRecord(peer=PEERS[peer], why="it came late", ranges=ranges, contribution=late[1])]
        self.weights[number] = state.weights
        self._begin_round(number + 1)
        self.arrived[number].set()

    def _member(self, number: int, member: int, stated: Contribution) -> ContributedRecord:
        ranges = _spans(stated)
        return ContributedRecord(
            worker=PEERS[member], round=number, samples=sum(each.samples for each in ranges), batches=stated.batches,
            update=stated.update, ranges=ranges, contribution=stated,
        )  # fmt: skip


def _spans(stated: Contribution) -> tuple[SampleSpan, ...]:
    return tuple(SampleSpan(part.epoch, part.slice, part.first, part.end) for part in stated.ranges)


class PatientReporter(BatchReporter):
    """Waits until each batch is counted, so that no round has more batches than its script says."""

    def report(self, batch: TrainedBatch) -> ReportAnswer:
        super().report(batch)
        return self.flush()


class Member:
    """One member's bridge and outer updates."""

    def __init__(self, life: Life, scheduler: Scheduler, work_dir: Path) -> None:
        self.number, self.rounds, self.scheduler, self.work_dir = life.peer, life.rounds, scheduler, work_dir
        self.round, self.memory = life.rounds.start, life.memory
        work_dir.mkdir(parents=True)

    def fetch(self, _: Reference, out_dir: str) -> list[Fetched]:
        """Fetch the newest weights."""
        folder = self.work_dir / out_dir
        folder.mkdir(exist_ok=True)
        return [Fetched(Path(shutil.copy(self.scheduler.weights_of(self.round - 1), folder)))]

    def report(self, progress: TrainingReport) -> ReportAnswer:
        if isinstance(progress, UpdateMerged):
            self.round += 1
            return Continue() if self.round in self.rounds else Done()
        return Acknowledged()

    def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        last = self.scheduler.script.batches[trained.round - 1][self.number]
        return BatchesCounted(counted=trained.first + len(trained.batches), last=last)

    def send(self, _: Reference, path: Path, number: int, samples: int, contribution: Contribution | None) -> None:
        assert contribution is not None
        if (number, self.number) == self.scheduler.script.closed:
            self.round = number + 1
            raise RoundWentOn("it was waited for long enough")
        assert samples == sum(part.end - part.first for part in contribution.ranges)
        self.scheduler.state(self.number, number, path, contribution)

    def join(self) -> RoundJoined:
        if self.round == 1:
            return RoundJoined(round=1)
        self._await_end(self.round - 1, 30.0)
        return RoundJoined(round=self.round, weights=self.scheduler.weights[self.round - 1])

    def _await_end(self, number: int, timeout: float) -> None:
        self.scheduler.turn.release()
        try:
            assert self.scheduler.arrived[number].wait(timeout)
        finally:
            self.scheduler.turn.acquire()

    def wait(self, number: int, timeout: float) -> Received:
        self._await_end(number, timeout)
        copy = Path(shutil.copy(self.scheduler.update_of(number), self.work_dir))
        return Received(copy, number, self.scheduler.weights[number])

    def train(self, config: TrainConfig, slices: Slices, model: Path) -> None:
        """Train all rounds; called in a thread of its own."""
        counter = iter(range(1000))
        limit = {} if self.memory is None else {MEMORY_VARIABLE: str(self.memory)}
        with self.scheduler.turn:
            with patch.dict(os.environ, limit):
                setup = build_setup(
                    config, OwnerOptions(frozenset({MODULE})), ModelFiles(model), CpuBackend(), SingleProcess()
                )
            batches = Batches(
                lambda _count: slices.fetch(self.work_dir / f"slice-{next(counter)}"),
                config.batch_size,
                config.seed or 0,
            )
            spans = Spans(lambda _: None, None, str)
            with patch("hypha.accelerate_executor.diloco.loop.BatchReporter", PatientReporter):
                loop = TrainingLoop(
                    cast(Bridge, self), config, setup, batches, cast(OuterUpdates, self), LoopTiming(30.0), spans
                )
            try:
                loop.run()
            finally:
                batches.close()


def record_job(folder: Path, script: Script = RESUMED) -> tuple[Path, Path]:
    """Train the job; return its directory, as a scheduler leaves it, and the folder of the slices.

    `MODULE` must be importable, with `NET` as its source, and torch must compute with one thread.
    """
    directory, data = folder / "job", folder / "points"
    (directory / "updates").mkdir(parents=True)
    write_torch_model(f"{MODULE}:Net", {}, 1, directory / "start-model")
    manifest = write_slices(data)
    (directory / "manifest.json").write_bytes(to_json(Manifest, manifest))
    job, job_id = DilocoJobConfig.model_validate(JOB), uuid.UUID(int=18)
    scheduler = Scheduler(directory, job, script)
    for run, lives in enumerate(script.lives):
        config = train_config(job, job_id, lives[0].rounds.start - 1)
        with ThreadPoolExecutor(len(lives)) as threads:
            running = []
            for number, life in enumerate(lives):
                member = Member(life, scheduler, folder / f"work-{run}-{number}")
                mine = replace(config, member=life.member, micro_batch=life.micro_batch, join=script.joins or None)
                slices = Slices(data, life.peer)
                running.append(threads.submit(member.train, mine, slices, directory / "start-model"))
            for future in running:
                future.result()
    began = {
        "record": "began", "dataset": "points", "manifest": digest_file(directory / "manifest.json"),
        "model": digest_directory(directory / "start-model"), "seed": job.seed, "batch_size": 8,
        "workers": [str(PEERS[number]) for number in script.batches[0]],
    }  # fmt: skip
    accepted = {"record": "accepted", "format": 2, "job_id": str(job_id), "job": dict(JOB)}
    write_journal(directory, [accepted, began, *scheduler.records])
    return directory, data


def write_journal(directory: Path, records: Sequence[Mapping[str, Any]]) -> None:
    (directory / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def train_config(job: DilocoJobConfig, job_id: uuid.UUID, closed: int) -> TrainConfig:
    """Return what the scheduler sends to the members of a run, but for what differs between them."""
    model = UriReference(value="file:start-model")
    return PlacedJob(job_id, job, SERVER, SERVER, PEERS[:2], model, closed=closed).train_config()


def write_slices(data: Path) -> Manifest:
    data.mkdir()
    rng, entries = np.random.default_rng(3), []
    for index, samples in enumerate(SLICES):
        path = data / f"{index}.safetensors"
        values = rng.normal(size=(samples, 12)).astype("f4")
        safetensors.numpy.save_file({"values": values, "labels": (values[:, 0] > 0).astype("i8")}, path)
        digest = f"blake3:{blake3(path.read_bytes()).hexdigest()}"
        entries.append(SliceEntry(file=path.name, samples=samples, size=path.stat().st_size, digest=digest))
    return Manifest(dataset="points", slices=tuple(entries))


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
    with pytest.raises(JobRefusedError, match="name the folder of the slices of dataset 'points' with --data"):
        plan_replay(job.directory, ReplayOptions())
    with pytest.raises(JobRefusedError, match="there is no such folder"):
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
