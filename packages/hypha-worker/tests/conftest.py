"""A worker on an in-memory network with a scripted scheduler, data node and parameter server around it."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import pytest
from blake3 import blake3
from click.testing import CliRunner, Result
from support.endpoint_helpers import pull_bytes
from support.requirements import skip_outside_ci
from support.scripted_task_scheduler import ENDS, PYTHON, ScriptedTaskScheduler, kind_of
from support.task_bridge_client import BRIDGE
from support.task_settings import aggregation, training

from hypha_net import pubsub, retries, rpc, transfer
from hypha_net.node.health import serve_health
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.datasets import DATA, DataRequest, NotFound, SliceAssigned
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    WHY_NOT,
    LeaseRenewal,
    Rejection,
    ReleaseLease,
    Renewed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import (
    OFFER,
    WORKER_REQUESTS,
    ExecutorDescriptor,
    OfferReceived,
    WorkerOffer,
    WorkerRequest,
    WorkerSpec,
)
from hypha_proto.resources import Resources
from hypha_proto.round_membership import UPDATE_REFUSED, RefusalKnown, UpdateRefused
from hypha_proto.tasks import StatusUpdate, TaskFinished, TaskSpec
from hypha_proto.training_reports import REPORT, Continue, ReportAnswer, ReportTraining
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_worker.cli import main as worker_cli
from hypha_worker.config import WorkerConfig
from hypha_worker.content_cache import ContentCache
from hypha_worker.control.server import socket_path
from hypha_worker.executors.isolation.cgroup import CgroupLayer
from hypha_worker.service import Worker, open_worker, serve

TRAIN = ExecutorDescriptor("train", "script")
SERVER = ExecutorDescriptor("aggregate", "parameter-server")

PREAMBLE = (
    BRIDGE
    + """

def listen(body):
    bridge = Bridge("bridge")
    bridge.request("POST", "/resources/receive", json.dumps(body))
    answer = bridge.getresponse()
    assert answer.status == 200, answer.read()
    while line := answer.readline():
        if line.startswith(b"data:"):
            yield json.loads(line[5:])

