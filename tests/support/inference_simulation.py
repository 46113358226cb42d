"""A job runner and workers for the inference operator: they play whole jobs on real files, without network or clock.

`Simulation` carries out effects as the runner does, and lets a test, or a seeded generator, act as the workers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from blake3 import blake3

from hypha_net.errors import TransferRefusedError
from hypha_net.transfer import PullSource
from hypha_proto.codec import to_json
from hypha_proto.datasets import JSONL, Manifest, SliceEntry
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import One, PeersReference, SliceAddress
from hypha_proto.transfer import TASK_RESULT, PushHeader, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import Artifact
from hypha_scheduler.jobs.journal import JOURNAL, Journal, read_journal
from hypha_scheduler.strategies.base import (
    EndJob,
    Lease,
    PushTarget,
    RetryAfter,
    RunInBackground,
    SliceToUse,
    StartTask,
    StopTask,
    TaskEnded,
    TaskRef,
    TaskStarted,
    TaskState,
    WriteJournal,
)
from hypha_scheduler.strategies.inference.config import InferenceJobConfig
from hypha_scheduler.strategies.inference.operator import InferenceOperator
from hypha_scheduler.strategies.inference.strategy import STRATEGY

PEERS = [PeerId.from_public_key(bytes([number]) * 32) for number in range(1, 9)]
SCHEDULER = PeerId.from_public_key(bytes([99]) * 32)
DATASET = "questions"
COLUMNS = {"question": "text", "id": "integer"}


def job_table(**changes: Any) -> InferenceJobConfig:
    """Return a job that generates text; `changes` replace whole tables."""
    table: dict[str, Any] = {
        "type": "inference",
        "dataset": DATASET,
        "model": {"path": "model", "type": "causal-lm"},
        "inference": {"task": "generate", "prompt": "Q: {question}"},
        "results": {"columns": ["id"]},
        "resources": {"num_workers": 3, "max_workers": 4},
    }
    return InferenceJobConfig.model_validate(
        {key: value for key, value in (table | changes).items() if value is not None}
    )


@dataclass
class FakeDataset:
    """Dataset whose slices have these numbers of rows."""

    samples: Sequence[int | None]
    columns: Mapping[str, str] | None = field(default_factory=lambda: dict(COLUMNS))
    format: str | None = JSONL
    name: str = DATASET
    provider: PeerId = SCHEDULER
    labels: Sequence[str] | None = None

    def describe(self, index: int) -> str:
        return f"slice {index}"

    def manifest(self) -> bytes:
        digest = "blake3:" + "0" * 64
        entries = tuple(
            SliceEntry(file=f"{n}", samples=count or 1, size=1, digest=digest) for n, count in enumerate(self.samples)
        )
        return to_json(Manifest, Manifest(dataset=self.name, slices=entries))


@dataclass
class FakeContext:
    """What the strategy uses of the scheduler."""

    directory: Path
    dataset: FakeDataset
    model: str = "blake3:" + "1" * 64
    """Digest of the model's file."""
    job_id: uuid.UUID = field(default_factory=uuid.uuid4)
    scheduler: PeerId = SCHEDULER
    first_attempt: int = 0
    notices: list[tuple[str, object]] = field(default_factory=list)
    has_data_nodes: bool = True

    def reaches(self, dataset: str) -> bool:
        assert dataset == self.dataset.name
        return self.has_data_nodes

    async def open_dataset(self, source: Any, *, timeout: float, manifest: str = "manifest.json") -> FakeDataset:
        (self.directory / manifest).write_bytes(self.dataset.manifest())
        return self.dataset

    async def prepare_artifact(self, table: Any, name: str, copy: Path) -> Artifact:
        where = SliceAddress(dataset=f"{self.job_id}/{name}", index=0)
        reference = PeersReference(peers=(SCHEDULER,), strategy=One(), resource=where, filenames=("model.safetensors",))
        return Artifact(reference, (PullSource(copy, self.model),))

    def notify(self, name: str, message: object = None) -> None:
        self.notices.append((name, message))


def finish(work: Awaitable[Any]) -> Any:
    """Run a coroutine that waits for nothing: work in threads is done in place."""
    try:
        work.__await__().send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for something")


