"""The inference operator: whatever happens to workers and parts, each row gets one result, and the audit proves it."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import anyio.to_thread
import msgspec
import pytest
from support.inference_simulation import (
    COLUMNS,
    FakeContext,
    FakeDataset,
    Simulation,
    answer,
    faults,
    in_place,
    job_table,
    part_of,
)
from support.mutation import mutated

from hypha_proto.codec import from_json
from hypha_proto.datasets import Manifest, ProviderFailure, UnusableSlice
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.tasks import TaskProgress
from hypha_proto.transfer import OUTER_UPDATE, Refusal
from hypha_scheduler.audit import audit
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, read_journal
from hypha_scheduler.strategies.avoidance import PATIENCE
from hypha_scheduler.strategies.base import (
    EndJob,
    RetryAfter,
    SliceToUse,
    StartTask,
    StopTask,
    TaskProgressed,
    TaskRef,
    TaskState,
)
from hypha_scheduler.strategies.inference.operator import FIRST_SLICES, MAX_IN_HAND, REPEAT_AFTER
from hypha_scheduler.strategies.inference.part_check import InvalidPartError, check_part
from hypha_scheduler.strategies.inference.retries import LOST_SLICE, MAX_BARREN, MAX_FAILURES
from hypha_scheduler.strategies.inference.workers import FIRST_REPORT
from hypha_scheduler.submission.resumption import differences

ROWS = (3, 5, 1, 4, 7, 2, 6, 3)


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in threads is done in place, and nothing waits for the disk."""
    monkeypatch.setattr(anyio.to_thread, "run_sync", in_place)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


def context(folder: Path, rows: tuple[int, ...] = ROWS) -> FakeContext:
    directory = folder / "job"
    directory.mkdir()
    return FakeContext(directory, FakeDataset(rows))


def begin(folder: Path, rows: tuple[int, ...] = ROWS, **tables: Any) -> Simulation:
    run = Simulation(context(folder, rows), job_table(**tables))
    run.acquire()
    run.acquire()
    return run


@pytest.fixture
def run(tmp_path: Path) -> Simulation:
    return begin(tmp_path)


def fetched(run: Simulation, task: TaskRef) -> int:
    found = run.fetch(task)
    assert isinstance(found, int)
    return found


def results(run: Simulation) -> list[tuple[int, int]]:
    folder = run.context.directory / "results"
    lines = [line for path in sorted(folder.glob("part-*.jsonl")) for line in path.read_text().splitlines()]
    return sorted((row["slice"], row["row"]) for row in map(json.loads, lines))


ALL = sorted((index, row) for index, count in enumerate(ROWS) for row in range(count))


# ----------------------------------------------------------------------------------------------------------- whole jobs