work_dir, job = sys.argv[2], json.loads(sys.argv[3])
config = job["settings"]
"""
)


@pytest.fixture(autouse=True)
def no_retries_for_unavailable_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at once when no peer provides a file; tests of the retries set their own delays."""
    for name in ("NO_PROVIDER", "WRONG_CONTENT"):
        monkeypatch.setattr(retries, name, retries.ONCE)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again after a twentieth of the usual pauses."""
    usual = retries.jittered
    monkeypatch.setattr(retries, "jittered", lambda pauses, failures: usual(pauses, failures) / 20)


@dataclass(frozen=True)
class End:
    """The end of an attempt, as its worker has reported it."""

    lease: uuid.UUID
    task: str
    attempt: int
    outcome: str
    reason: str
    exit_code: int | None
    last_lines: tuple[str, ...]
    bytes_sent: int
    bytes_received: int


@dataclass
class Scheduler:
    """A scripted scheduler: leases a worker, starts tasks, and records the messages that it receives."""

    endpoint: MemoryEndpoint
    ends: list[End] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    """Kinds of all status updates."""
    reports: list[ReportTraining] = field(default_factory=list)
    refused: list[UpdateRefused] = field(default_factory=list)
    answer: Callable[[ReportTraining], ReportAnswer] = lambda _report: Continue()
    offers: dict[uuid.UUID, tuple[PeerId, WorkerOffer]] = field(default_factory=dict)
    free_at_end: list[Resources] = field(default_factory=list)
    worker: Worker | None = None
    tasks: ScriptedTaskScheduler = field(init=False)
    _leases: dict[tuple[str, int], uuid.UUID] = field(default_factory=dict)
    """Lease of each attempt that `dispatch` has started."""
    _awaited: int = 0
    """Ends that `ended` has returned."""

    def __post_init__(self) -> None:
        self.tasks = ScriptedTaskScheduler(self.endpoint, on_update=self._on_update)

    @property
    def job_id(self) -> uuid.UUID:
        """The job of all its tasks."""
        return self.tasks.job_id

    @property
    def sender(self) -> AttemptId:
        """The task of another worker that sends files."""
        return self.tasks.name("sender")

    def listen(self) -> None:
        """Serve a scheduler's protocols."""
        rpc.serve(self.endpoint, OFFER, self._offer)
        rpc.serve(self.endpoint, REPORT, self._report)
        rpc.serve(self.endpoint, UPDATE_REFUSED, self._refused)
        self.tasks.listen()

    async def _offer(self, peer: PeerId, offer: WorkerOffer) -> OfferReceived:
        self.offers[offer.request_id] = (peer, offer)
        self.tasks.notify()
        return OfferReceived()

    async def _report(self, _peer: PeerId, report: ReportTraining) -> ReportAnswer:
        self.reports.append(report)
        self.tasks.notify()
        return self.answer(report)

    def _on_update(self, report: StatusUpdate) -> None:
        kind = kind_of(report)
        self.statuses.append(kind)
        if kind in ENDS:
            about = getattr(report, kind)
            self.ends.append(
                End(
                    self._leases.get((report.attempt.task, report.attempt.number), uuid.UUID(int=0)),
                    report.attempt.task,
                    report.attempt.number,
                    kind,
                    getattr(about, "reason", ""),
                    0 if report.finished is not None else getattr(about, "exit_code", None),
                    getattr(about, "last_lines", ()),
                    about.bytes_sent,
                    about.bytes_received,
                )
            )
            if self.worker is not None:
                self.free_at_end.append(self.worker.lease_manager.free.resources)
        self.tasks.notify()

    async def _refused(self, _peer: PeerId, message: UpdateRefused) -> RefusalKnown:
        self.refused.append(message)
        self.tasks.notify()
        return RefusalKnown()

    async def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        """Wait until `condition` holds; return its value."""
        return await self.tasks.until(condition, seconds)

    def request(self, executor: ExecutorDescriptor = TRAIN, bid: float = 100.0, **amounts: float) -> WorkerRequest:
        """Make a request for one worker."""
        spec = WorkerSpec(resources=Resources(**amounts), executor=(executor,))
        return WorkerRequest(id=uuid.uuid4(), spec=spec, bid=bid, timeout_ms=5000)

    async def hire(self, executor: ExecutorDescriptor = TRAIN, bid: float = 100.0, **amounts: float) -> uuid.UUID:
        """Publish requests until an offer is accepted; return the lease. A late offer has expired."""
        with anyio.fail_after(30):
            while True:
                request = self.request(executor, bid, **(amounts or {"cpu": 1.0}))
                await pubsub.publish(self.endpoint, WORKER_REQUESTS, request)
                with anyio.move_on_after(3.0):
                    peer, offer = await self.until(lambda wanted=request.id: self.offers.get(wanted))
                    if isinstance(await self.renew(peer, offer.id), Renewed):
                        return offer.id

    async def why_not(self, peer: PeerId, executor: ExecutorDescriptor = TRAIN) -> tuple[Rejection, ...]:
        """Ask a worker why it would make no offer."""
        question = WhyNot(request=self.request(executor, cpu=1.0))
        return (await rpc.call(self.endpoint, peer, WHY_NOT, question)).rejections

    async def renew(self, peer: PeerId, lease: uuid.UUID) -> LeaseRenewal:
        return await rpc.call(self.endpoint, peer, RENEW_LEASE, RenewLease(id=lease))

    async def dispatch(self, lease: uuid.UUID, spec: TaskSpec, task: str = "", attempt: int = 0) -> str:
        """Start an attempt, by default at a new task; return the kind of its first report."""
        task = task or f"task-{len(self._leases)}"
        self._leases[task, attempt] = lease
        self.tasks.define(lease, task, attempt, start=spec)
        await self.until(lambda: self.tasks.of(task, attempt))
        return self.tasks.kinds(task, attempt)[0]

    def task_on(self, lease: uuid.UUID) -> str:
        """Return the task that `dispatch` has started last on a lease."""
        return next(task for (task, _), other in reversed(self._leases.items()) if other == lease)

    async def release(self, peer: PeerId, lease: uuid.UUID) -> bool:
        return (await rpc.call(self.endpoint, peer, RELEASE_LEASE, ReleaseLease(id=lease))).known

    async def ended(self, seconds: float = 30.0) -> End:
        """Return the report of the next attempt's end, also one that came before this call."""
        await self.until(lambda: len(self.ends) > self._awaited, seconds)
        self._awaited += 1
        return self.ends[self._awaited - 1]

    async def failure(self) -> str:
        """Return why the next attempt that ends has failed."""
        end = await self.ended()
        assert end.outcome == "failed", end
        return end.reason


