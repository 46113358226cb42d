"""A job that changes its folder while the worker reads and writes there: nothing outside the folder is touched.

The hostile job is a real process with the rights of the worker: no sandbox helps here.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from support.path_swaps import swapping
from support.task_settings import all_of, training
from support.training_bridge import ATTEMPT, make_bridge, make_context

from hypha_net import transfer
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.bridge_api import Transfer
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    All,
    One,
    PeersReference,
    SliceAddress,
)
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader
from hypha_worker.bridge.backend import BridgeBackend
from hypha_worker.errors import BridgeError
from hypha_worker.task_storage import TaskStorage
from hypha_worker.tasks.output_files import OutputError
from hypha_worker.tasks.output_store import OutputOwner, OutputStore

SECRET = b"the worker's private key"
RACES = 1000
PEER = PeerId.parse("12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5")


@dataclass
class Job:
    """A training job's side of the bridge, and the peer that it exchanges files with."""

    backend: BridgeBackend
    peer: MemoryEndpoint
    work_dir: Path
    outside: Path
    """A folder that is none of the job's, with a secret in it."""
    received: list[bytes] = field(default_factory=list)
    """What the peer got."""
    outcomes: Counter[str] = field(default_factory=Counter)
    pushed: int = 0
    claimed: int = 0

    @property
    def _peers(self) -> PeersReference:
        return PeersReference(peers=(self.peer.peer_id,), strategy=All())

    async def send(self, path: str) -> None:
        await self.backend.send(Transfer(reference=self._peers, path=path))

    async def receive(self, folder: str) -> None:
        """Push a file to the job, unless one is left from a refused request, and move it to a folder."""
        if self.pushed == self.claimed:
            await self._push()
        wanted = Transfer(reference=self._peers, path=folder)
        assert await self.backend.receive(wanted) is not None
        self.claimed += 1

    async def _push(self) -> None:
        worker = self.backend.context.contact.endpoint.peer_id
        size, digest = await transfer.describe(b"pushed")
        scheduler = self.backend.context.scheduler
        header = PushHeader(ATTEMPT, 1, OUTER_UPDATE, uuid.uuid4().hex, size, digest, scheduler)
        await transfer.push(self.peer, worker, b"pushed", header)
        self.pushed += 1

    async def fetch(self, folder: str) -> None:
        address = SliceAddress(dataset="data", index=0)
        wanted = PeersReference(peers=(self.peer.peer_id,), strategy=One(), resource=address)
        await self.backend.fetch(Transfer(reference=wanted, path=folder))

    async def attempt(self, request: Awaitable[None]) -> None:
        """Await a request; count what became of it."""
        try:
            await request
            self.outcomes["served"] += 1
        except BridgeError as error:
            self.outcomes["refused" if error.status in (400, 404) else str(error)] += 1

    @property
    def is_raced(self) -> bool:
        """Whether there were `RACES` requests, of which some met each state; at most ten times as many."""
        count = self.outcomes.total()
        return count >= RACES and (len(self.outcomes) > 1 or count >= 10 * RACES)

    def check_untouched(self) -> None:
        """Check that nothing outside was read or written."""
        assert os.listdir(self.outside) == ["secret"]
        assert (self.outside / "secret").read_bytes() == SECRET
        assert SECRET not in self.received