def test_a_job_ends_with_a_dataset_of_results(run: Simulation) -> None:
    run.settle()
    run.close()
    assert run.ended == [EndJob()]
    assert results(run) == ALL
    manifest: Manifest = from_json(Manifest, (run.context.directory / "results" / "manifest.json").read_bytes())
    assert [(entry.file, entry.samples) for entry in manifest.slices] == [
        (f"part-{index}.jsonl", count) for index, count in enumerate(ROWS)
    ]
    assert manifest.format == "jsonl"
    assert manifest.columns is not None
    assert manifest.columns["text"] == "text"
    assert manifest.columns["id"] == COLUMNS["id"]
    found = audit(run.context.directory)
    assert (found.faults, found.proven, found.is_complete) == ([], sum(ROWS), True)
    summary = run.operator.summary({})
    errors = sum(count // 5 for count in ROWS)
    assert (summary["rows"], summary["errors"], summary["tokens"]) == (sum(ROWS), errors, 2 * (sum(ROWS) - errors))
    assert summary["rows_assigned"] == sum(ROWS)
    assert run.computed == len(ROWS)
    assert sorted(path.name for path in run.context.directory.iterdir()) == [
        "journal.jsonl",
        "manifest.json",
        "results",
    ]


class Chaos:
    """Plays a job at random, with faults and restarts, until it ends."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.context = context(folder)
        self.job = job_table()
        self.run = Simulation(self.context, self.job)
        self.computed = 0
        self.wasted = 0
        """Slices that were in an executor's hand when it was lost, or whose part was invalid."""

    def play(self, steps: int = 150) -> None:
        happens = faults(self.random)
        for _ in range(steps):
            if self.run.ended:
                return
            self.run.now += self.random.random()
            getattr(self, next(happens))()
            self.run.pass_deadlines()
            self.check()

    def check(self) -> None:
        """Check the files at any moment: what is committed is proven, and nothing else is wrong."""
        found = audit(self.context.directory)
        unproven = [fault for fault in found.faults if "have no result; resume the job" not in fault]
        assert unproven == []
        for task in self.run.tasks:
            assert len(self.run.in_hand[task.lease.id]) <= MAX_IN_HAND
        assert len(self.run.leases) <= self.job.resources.most_workers + len(self.run.draining)

    def task(self) -> TaskRef | None:
        return self.random.choice(self.run.tasks) if self.run.tasks else None

    def holder(self) -> TaskRef | None:
        holding = [task for task in self.run.tasks if self.run.in_hand[task.lease.id]]
        return self.random.choice(holding) if holding else None

    def fetch(self) -> None:
        if (task := self.task()) and len(self.run.in_hand[task.lease.id]) < MAX_IN_HAND:
            self.run.fetch(task)

    def send(self) -> None:
        if task := self.holder():
            self.run.send_first(task)

    def acquire(self) -> None:
        self.run.acquire()

    def background(self) -> None:
        self.run.run_background(1)

    def wait(self) -> None:
        self.run.now += 3.0

    def lose(self) -> None:
        if self.run.leases:
            lease = self.random.choice(list(self.run.leases))
            self.wasted += len(self.run.in_hand.get(lease, ()))
            self.run.lose(lease)

    def corrupt(self) -> None:
        if task := self.holder():
            index = self.run.in_hand[task.lease.id].pop(0)
            self.wasted += 1
            content = part_of(index, ROWS[index])
            wrong = self.random.choice(
                [content[:-2], content + content, content.replace(b'"row": 0', b'"row": 1'), b""]
            )
            assert self.run.push(task, index, wrong) is not None

    def double(self) -> None:
        """Send a part again that was sent before, perhaps by another."""
        if (task := self.task()) and self.run.sent:
            _, header, content = self.random.choice(self.run.sent)
            self.run.begin_push(task, header.name, content)()

    def late(self) -> None:
        """Let a part arrive while its slice is taken from its sender."""
        if task := self.holder():
            index = self.run.in_hand[task.lease.id][0]
            complete = self.run.begin_push(task, f"part-{index}.jsonl", part_of(index, ROWS[index]))
            self.lose()
            complete()

    def drain(self) -> None:
        if self.run.leases:
            lease = self.run.leases[self.random.choice(list(self.run.leases))]
            self.wasted += len(self.run.in_hand.get(lease.id, ()))
            self.run.tell(self.run.operator.on_lease_draining, lease, 30.0)

    def die(self) -> None:
        """Let an executor crash, but not so often that the job gives up."""
        task = self.task()
        held = self.run.in_hand[task.lease.id] if task else []
        if task and held and self.run.operator._retries.failures[held[0]] < MAX_FAILURES - 1:
            self.wasted += len(held)
            self.run.end(task, TaskState.FAILED, -9)

    def unusable(self) -> None:
        task = self.holder()
        if task and not self.run.operator._retries.unusable.total():
            index = self.run.in_hand[task.lease.id].pop()
            self.wasted += 1
            failures = (ProviderFailure(provider=task.lease.peer, reason="not there"),)
            self.run.tell(
                self.run.operator.on_slice_unusable, task, "questions", UnusableSlice(index=index, failures=failures)
            )

    def crash(self) -> None:
        """End the scheduler as a power cut does, and continue the job by a new one."""
        self.wasted += sum(map(len, self.run.in_hand.values()))
        self.computed += self.run.computed
        self.run.background.clear()
        self.run.close()
        self.run = Simulation(self.context, self.job, self.run.now)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(10, 60))])
def test_every_row_counts_once_whatever_happens(tmp_path: Path, seed: int) -> None:
    chaos = Chaos(tmp_path, seed)
    chaos.play()
    if not chaos.run.ended:
        if seed % 2:
            chaos.crash()
        chaos.run.settle()
    chaos.run.close()
    if chaos.run.ended[0].failure is not None:  # a slice that failed three times: the job can be resumed
        assert f"failed {MAX_FAILURES} times" in chaos.run.ended[0].failure
        chaos.computed, chaos.wasted = chaos.computed + chaos.run.computed, chaos.wasted + 2 * len(chaos.run.leases)
        chaos.run = Simulation(chaos.context, chaos.job, chaos.run.now)
        chaos.run.settle()
        chaos.run.close()
    assert chaos.run.ended == [EndJob()]
    assert results(chaos.run) == ALL
    found = audit(chaos.context.directory)
    assert (found.faults, found.proven, found.is_complete) == ([], sum(ROWS), True)
    assert chaos.computed + chaos.run.computed <= len(ROWS) + chaos.wasted


