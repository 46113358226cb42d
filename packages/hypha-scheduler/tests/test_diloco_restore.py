"""Restoring DiLoCo from its journal and its files: committed rounds count, and what workers have stays theirs."""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.diloco_simulation import PEERS, SERVER, FakeContext, FakeDataset, job_table

from hypha_proto.contributions import OPTIMIZER_KEPT, Contribution, SampleRange
from hypha_proto.global_model import RoundState
from hypha_proto.ids import PeerId
from hypha_proto.safetensors_io import TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import Artifact, ArtifactCopies
from hypha_scheduler.jobs.config import ArtifactTable, StartModelTable
from hypha_scheduler.jobs.journal import Journal, read_journal
from hypha_scheduler.strategies.base import DatasetView, Lease, WriteJournal
from hypha_scheduler.strategies.diloco.records import (
    AnnouncedRecord,
    BeganRecord,
    ContributedRecord,
    TermRecord,
    UnusedRecord,
    round_record,
    write_record,
)
from hypha_scheduler.strategies.diloco.restore import RestoredTraining, restore
from hypha_scheduler.strategies.diloco.result_model import ResultModel
from hypha_scheduler.strategies.diloco.sample_ledger import LedgerFullError, SampleLedger, SampleSpan
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN, outer_optimizer
from hypha_scheduler.strategies.diloco.strategy import STRATEGY

A, B, C = WORKERS = PEERS[:3]
SIZES, SEED = [12, 5, 20, 7], 5
KINDS = ["slice", "slice", "contribute", "contribute", "refuse", "lose", "round", "announce", "restart"]
STEP = st.tuples(st.sampled_from(KINDS), st.sampled_from(WORKERS), st.integers(0, 20))
BEGAN = BeganRecord(
    dataset="d", manifest="m", model="start", seed=SEED, batch_size=4,
    settings={"outer_optimizer": {"learning_rate": 0.7}}, workers=tuple(WORKERS),
)  # fmt: skip


def digest(text: str) -> str:
    return f"blake3:{text.encode().hex():0>64}"


def samples_of(spans: Iterable[SampleSpan]) -> list[tuple[int, int, int]]:
    return [(span.epoch, span.index, position) for span in spans for position in range(span.first, span.end)]