@dataclass
class PushReceiver:
    """Accepts and records what is pushed to a peer."""

    endpoint: MemoryEndpoint
    folder: Path
    files: list[tuple[PeerId, PushHeader, bytes]] = field(default_factory=list)
    refuse: str = ""

    async def accept(self, peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        if self.refuse:
            return Refusal(reason=self.refuse)
        path = self.folder / f"{uuid.uuid4()}"

        async def on_complete(_size: int, _digest: str) -> None:
            self.files.append((peer, header, path.read_bytes()))

        return transfer.FilePushTarget(path, 1 << 30, on_complete)


@dataclass
class Lab:
    """A worker under test with the peers around it."""

    SERVER: ClassVar[ExecutorDescriptor] = SERVER

    network: MemoryNetwork
    folder: Path
    worker: Worker
    scheduler: Scheduler
    data: MemoryEndpoint
    server: MemoryEndpoint

    @property
    def peer(self) -> PeerId:
        return self.worker.endpoint.peer_id

    def train_spec(self, **changes: Any) -> TaskSpec:
        """Make a task that trains, with data from the scheduler, which exchanges updates with the `server` peer."""
        config = training(self.scheduler.endpoint.peer_id, self.server.peer_id, **changes)
        return TaskSpec(executor="train/script", training=config)

    def aggregate_spec(self, senders: list[PeerId], receivers: list[PeerId], **changes: Any) -> TaskSpec:
        config = aggregation(senders, receivers, **changes)
        return TaskSpec(executor="aggregate/parameter-server", aggregation=config)

    async def push(self, sender: MemoryEndpoint, number: int, content: bytes | Path, kind: str = OUTER_UPDATE) -> None:
        """Push a file for a task of the scheduler's job."""
        size, digest = await transfer.describe(content)
        about, scheduler = self.scheduler.sender, self.scheduler.endpoint.peer_id
        header = PushHeader(about, number, kind, "../outer.safetensors", size, digest, scheduler)
        await transfer.push(sender, self.peer, content, header)

    async def content_of(self, finished: TaskFinished, name: str, worker: PeerId | None = None) -> bytes:
        """Return the first file of an output, as another peer pulls it."""
        output = next(output for output in finished.outputs if output.name == name)
        request = PullRequest(dataset=output.dataset, index=0)
        return await pull_bytes(self.server, worker or self.peer, request, max_bytes=1 << 20)

    def receive_pushes(self, endpoint: MemoryEndpoint) -> PushReceiver:
        """Let a peer receive files."""
        receiver = PushReceiver(endpoint, self.folder)
        transfer.serve_pushes(endpoint, receiver.accept)
        return receiver

    def serve_slices(self, count: int) -> None:
        """Let the scheduler assign `count` slices and the data peer serve them."""
        indices = iter(range(count))

        async def assign(_peer: PeerId, _request: DataRequest) -> SliceAssigned | NotFound:
            if (index := next(indices, None)) is None:
                return NotFound()
            digest = f"blake3:{blake3(b'slice %d' % index).hexdigest()}"
            return SliceAssigned(data_provider=self.data.peer_id, index=index, epoch=0, digest=digest)

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            return transfer.PullSource(b"slice %d" % request.index)

        rpc.serve(self.scheduler.endpoint, DATA, assign)
        transfer.serve_pulls(self.data, resolve)

    def write_script(self, text: str) -> None:
        """Write the script that the executor runs."""
        (self.folder / "script.py").write_text(PREAMBLE + text)

    async def start(self, script: str, spec: TaskSpec | None = None, **amounts: float) -> uuid.UUID:
        """Run a script as a task; return its lease."""
        self.write_script(script)
        lease = await self.scheduler.hire(**amounts)
        assert await self.scheduler.dispatch(lease, spec or self.train_spec()) == "started"
        return lease

    def let_all_go(self) -> None:
        """Let the jobs end that wait for a file ``go`` in their folder."""
        for folder in self.folder.glob("work/hypha-*"):
            (folder / "go").touch()

    def left_behind(self) -> list[str]:
        """Return the names in the work directory, without the logs and the owner's folder, which stay."""
        return sorted(path.name for path in (self.folder / "work").iterdir() if path.name not in ("logs", "control"))


def worker_config(folder: Path, **changes: Any) -> WorkerConfig:
    values = {
        "cert_pem": folder / "x-cert.pem",
        "key_pem": folder / "x-key.pem",
        "trust_pem": folder / "x-trust.pem",
        "gateway_addresses": ["/ip4/127.0.0.1/tcp/4001"],
        "work_dir": folder / "work",
        "resources": {"cpu": 2.0, "memory": 4.0, "storage": 1.0, "default": {"storage": 0.5}},
        "offer": {"price": 50.0},
        "executors": [
            {
                "class": "train",
                "name": "script",
                "runtime": "process",
                "cmd": sys.executable,
                "args": ["-I", "-S", str(folder / "script.py"), "{SOCKET_PATH}", "{WORK_DIR}", "{JOB_JSON}"],
            },
            {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"},
        ],
    }
    return WorkerConfig.model_validate(json.loads(json.dumps(values | changes, default=str)))


@asynccontextmanager
async def open_lab(folder: Path, **changes: Any) -> AsyncIterator[Lab]:
    network = MemoryNetwork()
    async with (
        network.endpoint("scheduler") as scheduler,
        network.endpoint("data") as data,
        network.endpoint("server") as server,
        network.endpoint("worker") as endpoint,
    ):
        script = Scheduler(scheduler)
        script.listen()
        async with open_worker(worker_config(folder, **changes), endpoint) as worker:
            script.worker = worker
            yield Lab(network, folder, worker, script, data, server)


@pytest.fixture
def in_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractAsyncContextManager[Lab]]:
    """Return a function that opens a `Lab`."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return partial(open_lab, tmp_path)


@pytest.fixture
def in_task_lab(in_lab: Callable[..., AbstractAsyncContextManager[Lab]]) -> Callable[..., Any]:
    """Return a function that opens a `Lab`, a scripted scheduler of tasks and one lease that is renewed."""

    @asynccontextmanager
    async def opened(
        requested: str = "shell/python", **options: Any
    ) -> AsyncIterator[tuple[Lab, ScriptedTaskScheduler, uuid.UUID]]:
        async with in_lab(**({"executors": [PYTHON]} | options)) as lab, anyio.create_task_group() as group:
            tasks = lab.scheduler.tasks
            lease = await lab.scheduler.hire(ExecutorDescriptor.parse(requested), cpu=1.0)
            group.start_soon(tasks.keep, lab.peer, lease)
            yield lab, tasks, lease
            group.cancel_scope.cancel()

    return opened


@dataclass
class Site:
    """A worker program as its command line runs it, in one process with a scheduler."""

    lab: Any
    node: Node
    terminated: anyio.Event
    socket: Path
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when the program has returned."""

    async def health(self) -> Health:
        return await rpc.call(self.lab.scheduler.endpoint, self.lab.peer, HEALTH_CHECK, HealthRequest())

    async def until_draining(self) -> None:
        while (await self.health()).reason != "draining":
            await anyio.sleep(0.01)

    async def start_job(self, script: str) -> uuid.UUID:
        """Run a script as a job until its process has made a folder ``began``; return its lease."""
        lease = await self.lab.start(f"os.mkdir(work_dir + '/began')\n{script}")
        while not list(self.lab.folder.glob("work/hypha-*/began")):
            await anyio.sleep(0.01)
        return lease

    async def command(self, *arguments: str) -> Result:
        """Run a command of ``hypha-worker`` on this worker."""
        run, (name, *options) = CliRunner().invoke, arguments
        return await anyio.to_thread.run_sync(
            lambda: run(worker_cli, [name, "--socket", str(self.socket), *options]), abandon_on_cancel=True
        )


def listens(path: Path) -> bool:
    """Return whether a program listens at a socket, which may be left by one that was killed."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@pytest.fixture
def on_site(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Site]]:
    """Return a function that opens a worker program; it ends with the context."""

    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncIterator[Site]:
        network = MemoryNetwork()
        async with (
            network.endpoint("worker") as endpoint,
            network.endpoint("scheduler") as scheduler,
            pubsub.subscribe(scheduler, WORKER_REQUESTS),  # a worker alone on the topic waits to become ready
            anyio.create_task_group() as tasks,
        ):
            await scheduler.connect(endpoint.addresses[0])
            terminated = anyio.Event()
            node = Node(endpoint, tasks, drain_on_sigterm=lambda _timeout: terminated)
            config = worker_config(tmp_path, **changes)
            serve_health(endpoint, node.readiness, role="worker", version="1")
            script, worker = Scheduler(scheduler), SimpleNamespace(endpoint=endpoint)
            script.listen()
            lab = Lab(network, tmp_path, worker, script, scheduler, scheduler)  # type: ignore[arg-type]
            site = Site(lab, node, terminated, socket_path(config.work_dir))

            async def program() -> None:
                await serve(config, node)
                site.ended.set()

            tasks.start_soon(program)
            with anyio.fail_after(60):
                while not listens(site.socket) or not node.readiness.is_ready:
                    await anyio.sleep(0.01)
                yield site
            tasks.cancel_scope.cancel()
        assert not socket_path(tmp_path / "work").exists()

    return opened


@pytest.fixture
def cgroups(tmp_path: Path) -> Iterator[CgroupLayer]:
    """The layer `cgroup`; where no groups can be made, the test fails in CI and is skipped elsewhere."""
    layer = CgroupLayer(tmp_path)
    finding = layer.probe()
    if not finding.works:
        skip_outside_ci(finding.detail)
    yield layer
    layer.sweep()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ContentCache]:
    """An open cache of a gibibyte."""
    opened = ContentCache(tmp_path / "cache", 1 << 30)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def worker_toml(tmp_path: Path) -> str:
    """The path of a configuration whose work directory is the folder of the test."""
    config = tmp_path / "worker.toml"
    config.write_text(
        'work_dir = "."\ncert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/127.0.0.1/tcp/1"]\n'
    )
    return str(config)


@pytest.fixture
def make_config() -> Callable[..., WorkerConfig]:
    return worker_config