@pytest.mark.parametrize("moment", range(12))
def test_a_restart_at_any_moment_of_a_commit_keeps_each_part_once(run: Simulation, moment: int) -> None:
    task = run.tasks[0]
    indices = [fetched(run, task), fetched(run, task)]
    for number, index in enumerate(indices):
        complete = run.begin_push(task, f"part-{index}.jsonl", part_of(index, ROWS[index]))
        if moment > 4 * number:
            complete()
        if moment > 4 * number + 1:
            run.run_background(1)
    run.close()
    (run.context.directory / "incoming" / "unknown-part-0.jsonl").write_bytes(b"half of a li")
    (run.context.directory / "sources-1234").mkdir()
    resumed = Simulation(run.context, run.job)
    records = read_journal(run.context.directory / JOURNAL)
    committed = [record["slice"] for record in records if record["record"] == "part"]
    assert len(audit(run.context.directory).faults) == len(ROWS) - len(committed)
    assert resumed.operator.summary({})["rows"] == sum(ROWS[index] for index in committed)
    resumed.settle()
    resumed.close()
    assert resumed.computed == len(ROWS) - len(committed)
    assert results(resumed) == ALL
    assert audit(resumed.context.directory).faults == []
    kinds = [record["record"] for record in read_journal(run.context.directory / JOURNAL)]
    assert kinds.count("inference") == 1
    workers: Any = resumed.operator.summary({})["workers"]
    assert sum(worker["rows"] for worker in workers) == sum(ROWS)
    assert sum(worker["parts"] for worker in workers) == len(ROWS)
    assert not (run.context.directory / "sources-1234").exists()


# --------------------------------------------------------------------------------------------------------------- slices


def test_an_executor_has_at_most_two_slices_in_hand(run: Simulation) -> None:
    task = run.tasks[0]
    first = fetched(run, task)
    assert fetched(run, task) != first
    assert isinstance(run.fetch(task), RetryAfter)
    assert run.push(task, first) is None
    run.in_hand[task.lease.id].remove(first)
    assert isinstance(run.fetch(task), int)


def test_a_slice_whose_assignment_was_lost_is_assigned_again(tmp_path: Path) -> None:
    run = begin(tmp_path, rows=(2, 2), resources={"num_workers": 1})
    [task] = run.tasks
    lost = run.operator.next_slice(task, "questions", run.now)  # the executor does not hear of it
    run.push(task, fetched(run, task))
    run.in_hand[task.lease.id].clear()
    assert isinstance(run.fetch(task), RetryAfter)
    run.now += REPEAT_AFTER - 1.0
    assert isinstance(run.fetch(task), RetryAfter)
    run.now += 1.0
    assert lost == SliceToUse(0, fetched(run, task))
    run.settle()
    assert run.ended == [EndJob()]


def test_who_asks_waits_while_others_hold_the_last_slices(tmp_path: Path) -> None:
    run = begin(tmp_path, rows=(2, 2, 2, 2), resources={"num_workers": 2})
    one, two = run.tasks
    held = [fetched(run, one), fetched(run, one), fetched(run, two), fetched(run, two)]
    for index in held[2:]:
        assert run.push(two, index) is None
        run.in_hand[two.lease.id].remove(index)
    assert isinstance(run.operator.next_slice(two, "questions", run.now), RetryAfter)
    run.lose(one.lease.id)  # what it held goes to the one that waits, the slice that was assigned first before
    assert [fetched(run, two), fetched(run, two)] == held[:2]


def test_surplus_workers_end_after_their_slices_but_one_that_stands_in(tmp_path: Path) -> None:
    run = begin(tmp_path, rows=(2, 2, 2))
    one, two, three = run.tasks
    for task in (one, two, three):
        fetched(run, task)
    run.send_first(one)
    assert isinstance(run.fetch(one), RetryAfter)  # two slices are left, two workers compute them, one stands in
    run.send_first(two)
    assert run.fetch(two) is None
    assert two.lease.id not in run.leases  # and its lease is released
    assert isinstance(run.fetch(one), RetryAfter)
    run.lose(three.lease.id)
    assert run.fetch(one) == 2  # at once, with the model that it has loaded


def test_a_job_grows_after_its_first_part_and_begins_with_the_least(tmp_path: Path) -> None:
    run = Simulation(context(tmp_path), job_table(resources={"min_workers": 2, "num_workers": 3, "max_workers": 5}))
    [asked] = run.operator.role_requests()
    assert (asked.count, asked.minimum, asked.starts_at_minimum) == (3, 2, True)
    run.acquire()
    assert run.operator.role_requests()[0].count == 3
    run.acquire()
    fetched(run, run.tasks[0])
    run.send_first(run.tasks[0])
    assert run.operator.role_requests()[0].count == 5
    assert run.operator.role_requests()[0].minimum == 1


@pytest.mark.parametrize(("reports", "seconds"), [(0, 600.0), (3, 30.0), (30, 184.0)])
def test_a_silent_executor_is_given_up_and_its_slices_are_computed_by_others(
    tmp_path: Path, reports: int, seconds: float
) -> None:
    """After `reports` seconds to each of its two reports, the second of which is its part."""
    run = begin(tmp_path, rows=(2,) * 6)
    silent, other = run.tasks[:2]
    slices = {fetched(run, silent), fetched(run, silent)}
    if reports:
        run.now += reports
        run.tell(run.operator.on_task_update, silent, TaskProgressed(TaskProgress(metrics={"rows": 1.0})))
        run.now += 20.0 if reports == 30 else reports
        run.send_first(silent)
    began = run.now
    while silent.lease.id in run.leases:
        run.now = run.operator.next_deadline() or math.inf
        if other in run.tasks and not run.in_hand[other.lease.id]:
            fetched(run, other)
        run.tell(run.operator.on_task_update, other, TaskProgressed(TaskProgress(metrics={"rows": 1.0})))
        run.pass_deadlines()
    assert run.now - began == pytest.approx(seconds)
    [lost] = run.events("worker_lost")
    assert lost["reason"] == f"its executor has reported nothing for {seconds:.0f} s"
    assert set(lost["slices"]) == (slices if not reports else {max(slices)})
    assert [event["worker"] for event in run.events("worker_excluded")] == [str(silent.lease.peer)]
    run.settle()
    assert run.ended == [EndJob()]


