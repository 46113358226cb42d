"""A DiLoCo job in one process, with the journal and the files that a scheduler leaves.

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
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import safetensors.numpy
from blake3 import blake3
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
from hypha.accelerate_executor.training_setup import build_setup
from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
from hypha_proto.bridge_api import MEMORY_VARIABLE, RoundJoined
from hypha_proto.codec import to_json
from hypha_proto.contributions import Contribution
from hypha_proto.datasets import Manifest, SliceEntry
from hypha_proto.global_model import GlobalModel, digest_directory, digest_file
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
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.contributions import MemberUpdate, UnusedUpdate
from hypha_scheduler.strategies.diloco.records import round_record
from hypha_scheduler.strategies.diloco.result_model import Advance
from hypha_scheduler.strategies.diloco.sample_ledger import SampleSpan
from hypha_scheduler.strategies.diloco.specs import PlacedJob, outer_optimizer

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
        self._unused: list[UnusedUpdate] = []
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
        advance = Advance(state.before, state.weights, state.update)
        record = round_record(number, self.term, updates, self._unused, advance, 1.0)
        self.records.append({"record": record.kind, **record.fields})
        peer = self.script.late[1]
        late = self.stated[number].get(peer) if number == self.script.late[0] else None
        self._unused = [] if late is None else [UnusedUpdate(PEERS[peer], "it came late", _spans(late[1]), late[1])]
        self.weights[number] = state.weights
        self._begin_round(number + 1)
        self.arrived[number].set()

    def _member(self, number: int, member: int, stated: Contribution) -> MemberUpdate:
        spans = _spans(stated)
        samples = sum(span.end - span.first for span in spans)
        return MemberUpdate(PEERS[member], number, samples, stated.batches, spans, stated.update, stated)


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
                lambda: slices.fetch(self.work_dir / f"slice-{next(counter)}"), config.batch_size, config.seed or 0
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