class Run:
    """A job's ledger and journal, written as the operator writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path)
        self.ledger = SampleLedger(SIZES, SEED)
        self.closed = 0
        self.used: list[SampleSpan] = []
        self.samples: Counter[PeerId] = Counter()
        self.open: dict[PeerId, ContributedRecord] = {}
        self.unused: list[UnusedRecord] = []
        self.lost: set[PeerId] = set()
        self.journal.record("accepted", job={"type": "diloco"})
        self.write(write_record(BEGAN))
        self.write(write_record(TermRecord(term=1, server=SERVER, workers=WORKERS)))

    def write(self, record: WriteJournal) -> None:
        self.journal.append(record.kind, **record.fields)

    def act(self, what: str, peer: PeerId, count: int) -> None:
        if what == "slice":
            self.assign(peer)
        elif what == "contribute":
            self.contribute(peer, count)
        elif what == "refuse" and peer in self.open:
            self.withdraw(peer, "refused")
        elif what == "lose":
            self.ledger.release(peer)
            self.lost.add(peer)
            if peer in self.open:
                self.withdraw(peer, "lost")
        elif what == "announce":
            self.announce()
        elif what == "round":
            self.commit()
        elif what == "restart":
            self.restart(WORKERS if count % 2 else [other for other in WORKERS if other != peer])

    def assign(self, peer: PeerId) -> None:
        try:
            span = self.ledger.assign(peer)
        except LedgerFullError:
            return
        fields = {"epoch": span.epoch, "slice": span.index, "first": span.first, "end": span.end}
        self.journal.append("assigned", worker=str(peer), dataset="d", **fields)

    def contribute(self, peer: PeerId, count: int) -> None:
        """Contribute `count` samples of what the worker has, oldest first."""
        if peer in self.open:
            return
        spans = []
        for held in self.ledger.held_by(peer):
            end = min(held.end, held.first + count)
            spans += [SampleSpan(held.epoch, held.index, held.first, end)] if end > held.first else []
            count -= end - held.first
        number = self.closed + 1
        taken = self.ledger.contribute(peer, number, spans)
        samples = sum(span.samples for span in taken)
        update = digest(f"{peer}/{number}"[-30:])
        stated = Contribution(
            round=number, weights=digest(f"w{self.closed}"), batches=2, batch_size=4, seed=1, optimizer=OPTIMIZER_KEPT,
            ranges=tuple(SampleRange(epoch=s.epoch, slice=s.index, first=s.first, end=s.end) for s in taken),
            update=update,
        )  # fmt: skip
        self.open[peer] = ContributedRecord(
            worker=peer, round=number, samples=samples, batches=2, update=update, ranges=taken,
            contribution=stated if count % 2 else None,
        )  # fmt: skip
        self.write(write_record(self.open[peer]))

    def withdraw(self, peer: PeerId, why: str) -> None:
        self.ledger.withdraw(peer, self.closed + 1)
        gone = self.open.pop(peer)
        self.unused.append(UnusedRecord(peer=peer, why=why, ranges=gone.ranges, contribution=gone.contribution))

    def restart(self, kept: list[PeerId]) -> None:
        """Go on with the state of the journal and these workers; what the others have is lost."""
        restored = restore(read_journal(self.path))
        self.ledger = SampleLedger(SIZES, SEED)
        restored.restore_ledger(self.ledger, kept)
        self.lost.update(set(WORKERS) - set(kept))
        self.open = {peer: record for peer, record in restored.contributed.items() if peer in kept}
        self.unused = []

    def announce(self) -> None:
        members = [(peer, update.samples) for peer, update in self.open.items()]
        self.write(write_record(AnnouncedRecord(round=self.closed + 1, term=1, members=tuple(members))))

    def commit(self) -> None:
        number = self.closed + 1
        self.announce()
        self.ledger.commit(number, self.open)
        updates = list(self.open.values())
        before, after = digest(f"w{self.closed}"), digest(f"w{number}")
        state = RoundState(number, before, after, None, digest(f"u{number}"))
        self.write(round_record(number, 1, updates, self.unused, state, 1 / number))
        for update in updates:
            self.samples[update.worker] += update.samples
            self.used += update.ranges
        self.closed, self.open, self.unused = number, {}, []


def run_of(path: Path, steps: Iterable[tuple[str, PeerId, int]]) -> Run:
    run = Run(path)
    with run.journal:
        for what, peer, count in steps:
            run.act(what, peer, count)
    return run


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, min_size=8, max_size=60))
def test_a_restart_continues_with_the_committed_rounds_and_what_workers_have(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, PeerId, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / uuid.uuid4().hex
    run = run_of(path, steps)
    restored = restore(read_journal(path))
    assert (restored.closed, restored.samples) == (run.closed, run.samples)
    assert restored.loss == (1 / run.closed if run.closed else None)
    assert restored.weights == (digest(f"w{run.closed}") if run.closed else None)
    assert sorted(samples_of(restored.used)) == sorted(samples_of(run.used))
    ledger = SampleLedger(SIZES, SEED)
    restored.restore_ledger(ledger, WORKERS)
    check_restored(run, restored, ledger)


def check_restored(run: Run, restored: RestoredTraining, ledger: SampleLedger) -> None:
    everything = Counter(samples_of([*ledger.available, *restored.used]))
    for peer in WORKERS:
        held = samples_of(ledger.held_by(peer))
        contributed = ledger.contribution(peer, run.closed + 1) or ()
        everything.update([*held, *samples_of(contributed)])
        if peer in run.open:
            assert contributed == run.open[peer].ranges
            assert restored.contributed[peer].update == run.open[peer].update
        assert set(held) >= set(samples_of(run.ledger.held_by(peer)))
        if not run.unused and peer not in run.lost:  # those are in no record
            assert ledger.held_by(peer) == run.ledger.held_by(peer)
    assert max(everything.values(), default=1) == 1
    assert everything.keys() == set(
        samples_of(SampleSpan(e, i, 0, SIZES[i]) for e in range(epochs(everything)) for i in range(len(SIZES)))
    )


def epochs(samples: Iterable[tuple[int, int, int]]) -> int:
    return max((epoch for epoch, _, _ in samples), default=-1) + 1


HISTORY = [
    ("slice", A, 0), ("slice", B, 0), ("slice", C, 0), ("contribute", A, 3), ("contribute", B, 4), ("contribute", C, 5),
    ("announce", A, 0), ("refuse", C, 0), ("round", A, 0), ("slice", C, 0), ("contribute", B, 1), ("lose", A, 0),
    ("slice", B, 0), ("contribute", C, 9), ("round", A, 0), ("slice", B, 0), ("contribute", B, 2), ("announce", B, 0),
]  # fmt: skip


def test_a_journal_cut_at_any_byte_is_restored_to_its_last_whole_record(tmp_path: Path) -> None:
    run_of(tmp_path / "journal", HISTORY)
    whole = (tmp_path / "journal").read_bytes()
    records = read_journal(tmp_path / "journal")
    expected = [restore(records[:count]) for count in range(len(records) + 1)]
    assert expected[-1].closed == 2
    cut = tmp_path / "cut"
    cut.write_bytes(whole)
    for size in range(len(whole), -1, -1):
        os.truncate(cut, size)
        found = read_journal(cut)
        assert found == records[: whole.count(b"\n", 0, size)]
        if whole[size - 1 : size] in (b"\n", b""):  # elsewhere the records are the same as with the next byte less
            assert restore(found) == expected[len(found)]


def restarted(path: Path) -> SampleLedger:
    ledger = SampleLedger(SIZES, SEED)
    restore(read_journal(path)).restore_ledger(ledger, WORKERS)
    return ledger


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("is_assigned_again", [True, False])
def test_a_refused_update_has_gone_back_after_a_restart(
    tmp_path: Path, is_recorded: bool, is_assigned_again: bool
) -> None:
    """Also if the statement was refused at once, and if the same worker got its samples again."""
    run = Run(tmp_path / "journal")
    with run.journal:
        run.assign(A)
        [span] = run.ledger.held_by(A)
        if is_recorded:
            run.contribute(A, 3)
            run.withdraw(A, "refused")
        else:
            taken = run.ledger.contribute(A, 1, [SampleSpan(span.epoch, span.index, 0, 3)])
            run.ledger.withdraw(A, 1)
            run.unused.append(UnusedRecord(peer=A, why="refused", ranges=taken, contribution=None))
        if is_assigned_again:
            run.assign(A)
        run.commit()
    ledger = restarted(run.path)
    assert ledger.held_by(A) == run.ledger.held_by(A)
    assert sorted(ledger.available) == sorted(run.ledger.available)
    assert len(ledger.held_by(A)) == (2 if is_assigned_again else 1)


def test_another_dataset_or_model_is_named() -> None:
    other = BeganRecord(dataset="d", manifest="x", model="start", seed=SEED, batch_size=8, settings={"a": 1})
    assert BEGAN.differences(BEGAN) == []
    assert BEGAN.differences(other) == [
        "manifest is 'x', and was 'm'",
        "batch_size is 8, and was 4",
        "a is 1, and was None",
        "outer_optimizer is None, and was {'learning_rate': 0.7}",
    ]


def test_a_worker_keeps_what_the_journal_lost_the_assignment_of(tmp_path: Path) -> None:
    """Assignments are not synced: after a power cut a contribution may stand without its assignment."""
    run_of(tmp_path / "journal", [("slice", A, 0), ("contribute", A, 3)])
    records = [record for record in read_journal(tmp_path / "journal") if record["record"] != "assigned"]
    ledger = SampleLedger(SIZES, SEED)
    restored = restore(records)
    restored.restore_ledger(ledger, WORKERS)
    assert ledger.contribution(A, 1) == restored.contributed[A].ranges


def test_a_journal_of_another_dataset_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path / "journal", [("slice", A, 0)])
    restored = restore(read_journal(tmp_path / "journal"))
    with pytest.raises(JobFailedError, match=r"does not fit the dataset: the dataset has no positions 0 to"):
        restored.restore_ledger(SampleLedger([1]), WORKERS)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("kind", "change", "fault"),
    [
        ("began", lambda r: r.update(seed="7"), r"line 2: the record 'began'.*seed is '7': Expected `int`"),
        ("began", lambda r: r["workers"].append("x"), r"workers\[3\] is 'x'"),
        ("term", lambda r: r.pop("server"), r"line 3: the record 'term'.*missing required field `server`"),
        ("term", lambda r: r.update(term=0), r"term is 0"),
        ("assigned", lambda r: r.update(end=r["first"]), r"line 4: .*it has no samples: positions 0 to 0"),
        ("assigned", lambda r: r.update(epoch=-1), r"epoch is -1"),
        ("contributed", lambda r: r.update(round=2), r"round is 2, and the open one is 1"),
        ("contributed", lambda r: r.update(update="blake3:x"), r"update is 'blake3:x'"),
        ("contributed", lambda r: r["ranges"].append([0, 1, 2]), r"ranges\[1\] is \[0, 1, 2\]"),
        ("announced", lambda r: r.update(term=3), r"term is 3, and the last one is 1"),
        ("announced", lambda r: r["members"].append(["x", 1]), r"members\[3\]\[0\] is 'x'"),
        ("round", lambda r: r.update(round=3), r"round is 3, and the one before is 0"),
        ("round", lambda r: r.update(weights=None), r"weights is None: Expected `str`"),
        ("round", lambda r: r["members"][1].update(ranges=[[0, 1, 4, 2]]), r"\[1\].*ranges\[0\]: \[0, 1, 4, 2\]"),
        ("round", lambda r: r["members"][0].update(samples=2.5), r"members\[0\].samples is 2.5"),
        ("round", lambda r: r["members"][0].update(contribution=[]), r"members\[0\].contribution is \[\]"),
        ("round", lambda r: r.update(unused={}), r"unused is \{\}"),
    ],
)
def test_a_malformed_record_is_named(tmp_path: Path, kind: str, change: Change, fault: str) -> None:
    run_of(tmp_path / "journal", HISTORY)
    records = read_journal(tmp_path / "journal")
    change(next(record for record in records if record["record"] == kind))
    with pytest.raises(JobFailedError, match=fault):
        restore(records)


def test_records_of_another_job_are_refused(tmp_path: Path) -> None:
    run_of(tmp_path / "journal", HISTORY)
    records = read_journal(tmp_path / "journal")
    with pytest.raises(JobFailedError, match=r"line \d+: .* of another job than the first one: seed is 6, and was 5"):
        restore([*records, {"record": "began", **write_record(BEGAN).fields, "seed": 6}])


Records = list[dict[str, Any]]


class Context(FakeContext):
    """Context with a directory of its own, and a dataset whose manifest is `manifest`."""

    manifest = "{}"

    async def open_dataset(self, source: Any, *, timeout: float, manifest: str = "manifest.json") -> DatasetView:
        await anyio.Path(self.directory / manifest).write_text(self.manifest)
        return FakeDataset()

    async def prepare_artifact(
        self, table: ArtifactTable, name: str, copy: Path, *, unchanged: bool = False
    ) -> Artifact:
        assert isinstance(table, StartModelTable)
        return await ArtifactCopies(self.job_id, self.scheduler).open(table, name, copy, unchanged=unchanged)


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo("F32", (3,))}, {}) as writer:
        writer.write("w", np.ones(3, np.float32))
    return folder


async def interrupted(tmp_path: Path) -> tuple[Context, Any, Records]:
    """Begin a job, record two rounds and stop; return its context, configuration and journal."""
    context, job = Context(tmp_path / "job"), job_table(model={"path": str(make_model(tmp_path / "start"))})
    context.directory.mkdir()
    leases = [Lease(uuid.uuid4(), peer, TRAIN, 100.0) for peer in PEERS[:3]]
    leases.append(Lease(uuid.uuid4(), SERVER, AGGREGATE, 100.0))
    async with STRATEGY.open(job, context, []) as operator:
        effects = (*operator.on_start(0.0), *operator.on_leases_acquired(leases, 1.0))
    journal: Records = [{"record": e.kind, **e.fields} for e in effects if isinstance(e, WriteJournal)]
    result = ResultModel(context.directory, outer_optimizer(job))
    for number in (1, 2):
        update = context.directory / "updates" / f"round-{number}-ab12.safetensors"
        write_update(update, {"w": (3,)}, [("w", np.ones(3, "f4"))], UpdateMetadata(round=number))
        record = round_record(number, 1, [], [], await result.advance(update, number), None)
        await result.commit(number)
        journal.append({"record": record.kind, **record.fields})
    return context, job, journal


async def test_a_job_goes_on_with_its_own_copy_of_the_start_model(tmp_path: Path) -> None:
    context, job, journal = await interrupted(tmp_path)
    shutil.rmtree(tmp_path / "start")
    async with STRATEGY.open(job, context, journal):
        pass
    assert (context.directory / "outer-state" / "round-2").is_dir()


def damage_weights(context: Context) -> None:
    path = context.directory / "outer-state" / "round-2" / "weights.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def remove_state(context: Context) -> None:
    shutil.rmtree(context.directory / "outer-state" / "round-2")


def change_start_model(context: Context) -> None:
    (context.directory / "start-model" / "config.json").write_text('{"changed": true}')


def change_dataset(context: Context) -> None:
    context.manifest = '{"changed": true}'


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (damage_weights, r"round-2/weights\.safetensors: the file is damaged"),
        (remove_state, r"round-2: the directory is missing"),
        (change_start_model, r"the job cannot go on: model is 'blake3:\w+', and was 'blake3:\w+'"),
        (change_dataset, r"the manifest of dataset '.*' has the digest"),
    ],
)
async def test_what_was_changed_since_is_named(tmp_path: Path, change: Callable[[Context], None], what: str) -> None:
    context, job, journal = await interrupted(tmp_path)
    change(context)
    with pytest.raises(JobFailedError, match=what):
        async with STRATEGY.open(job, context, journal):
            pass