def test_no_executor_is_given_up_while_data_nodes_are_away(run: Simulation) -> None:
    fetched(run, run.tasks[0])
    run.context.has_data_nodes = False
    for _ in range(3):
        run.now = run.operator.next_deadline() or math.inf
        run.pass_deadlines()
    assert run.now == pytest.approx(3 * FIRST_REPORT)
    assert run.events("worker_lost") == []
    run.tell(run.operator.on_suspended, 1000.0)
    assert run.operator.next_deadline() == pytest.approx(4 * FIRST_REPORT)


def test_a_drained_worker_finishes_its_slice_and_is_replaced(run: Simulation) -> None:
    task = run.tasks[0]
    index = fetched(run, task)
    run.tell(run.operator.on_lease_draining, task.lease, 30.0)
    assert [effect for effect in run.effects if isinstance(effect, StopTask)] == [
        StopTask(task, "its worker drains", keep_lease=True, drain_seconds=28.0)
    ]
    assert run.operator.next_slice(task, "questions", run.now) is None
    assert run.operator.role_requests()[0].count == 4
    run.send_first(task)
    assert task.lease.id not in run.leases
    assert run.events("attempt_failed") == []
    assert run.events("part")[0]["slice"] == index


def test_a_slice_that_no_data_node_has_is_tried_again_and_then_named(tmp_path: Path) -> None:
    run = begin(tmp_path, rows=(2,))
    [task] = run.tasks
    failures = (ProviderFailure(provider=task.lease.peer, reason="not there"),)
    for _ in range(MAX_FAILURES):
        index = fetched(run, task)
        assert run.ended == []
        run.in_hand[task.lease.id].clear()
        run.tell(run.operator.on_slice_unusable, task, "questions", UnusableSlice(index=index, failures=failures))
        waiting = run.operator.next_slice(task, "questions", run.now)
        run.now += waiting.seconds if isinstance(waiting, RetryAfter) else 0.0
    assert "slice 0 of dataset 'questions' is not to be had: data node" in str(run.ended[0].failure)


# ---------------------------------------------------------------------------------------------------------------- parts


def test_a_part_that_came_twice_gets_a_receipt_and_is_dropped(run: Simulation) -> None:
    task = run.tasks[0]
    index = fetched(run, task)
    assert run.push(task, index) is None
    assert run.push(task, index) is None
    assert run.push(run.tasks[1], index) is None
    assert run.operator.summary({})["parts_dropped"] == 2
    run.run_background()
    assert [path.name for path in (run.context.directory / "incoming").iterdir()] == []
    run.in_hand[task.lease.id].clear()
    run.settle()
    assert results(run) == ALL


