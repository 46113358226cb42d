"""Resources that their holders push to this worker: which pushes are expected, and where they go.

`resource_fetcher` expects a delivery that the scheduler has announced; `task_sessions` passes each push that names one.
A push may come before the announcement, whose answer is on its way: then it waits for it.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import AwaitPush, LocatedFile
from hypha_proto.texts import quote
from hypha_proto.transfer import TASK_RESOURCE, PushHeader, Refusal
from hypha_worker.task_storage import TaskStorage

ANNOUNCE_WAIT: Final = 10.0
"""Seconds for which a push waits for the announcement of its delivery."""
STALL: Final = 60.0
"""Seconds without a byte after which a delivery has failed."""
_POLL: Final = 5.0
_REFUSED: Final = instrumentation.Counter(
    "hypha.worker.deliveries.refused", "{push}", "Pushes of resources that no task here expects."
)


class PushStalledError(Exception):
    """The senders of a delivery have sent nothing for `STALL` seconds."""


@dataclass(slots=True)
class Delivery:
    """The files of one announced delivery."""

    id: uuid.UUID
    job_id: uuid.UUID
    files: Sequence[LocatedFile]
    senders: frozenset[PeerId]
    folder: Path
    """Where they go, each as its index."""
    storage: TaskStorage
    missing: set[int] = field(init=False)
    disk_error: NoSpaceError | OSError | None = None
    """Why a file could not be stored on this machine."""
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.missing = set(range(len(self.files)))

    def accept(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that `peer` is about to push, or a refusal."""
        index = int(header.name) if header.name.isascii() and header.name.isdecimal() and len(header.name) < 8 else -1
        if (reason := self._reason_to_refuse(peer, header, index)) is not None:
            return Refusal(reason=reason)

        async def on_complete(_size: int, _digest: str) -> None:
            self.missing.discard(index)
            self._notify()

        size = self.files[index].size
        target = FilePushTarget(
            path=self.folder / str(index),
            max_bytes=sys.maxsize if size is None else size,
            on_complete=on_complete,
            quota=self.storage,
            on_disk_error=self._fail,
        )
        return self.storage.traffic.counting(target)

    def _reason_to_refuse(self, peer: PeerId, header: PushHeader, index: int) -> str | None:
        if peer not in self.senders:
            return f"{peer} is not announced as a sender of this delivery"
        if header.kind != TASK_RESOURCE or header.attempt.job_id != self.job_id:
            return f"a push of kind {quote(header.kind)} of job {header.attempt.job_id} is not part of this delivery"
        if index not in self.missing:
            return f"file {quote(header.name)} is not wanted, or is here already"
        file = self.files[index]
        if file.digest is not None and header.digest != file.digest:
            return f"file {index} has the digest {header.digest}, and {file.digest} is announced"
        if file.size is not None and header.size != file.size:
            return f"file {index} has {header.size} bytes, and {file.size} are announced"
        return None

    def _fail(self, error: NoSpaceError | OSError) -> None:
        self.disk_error = error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self) -> None:
        """Wait until all files are here.

        Raises:
            PushStalledError: nothing came for `STALL` seconds.
            NoSpaceError: this machine cannot store a file.
            OSError: the same.
        """
        since, seen = anyio.current_time(), self._activity()
        while self.missing:
            with anyio.move_on_after(_POLL):
                await self._changed.wait()
            if self.disk_error is not None:
                raise self.disk_error
            if (now := self._activity()) != seen:
                since, seen = anyio.current_time(), now
            elif anyio.current_time() >= since + STALL:
                raise PushStalledError(f"{len(self.missing)} of {len(self.files)} files were not pushed")

    def _activity(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Return what changes whenever bytes come: incomplete files are written in the same folder."""
        parts = sorted((part.name, part.stat().st_mtime_ns) for part in self.folder.glob(".*.part"))
        return len(self.missing), tuple(parts)


class ResourcePushes:
    """All deliveries that tasks of this worker expect."""

    def __init__(self) -> None:
        self._expected: dict[uuid.UUID, Delivery] = {}
        self._locating: Counter[uuid.UUID] = Counter()
        """Questions for a resource that are not answered yet, by job."""
        self._changed = anyio.Event()

    @contextmanager
    def locating(self, job_id: uuid.UUID) -> Iterator[None]:
        """Let pushes for a job wait for their announcement while the context is open.

        The caller goes on to `expecting` without waiting for anything, so that they find it there.
        """
        self._locating[job_id] += 1
        try:
            yield
        finally:
            self._locating[job_id] -= 1
            self._locating += Counter()  # drops those that are zero
            self._notify()

    @contextmanager
    def expecting(
        self, announced: AwaitPush, job_id: uuid.UUID, folder: Path, storage: TaskStorage
    ) -> Iterator[Delivery]:
        """Accept the pushes of a delivery while the context is open."""
        senders = frozenset(announced.senders)
        delivery = Delivery(announced.delivery, job_id, announced.files, senders, folder, storage)
        self._expected[delivery.id] = delivery
        self._notify()
        try:
            yield delivery
        finally:
            if self._expected.get(delivery.id) is delivery:
                del self._expected[delivery.id]

    async def accept(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file of the delivery that a header names, or a refusal."""
        delivery = await self._find(header)
        if delivery is None:
            target: FilePushTarget | Refusal = Refusal(reason=f"no task here expects the delivery {header.delivery}")
        else:
            target = delivery.accept(peer, header)
        if isinstance(target, Refusal):
            _REFUSED.add(1)
        return target

    async def _find(self, header: PushHeader) -> Delivery | None:
        assert header.delivery is not None
        with anyio.move_on_after(ANNOUNCE_WAIT):
            while header.delivery not in self._expected:
                if header.attempt.job_id not in self._locating:
                    return None
                await self._changed.wait()
        return self._expected.get(header.delivery)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