@asynccontextmanager
async def open_job(folder: Path) -> AsyncIterator[Job]:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        worker, peer = [await stack.enter_async_context(network.endpoint(name)) for name in ("worker", "peer")]
        (outside := folder / "outside").mkdir()
        (outside / "secret").write_bytes(SECRET)
        context = make_context(folder, worker, peer.peer_id, training(peer.peer_id, data=all_of(peer.peer_id)))
        bridge, backend = make_bridge(context)
        job = Job(backend, peer, context.work_dir, outside)

        async def accept_sent(_sender: Any, _header: PushHeader) -> transfer.FilePushTarget:
            target = folder / f"{uuid.uuid4()}"

            async def on_complete(_size: int, _digest: str) -> None:
                job.received.append(target.read_bytes())
                target.unlink()

            return transfer.FilePushTarget(target, 1 << 20, on_complete)

        async def serve(_sender: Any, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(b"served")

        transfer.serve_pushes(peer, accept_sent)
        transfer.serve_pulls(peer, serve)
        yield job
        bridge.close()
        job.check_untouched()


@pytest.fixture
def in_job(tmp_path: Path) -> Callable[..., Any]:
    return partial(open_job, tmp_path)


InJob = Callable[..., Any]


async def test_a_link_where_pushed_files_were_kept_is_not_followed(in_job: InJob) -> None:
    async with in_job() as job:
        (job.work_dir / ".inbox").symlink_to(job.outside)
        await job.receive("in")
        job.check_untouched()


@pytest.mark.nightly
async def test_a_file_that_is_swapped_while_it_is_sent_leaks_nothing(in_job: InJob) -> None:
    """A symbolic link, a hard link and a FIFO take the file's place, each a third of the time."""
    async with in_job() as job:
        for name in ("link", "hard", "fifo"):
            (job.work_dir / name).write_bytes(b"mine")
        (job.work_dir / "link.other").symlink_to(job.outside / "secret")
        (job.work_dir / "hard.other").hardlink_to(job.outside / "secret")
        os.mkfifo(job.work_dir / "fifo.other")
        with swapping(job.work_dir, "link", "hard", "fifo"):
            names = itertools.cycle(("link", "hard", "fifo"))
            while not job.is_raced:
                await job.attempt(job.send(next(names)))
        assert set(job.received) == {b"mine"}
        assert set(job.outcomes) == {"served", "refused"}


@pytest.mark.nightly
async def test_a_folder_that_is_swapped_for_a_link_leads_nowhere(in_job: InJob) -> None:
    async with in_job() as job:
        (job.work_dir / "in").mkdir()
        (job.work_dir / "in" / "secret").write_bytes(b"mine")
        (job.work_dir / "in.other").symlink_to(job.outside)
        with swapping(job.work_dir, "in"):
            requests = itertools.cycle(((job.receive, "in"), (job.fetch, "in"), (job.send, "in/secret")))
            while not job.is_raced:
                request, path = next(requests)
                await job.attempt(request(path))
        assert set(job.received) == {b"mine"}
        assert set(job.outcomes) == {"served", "refused"}


@pytest.mark.parametrize("copy", [True, False], ids=["while it runs", "after its end"])
async def test_an_output_that_is_swapped_while_it_is_stored_leaks_nothing(tmp_path: Path, copy: bool) -> None:
    """After its end, too: a process that survived may still change what is taken."""
    work_dir, outside, store = tmp_path / "job", tmp_path / "outside", OutputStore(tmp_path / "store")
    work_dir.mkdir()
    outside.mkdir()
    owner = OutputOwner(PEER, AttemptId(uuid.uuid4(), "t", 0), uuid.uuid4())
    outcomes: Counter[str] = Counter()

    async def take(storage: TaskStorage) -> None:
        try:
            output = await store.store(owner, "o", "out", storage, 0.0, copy=copy)
        except OutputError:
            outcomes["refused"] += 1
        else:
            [held] = store.find_owned(PEER, owner.attempt.job_id, ())
            outcomes.update(held.file_path(index).read_bytes().decode() for index in range(len(output.files)))
            await store.remove([held])

    (work_dir / "out").mkdir()
    (outside / "secret").write_bytes(SECRET)
    (work_dir / "out.other").symlink_to(outside)
    with swapping(work_dir, "out"):
        storage = TaskStorage(work_dir, 1 << 24)
        while outcomes.total() < RACES // 4 or (len(outcomes) < 2 and outcomes.total() < RACES):
            with suppress(OSError, BridgeError), storage.files.staged() as staged:  # it is being swapped
                staged.write_bytes(b"mine")
                storage.files.publish(staged, PurePosixPath("out/secret"))
            await take(storage)
    assert set(outcomes) == {"refused", "mine"}
    assert (outside / "secret").read_bytes() == SECRET