async def in_place(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """Do the work of a thread at once, instead of `anyio.to_thread.run_sync`."""
    return work(*arguments)


def answer(index: int, row: int, *, failed: bool = False, kind: str = "TooLong") -> str:
    result = {"error": {"kind": kind, "detail": f"{row + 9} tokens"}} if failed else {
        "prompt": "Q", "text": f"{index}/{row}", "tokens": 2, "finish": "stop", "id": row,
    }  # fmt: skip
    return json.dumps({"slice": index, "row": row} | result) + "\n"


def part_of(index: int, rows: int) -> bytes:
    """Return a valid part, of which every fifth row is an error."""
    return "".join(answer(index, row, failed=row % 5 == 4) for row in range(rows)).encode()


@dataclass
class Simulation:
    """One run of a job, from `open` to its end or to a crash."""

    context: FakeContext
    job: InferenceJobConfig
    now: float = 0.0
    peers: list[PeerId] = field(default_factory=lambda: list(PEERS))
    """Workers, those that are leased first at the front."""
    operator: InferenceOperator = field(init=False)
    leases: dict[uuid.UUID, Lease] = field(default_factory=dict)
    running: dict[uuid.UUID, TaskRef] = field(default_factory=dict)
    draining: set[uuid.UUID] = field(default_factory=set)
    """Leases whose executor was told to drain."""
    in_hand: dict[uuid.UUID, list[int]] = field(default_factory=dict)
    background: list[RunInBackground] = field(default_factory=list)
    effects: list[Any] = field(default_factory=list)
    ended: list[EndJob] = field(default_factory=list)
    computed: int = 0
    """Slices that executors were given."""
    part: Callable[[int, int], bytes] = part_of
    """Returns the part of a slice with some rows."""
    sent: list[tuple[TaskRef, PushHeader, bytes]] = field(default_factory=list)
    """Parts that were sent before."""

    def __post_init__(self) -> None:
        path = self.context.directory / JOURNAL
        if not path.exists():
            with Journal(path) as journal:
                journal.record("accepted", job_id=str(self.context.job_id), job=self.job.model_dump(mode="json"))
        self.opened = STRATEGY.open(self.job, self.context, read_journal(path))
        self.operator = finish(self.opened.__aenter__())
        self.journal = Journal(path)
        self.tell(self.operator.on_start)

    def close(self) -> None:
        """End the run: by its end, or as a crash does."""
        self.journal.__exit__()
        finish(self.opened.__aexit__(None, None, None))

    # ------------------------------------------------------------------------------------------------ as the runner

    def tell(self, event: Callable[..., Any], *arguments: Any) -> None:
        self.carry_out(event(*arguments, self.now))

    def carry_out(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case WriteJournal(kind, fields):
                    self.journal.append(kind, **fields)
                case RunInBackground():
                    self.background.append(effect)
                case EndJob():
                    self.ended.append(effect)
                case StartTask(task=task) if task.lease.id in self.leases:
                    self.running[task.lease.id] = task
                    self.in_hand[task.lease.id] = []
                    self.tell(self.operator.on_task_update, task, TaskStarted())
                case StopTask(task=task, drain_seconds=seconds) if self.running.get(task.lease.id) == task:
                    if seconds:
                        self.draining.add(task.lease.id)
                    else:
                        self.leases.pop(task.lease.id)
                        self.end(task, TaskState.CANCELLED)
        self.release_surplus()

    def unusable(self) -> list[uuid.UUID]:
        """Return the idle leases of workers that the job excludes."""
        excluded = {peer for request in self.operator.role_requests() for peer in request.excluded}
        return [id for id, lease in self.leases.items() if lease.peer in excluded and id not in self.running]

    def release_surplus(self) -> None:
        if len(unusable := self.unusable()) < len(self.leases):
            for lease in unusable:
                del self.leases[lease]
        wanted = sum(request.count for request in self.operator.role_requests())
        idle = [lease for lease in self.leases if lease not in self.running]
        for lease in idle[::-1][: max(0, len(self.leases) - wanted)]:
            del self.leases[lease]

    def end(self, task: TaskRef, state: TaskState = TaskState.FINISHED, code: int | None = None) -> None:
        del self.running[task.lease.id]
        self.in_hand.pop(task.lease.id)
        self.draining.discard(task.lease.id)
        self.tell(self.operator.on_task_update, task, TaskEnded(state, "it ended", code))

    def run_background(self, count: int | None = None) -> None:
        """Do work that waits, or only the first of it."""
        for effect in self.background[:count]:
            self.background.remove(effect)
            outcome: object
            try:
                outcome = finish(effect.work())
            except (JobFailedError, OSError) as error:
                outcome = error
            self.tell(self.operator.on_effect_result, effect.tag, outcome)

    def pass_deadlines(self) -> None:
        while (at := self.operator.next_deadline()) is not None and at <= self.now:
            self.tell(self.operator.on_deadline)

    def acquire(self) -> None:
        """Deliver all leases that are wanted."""
        wanted = sum(request.count for request in self.operator.role_requests())
        excluded = {peer for request in self.operator.role_requests() for peer in request.excluded}
        free = [peer for peer in self.peers if peer not in {lease.peer for lease in self.leases.values()} | excluded]
        missing = wanted - len(self.leases) + len(self.unusable())
        new = [Lease(uuid.uuid4(), peer, "inference", 1.0) for peer in free[: max(0, missing)]]
        if new:
            self.leases |= {lease.id: lease for lease in new}
            self.tell(self.operator.on_leases_acquired, new)

    def lose(self, lease: uuid.UUID) -> None:
        lost, task = self.leases.pop(lease), self.running.get(lease)
        self.tell(self.operator.on_lease_lost, lost, "it is gone")
        if task is not None:
            self.end(task, TaskState.FAILED)

    # ---------------------------------------------------------------------------------------------- as the executors

    @property
    def tasks(self) -> list[TaskRef]:
        return [self.running[lease] for lease in self.leases if lease in self.running]

    def fetch(self, task: TaskRef) -> int | RetryAfter | None:
        """Ask for a slice; an executor that gets none and has none in hand exits."""
        found = self.operator.next_slice(task, DATASET, self.now)
        if isinstance(found, SliceToUse) and found.index in self.in_hand[task.lease.id]:
            return RetryAfter(0.0)  # it computes this one already
        if isinstance(found, SliceToUse):
            self.computed += 1
            self.in_hand[task.lease.id].append(found.index)
            return found.index
        if found is None and not self.in_hand[task.lease.id]:
            self.end(task, TaskState.FINISHED, 0)
        return found

    def header(self, task: TaskRef, name: str, content: bytes) -> PushHeader:
        return PushHeader(
            attempt=task.id_in(self.context.job_id), round=0, kind=TASK_RESULT, name=name, size=len(content),
            digest=f"blake3:{blake3(content).hexdigest()}", scheduler=self.context.scheduler,
        )  # fmt: skip

    def begin_push(self, task: TaskRef, name: str, content: bytes) -> Callable[[], str | None]:
        """Begin to send a file; the result completes it, and returns None for a receipt or why it was refused."""
        header = self.header(task, name, content)
        target, effects = self.operator.on_push_request(task, header, self.now)
        self.carry_out(effects)
        return partial(self._complete, task, header, content, target)

    def _complete(self, task: TaskRef, header: PushHeader, content: bytes, target: PushTarget | Refusal) -> str | None:
        if isinstance(target, Refusal):
            return target.reason
        assert len(content) <= target.max_bytes
        target.path.write_bytes(content)
        try:
            assert target.prepare is not None
            finish(target.prepare(target.path))
        except TransferRefusedError as error:
            return error.reason
        finally:
            notices, self.context.notices = self.context.notices, []
            for name, message in notices:
                self.carry_out(self.operator.on_message(None, name, message, self.now)[1])
        if self.running.get(task.lease.id) != task:
            self.tell(self.operator.on_late_push_complete, task, header, target.path)
            return None
        self.tell(self.operator.on_push_complete, task, header, target.path, header.digest)
        self.sent.append((task, header, content))
        return None

    def push(self, task: TaskRef, index: int, content: bytes | None = None) -> str | None:
        """Send a part, by default the right one; return None for a receipt, or why it was refused."""
        right = self.part(index, self.context.dataset.samples[index] or 0)
        return self.begin_push(task, f"part-{index}.jsonl", right if content is None else content)()

    def send_first(self, task: TaskRef) -> None:
        """Send the part of the slice that was fetched first; an executor that is told to drain then exits."""
        self.push(task, self.in_hand[task.lease.id].pop(0))
        if task.lease.id in self.draining and self.running.get(task.lease.id) == task:
            self.end(task, TaskState.FINISHED, 0)

    def settle(self, limit: int = 10_000) -> None:
        """Let all work be done without further faults."""
        for _ in range(limit):
            if self.ended:
                return
            self.now += 1.0
            self.acquire()
            for task in self.tasks:
                if self.running.get(task.lease.id) == task and self.in_hand[task.lease.id]:
                    self.send_first(task)
                elif self.running.get(task.lease.id) == task:
                    self.fetch(task)
            self.run_background()
            self.pass_deadlines()
        raise AssertionError("the job does not end")

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [effect.fields for effect in self.effects if getattr(effect, "name", None) == name]


def faults(random: Random) -> Iterator[str]:
    """Yield what happens next, most often something ordinary."""
    ordinary = ["fetch"] * 6 + ["send"] * 6 + ["acquire", "background", "wait"] * 2
    rare = ["lose", "corrupt", "double", "late", "drain", "die", "unusable", "crash"]
    while True:
        yield random.choice(rare if random.random() < 0.15 else ordinary)