def test_rates_are_between_the_first_and_the_last_part(run: Simulation) -> None:
    task = run.tasks[0]
    run.now = 10.0  # the executor loads its model
    for _ in range(3):
        fetched(run, task)
        run.send_first(task)
        run.now += 2.0
    summary = run.operator.summary({})
    assert summary["seconds"] == 14.0
    assert summary["rows_per_second"] == sum(ROWS[1:3]) / 4.0
    assert summary["tokens_per_second"] == 2 * (sum(ROWS[1:3]) - ROWS[1] // 5) / 4.0


def test_a_part_of_a_slice_that_another_has_is_dropped(run: Simulation) -> None:
    index = fetched(run, run.tasks[0])
    assert run.push(run.tasks[1], index) is None
    assert run.operator.summary({})["rows"] == 0
    assert run.events("part_dropped")[0]["reason"] == "its slice is not assigned to this attempt"


INVALID = {
    "cut": (lambda good: good[:-3], "line 3 is cut short"),
    "a row twice": (
        lambda good: good + good.splitlines(keepends=True)[-1],
        "line 4 is one too many: slice 0 has 3 rows",
    ),
    "a row missing": (lambda good: b"".join(good.splitlines(keepends=True)[:-1]), "it has 2 rows, and slice 0 has 3"),
    "in another order": (lambda good: b"".join(good.splitlines(keepends=True)[::-1]), "line 1: row is 2, expected 0"),
    "of another slice": (lambda good: good.replace(b'"slice": 0', b'"slice": 1'), "line 1: slice is 1, expected 0"),
    "a slice as text": (lambda good: good.replace(b'"slice": 0', b'"slice": "0"'), "line 1: slice is '0', expected 0"),
    "a slice as true": (lambda good: good.replace(b'"slice": 0', b'"slice": false'), "line 1: slice is False"),
    "no JSON": (lambda good: good.replace(b"{", b"[", 1), "line 1: not JSON"),
    "no object": (lambda good: b"[]\n" + good, "line 1 is no object"),
    "a key twice": (lambda good: good.replace(b'"row": 0', b'"row": 0, "row": 0'), "line 1: "),
    "NaN": (lambda good: good.replace(b'"tokens": 2', b'"tokens": NaN', 1), "line 1: "),
    "no text": (lambda good: good.replace(b'"text"', b'"txet"', 1), "line 1: text is None, expected text"),
    "negative tokens": (lambda good: good.replace(b'"tokens": 2', b'"tokens": -2', 1), "line 1: tokens is -2"),
    "another finish": (lambda good: good.replace(b'"stop"', b'"done"', 1), "line 1: finish is 'done'"),
    "not UTF-8": (lambda good: good.replace(b"0/0", b"\xff\xfe", 1), "line 1: not "),
    "UTF-16": (lambda good: good.decode().encode("utf-16-be"), "line 1: not "),
    "a byte order mark": (lambda good: b"\xef\xbb\xbf" + good, "line 1: not JSON"),
    "an error without kind": (lambda _good: b'{"slice": 0, "row": 0, "error": {}}\n', "line 1: error is {}"),
    "empty": (lambda _good: b"", "it has 0 rows"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_part_is_refused_and_its_slice_computed_again(tmp_path: Path, case: str) -> None:
    spoil, why = INVALID[case]
    run = begin(tmp_path)
    task = run.tasks[0]
    index = fetched(run, task)
    assert why in str(run.push(task, index, spoil(part_of(index, ROWS[index]))))
    assert list((run.context.directory / "incoming").iterdir()) == []
    assert fetched(run, run.tasks[1]) == index
    assert run.operator.summary({})["parts_refused"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_part_is_valid_or_refused(tmp_path: Path, seed: int) -> None:
    """10,000 parts in all; what passes the check passes the audit's, which reads rows on its own."""
    random, valid = Random(seed), part_of(0, 3)
    path = tmp_path / "part-0.jsonl"
    passed, refusals = 0, list[str]()
    for _ in range(2500):
        path.write_bytes(mutated(valid, random))
        try:
            counts = check_part(path, 0, 3, "generate")
        except InvalidPartError as error:
            refusals.append(str(error))
            continue
        passed += 1
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        assert [(row["slice"], row["row"]) for row in rows] == [(0, 0), (0, 1), (0, 2)]
        assert counts.size == path.stat().st_size
        assert counts.errors == sum("error" in row for row in rows)
    assert passed < 1000
    assert max(map(len, refusals)) < 1000


def test_a_worker_that_sends_two_invalid_parts_is_released(run: Simulation) -> None:
    task = run.tasks[0]
    for _ in range(2):
        assert run.push(task, fetched(run, task), b"") is not None
        run.in_hand.get(task.lease.id, []).clear()
    assert task.lease.id not in run.leases
    stops = [effect for effect in run.effects if isinstance(effect, StopTask)]
    assert [(stop.task, stop.keep_lease) for stop in stops] == [(task, False)]
    run.settle()
    assert results(run) == ALL


@pytest.mark.parametrize(
    "name", ["part-8.jsonl", "part-01.jsonl", "../part-0.jsonl", "part--1.jsonl", "part-0.json", ""]
)
def test_a_file_that_is_no_part_is_refused(run: Simulation, name: str) -> None:
    refusal = run.begin_push(run.tasks[0], name, b"{}\n")()
    assert "is the name of no part; expected part-N.jsonl, N from 0 to 7" in str(refusal)


def test_files_of_other_kinds_are_refused(run: Simulation) -> None:
    task = run.tasks[0]
    header = run.header(task, "part-0.jsonl", b"")
    wrong = msgspec.structs.replace(header, kind=OUTER_UPDATE)
    target, effects = run.operator.on_push_request(task, wrong, 0.0)
    assert isinstance(target, Refusal)
    assert effects == ()


def test_a_full_disk_fails_the_job_and_names_it(run: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    task = run.tasks[0]
    index = fetched(run, task)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    assert run.push(task, index) == "the scheduler has no room for the part"
    assert "10 are free; free space, then resume the job" in str(run.ended[0].failure)


# ------------------------------------------------------------------------------------------------------------- failures


def test_an_executor_that_cannot_do_the_job_ends_it(run: Simulation) -> None:
    run.end(run.tasks[0], TaskState.FAILED, 2)
    assert "cannot do this job: it ended (exit code 2)" in str(run.ended[0].failure)


def test_a_slice_that_fails_at_three_workers_ends_the_job_and_is_named(tmp_path: Path) -> None:
    run = begin(tmp_path, rows=(2, 2, 2, 2, 2, 2))
    bad, tasks = None, run.tasks
    for task in tasks[:MAX_FAILURES]:
        assert run.ended == []
        index = fetched(run, task)
        fetched(run, task)  # the one that it holds beside is not blamed
        assert bad in (None, index)
        bad = index
        run.end(task, TaskState.FAILED, 1)
    assert str(run.ended[0].failure).startswith("slice 0 of dataset 'questions' failed 3 times; the last: it ended")


def let_patience_end(run: Simulation) -> None:
    """Let the time pass in which others are sought than workers at which attempts failed."""
    for _ in range(8):
        run.now += PATIENCE / 4
        run.pass_deadlines()
        run.acquire()


def test_an_executor_that_fails_while_another_loads_its_model_does_not_end_the_job(tmp_path: Path) -> None:
    run = begin(tmp_path, resources={"num_workers": 2})
    run.peers = [lease.peer for lease in run.leases.values()]
    bad, good = run.tasks
    for _ in range(4 * MAX_FAILURES):
        for task in run.tasks:
            if task.lease.peer == bad.lease.peer:
                run.end(task, TaskState.FAILED, 1)
        run.now += 100.0
        run.pass_deadlines()
        run.acquire()
    assert run.ended == []
    assert good in run.tasks
    excluded: Any = run.operator.summary({})["excluded"]
    assert [found["worker"] for found in excluded] == [str(bad.lease.peer)]


VICES = ["fails", "never starts", "is lost", "sends rubbish", "finds no slice"]


def misbehave(run: Simulation, task: TaskRef, vice: str) -> None:
    """Do with an attempt what a bad worker does."""
    index = None if vice == "never starts" else run.fetch(task)
    if vice == "is lost":
        run.lose(task.lease.id)
    elif vice == "never starts":
        run.end(task, TaskState.FAILED, 1)
    elif vice == "sends rubbish" and isinstance(index, int):
        run.push(task, index, b"")
        run.in_hand.get(task.lease.id, []).clear()
    elif vice == "finds no slice" and isinstance(index, int):
        run.in_hand[task.lease.id].clear()
        report = UnusableSlice(index=index, failures=(ProviderFailure(provider=task.lease.peer, reason="none"),))
        run.tell(run.operator.on_slice_unusable, task, "questions", report)
    elif vice == "is cancelled":
        run.end(task, TaskState.CANCELLED)
    elif isinstance(index, int):
        run.end(task, TaskState.FAILED, 1)


@pytest.mark.parametrize(("vice", "workers"), [*((vice, 3) for vice in VICES), *((vice, 1) for vice in VICES[:3])])
@pytest.mark.parametrize("healthy", range(3))
def test_a_job_finishes_if_one_worker_is_healthy(tmp_path: Path, vice: str, healthy: int, workers: int) -> None:
    run = Simulation(context(tmp_path), job_table(resources={"num_workers": workers}))
    run.peers = run.peers[:3]
    for second in range(2000):
        if run.ended:
            break
        run.now += 1.0
        run.acquire()
        for task in run.tasks:
            if run.running.get(task.lease.id) != task:
                continue
            if task.lease.peer != run.peers[healthy]:
                misbehave(run, task, vice)
            elif second % 3 == 0 and run.in_hand[task.lease.id]:
                run.send_first(task)
            elif second % 3 == 0:
                run.fetch(task)
        run.run_background()
        run.pass_deadlines()
    assert run.ended == [EndJob()]
    assert results(run) == ALL


def test_an_executor_that_says_it_cannot_do_the_job_is_not_believed_while_another_does_it(run: Simulation) -> None:
    one, two, _ = run.tasks
    fetched(run, one)
    run.send_first(one)
    fetched(run, two)
    run.end(two, TaskState.FAILED, 2)
    assert run.ended == []
    run.settle()
    assert results(run) == ALL


def test_a_worker_that_failed_twice_is_not_leased_again_for_a_minute(tmp_path: Path) -> None:
    run = begin(tmp_path, resources={"num_workers": 2})
    bad = run.tasks[0].lease.peer
    for _ in range(2):
        [task] = [task for task in run.tasks if task.lease.peer == bad]
        fetched(run, task)
        run.end(task, TaskState.FAILED, 1)
    [said] = run.events("worker_excluded")
    assert (said["worker"], said["failures"], said["seconds"]) == (str(bad), 2, 60.0)
    run.pass_deadlines()
    assert run.operator.role_requests()[0].excluded == {bad}
    run.acquire()
    assert bad not in {lease.peer for lease in run.leases.values()}
    run.now += 60.0
    run.pass_deadlines()
    assert run.operator.role_requests()[0].excluded == frozenset()


def test_a_worker_whose_disk_is_full_is_released_at_once(run: Simulation) -> None:
    task = run.tasks[0]
    fetched(run, task)
    run.end(task, TaskState.FAILED, 74)
    assert task.lease.id not in run.leases
    run.settle()
    assert results(run) == ALL


@pytest.mark.parametrize(
    ("times", "end", "why"),
    [
        (MAX_FAILURES, "never starts", "failed 3 times before it asked for a slice"),
        (1 + LOST_SLICE.times, "is lost", "10 workers were lost while they computed slice 0; the last: it is gone"),
        (MAX_BARREN, "is cancelled", "10 attempts failed one after the other"),
    ],
)
def test_attempts_that_end_alike_again_and_again_end_the_job(tmp_path: Path, times: int, end: str, why: str) -> None:
    run = begin(tmp_path, rows=(2,), resources={"num_workers": 1})
    for _ in range(times):
        assert run.ended == []
        [task] = run.tasks
        misbehave(run, task, end)
        let_patience_end(run)
    assert why in str(run.ended[0].failure)


# ----------------------------------------------------------------------------------------------------------- error rows


def failing(folder: Path, kind_of: Callable[[int, int], str | None], share: float = 0.5) -> Simulation:
    """Play a job in which rows are errors of a kind; return it when it has ended."""
    run = begin(folder, inference={"task": "generate", "prompt": "Q: {question}", "max_error_share": share})
    run.part = lambda index, rows: "".join(
        answer(index, row, failed=(kind := kind_of(index, row)) is not None, kind=kind or "") for row in range(rows)
    ).encode()
    run.settle()
    run.close()
    return run


def test_a_job_whose_first_slices_are_errors_of_one_kind_stops(tmp_path: Path) -> None:
    run = failing(tmp_path, lambda _index, _row: "missing-column")
    assert len(run.events("part")) == FIRST_SLICES
    why = str(run.ended[0].failure)
    rows = sum(event["rows"] for event in run.events("part"))
    assert why.startswith(f"all {rows} rows of the first {FIRST_SLICES} slices are errors; ")
    assert f"the most frequent, missing-column ({rows} rows), says: 9 tokens; correct the job or its dataset" in why


def test_a_job_that_allows_only_errors_has_a_result_for_every_row(tmp_path: Path) -> None:
    run = failing(tmp_path, lambda _index, _row: "missing-column", share=1)
    assert run.ended == [EndJob()]
    assert results(run) == ALL
    summary = run.operator.summary({})
    assert (summary["errors"], summary["error_kinds"]) == (sum(ROWS), {"missing-column": sum(ROWS)})


@pytest.mark.parametrize(
    "kind_of",
    [
        lambda index, _row: "not-json" if index == 0 else "too-long",
        lambda _index, row: "too-long" if row else "not-json",
        lambda _index, row: "too-long" if row else None,
    ],
    ids=["by slices", "by rows", "but one"],
)
def test_a_job_with_too_many_errors_fails_when_its_results_are_complete(
    tmp_path: Path, kind_of: Callable[[int, int], str | None]
) -> None:
    run = failing(tmp_path, kind_of)
    assert results(run) == ALL
    assert audit(run.context.directory).proven == sum(ROWS)
    errors = [kind for index, row in ALL if (kind := kind_of(index, row)) is not None]
    why = str(run.ended[0].failure)
    assert why.startswith(f"{len(errors)} of {sum(ROWS)} rows are errors, a larger share than ")
    assert f"the most frequent, too-long ({errors.count('too-long')} rows), says: " in why


@pytest.mark.parametrize(("share", "fails"), [(6 / sum(ROWS), False), (5 / sum(ROWS), True), (0, True)])
def test_a_share_of_errors_up_to_the_largest_is_no_failure(tmp_path: Path, share: float, fails: bool) -> None:
    run = failing(tmp_path, lambda index, _row: "too-long" if index == 6 else None, share)
    assert (run.ended[0].failure is not None) == fails
    assert run.operator.summary({})["error_kinds"] == {"too-long": 6}


def test_a_job_that_failed_for_its_errors_ends_well_with_a_larger_share(tmp_path: Path) -> None:
    run = failing(tmp_path, lambda _index, row: "too-long" if row else "not-json")
    for share, fails in ((0.5, True), (1.0, False)):
        table = {"task": "generate", "prompt": "Q: {question}", "max_error_share": share}
        resumed = Simulation(run.context, job_table(inference=table))
        resumed.run_background()
        resumed.close()
        assert (resumed.ended[0].failure is not None) == fails
        assert resumed.ended[0].failure in (None, run.ended[0].failure)
        assert differences(run.job, resumed.job) == []


def test_kinds_of_errors_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "part-0.jsonl"
    path.write_text("".join(answer(0, row, failed=True, kind=f"{row}{'x' * 999}") for row in range(40)))
    found = check_part(path, 0, 40, "generate")
    assert (found.errors, len(found.error_kinds), found.error_kinds["others"].rows) == (40, 17, 24)
    assert max(map(len, found.error_kinds)) == 80


# --------------------------------------------------------------------------------------------------------------- resume


def interrupted(folder: Path) -> Simulation:
    run = begin(folder)
    for task in run.tasks:
        fetched(run, task)
        run.send_first(task)
    run.run_background()
    run.close()
    return run


def refusal(run: Simulation, **tables: Any) -> str:
    """Resume a job; return why it is refused, after which every file is as before."""
    directory = run.context.directory
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(JobFailedError) as caught:
        Simulation(run.context, job_table(**tables))
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    return str(caught.value)


def test_a_job_whose_parts_are_all_committed_ends_without_workers(tmp_path: Path) -> None:
    run = begin(tmp_path, rows=(2,))
    fetched(run, run.tasks[0])
    run.send_first(run.tasks[0])
    run.close()
    resumed = Simulation(run.context, run.job)
    assert sum(request.count for request in resumed.operator.role_requests()) == 0
    resumed.run_background()
    assert resumed.ended == [EndJob()]
    assert not any(isinstance(effect, StartTask) for effect in resumed.effects)


def test_another_model_dataset_or_setting_is_refused(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    other = {"task": "generate", "prompt": "A: {question}", "temperature": 0.5}
    why = refusal(run, inference=other)
    assert "inference: prompt is 'A: {question}', and was 'Q: {question}'" in why
    assert "inference: temperature is 0.5, and was 0.0" in why
    assert "results.columns is [], and was ['id']" in refusal(run, results={})
    run.context.model = "blake3:" + "2" * 64
    assert "model: files" in refusal(run)
    run.context.model = "blake3:" + "1" * 64
    run.context.dataset.samples = (*ROWS[:-1], 9)
    assert "digest of the dataset's manifest is 'blake3:" in refusal(run)


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    folder = run.context.directory / "results"
    (folder / "part-7.jsonl").write_text("{}\n")
    assert f"{folder} holds part-7.jsonl, which this job did not write" in refusal(run)
    (folder / "part-7.jsonl").unlink()
    part = folder / "part-0.jsonl"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    assert f"{part}: the content is blake3:" in refusal(run)
    part.unlink()
    assert f"the part of slice 0 is missing: {part}" in refusal(run)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("slice", "x", "malformed"),
        ("worker", "nobody", "malformed"),
        ("error_kinds", [1], "malformed"),
        ("error_kinds", {"x": 1}, "malformed"),
        ("slice", 0, "slice 0 was committed before"),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, field: str, value: Any, why: str) -> None:
    run = interrupted(tmp_path)
    path = run.context.directory / JOURNAL
    *lines, last = path.read_text().splitlines()
    record = json.loads(last) | {field: value}
    path.write_text("\n".join([*lines, json.dumps(record), ""]))
    assert why in refusal(run)


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    path = run.context.directory / JOURNAL
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    assert "its inference records are of version 2, and this program reads 1" in refusal(run)


def test_results_of_another_job_are_refused_at_the_start(tmp_path: Path) -> None:
    found = context(tmp_path)
    (found.directory / "results").mkdir()
    (found.directory / "results" / "part-0.jsonl").write_text(answer(0, 0))
    with pytest.raises(JobFailedError, match=r"holds part-0\.jsonl, which this job did not write"):
        Simulation(found, job_table())


# -------------------------------------------------------------------------------------------------------------- dataset


def test_everything_wrong_with_the_dataset_is_named() -> None:
    lines = job_table().dataset_faults(FakeDataset((1, None), columns={"q": "text"}, format=None))
    assert [line.split(":")[0] for line in lines] == [
        "dataset.dataset",
        "dataset.dataset",
        "inference.prompt",
        "results.columns",
    ]
    assert "has no manifest" in lines[0]
    assert "holds safetensors, and generate needs rows of the format jsonl" in lines[1]
    assert lines[2:] == [
        "inference.prompt: dataset 'questions' has no column 'question'; it has q",
        "results.columns: dataset 'questions' has no column 'id'; it has q",
    ]


def test_every_lease_runs_the_same_task(run: Simulation) -> None:
    starts = [effect for effect in run.effects if isinstance(effect, StartTask)]
    assert [start.task.name for start in starts] == ["inference-1", "inference-2", "inference-3"]
    spec: Any = starts[0].spec
    assert {resource.name for resource in spec.resources} == {"model", "slices"}
    assert spec.executor == "inference/transformers"
    assert spec.sends
    settings = json.loads(spec.settings)
    assert settings["model"] == {"type": "causal-lm", "input_names": ["input_ids", "attention_mask"], "path": "model"}
    assert settings["columns"] == ["id"]
    assert settings["inference"]["prompt"] == "Q: {question}"
    assert run.operator.role_requests()[0].spec.executor[0] == ExecutorDescriptor("inference", "transformers")


def test_a_task_that_is_not_running_gets_nothing(run: Simulation) -> None:
    task = run.tasks[0]
    assert run.operator.next_slice(TaskRef(task.name, task.lease, 7), "questions", 0.0) is None
    assert run.operator.next_slice(task, "another", 0.0) is None
    assert isinstance(run.operator.next_slice(task, "questions", 0.0), SliceToUse)
    assert uuid.uuid4() not in run.leases
