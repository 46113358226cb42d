"""Files that peers pushed to a job, queued until its executor asks for them. Each file is delivered once.

Called by `hypha_net.transfer`, through `jobs.job_manager`, when a peer pushes; and by `backend`, which turns each file
into an event of ``/resources/receive``.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.bridge_api import ReceivedFile
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader, Refusal
from hypha_worker.job_storage import JobStorage
from hypha_worker.paths import relative_text, safe_name

QUEUE_LIMIT: Final = 64
"""Largest number of queued files; further pushes are refused."""


@dataclass(frozen=True, slots=True)
class PendingFile:
    """A queued file."""

    sequence: int
    peer: PeerId
    header: PushHeader | None
    path: Path
    size: int


@dataclass(slots=True)
class DeliveryQueue:
    """The pushed files of one job."""

    job_id: uuid.UUID
    work_dir: Path
    senders: Set[PeerId]
    """Peers that may push to the job."""
    storage: JobStorage
    kind: str
    """The kind of push that is accepted, as named in a header."""
    on_disk_error: Callable[[NoSpaceError | OSError], None] | None = None
    """Called when a pushed file cannot be stored on this machine."""
    _pending: list[PendingFile] = field(default_factory=list)
    _seen: set[tuple[PeerId, int, str]] = field(default_factory=set)
    _count: int = 0
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _closed: bool = False

    def accept(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Return where to store a file that `peer` is about to push, or a refusal."""
        if self._closed:
            return Refusal(reason="the job is ending")
        if peer not in self.senders:
            return Refusal(reason=f"{peer} is not one of the peers that send results to this job")
        if header is not None and header.kind != self.kind:
            return Refusal(reason=f"{header.kind[:40]!r} is not accepted here, only {self.kind}")
        if len(self._pending) >= QUEUE_LIMIT:
            return Refusal(reason=f"the queue is full: {QUEUE_LIMIT} files wait for the executor")
        self._count += 1
        sequence = self._count
        folder = self.work_dir / ".inbox"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{sequence:06d}-{safe_name(header.name if header else 'pushed.safetensors')}"

        async def on_complete(size: int, digest: str) -> None:
            self._add(PendingFile(sequence, peer, header, path, size), digest)

        return FilePushTarget(
            path, sys.maxsize, on_complete, str(self.work_dir), self.storage, on_disk_error=self.on_disk_error
        )

    def _add(self, file: PendingFile, digest: str) -> None:
        # a peer whose receipt was lost pushes again: the executor gets the file once
        key = (file.peer, file.header.round if file.header else -file.sequence, digest)
        if key in self._seen or self._closed:
            file.path.unlink(missing_ok=True)
            return
        self._seen.add(key)
        self._pending.append(file)
        self._changed.set()

    async def next_file(self, peers: Collection[PeerId]) -> PendingFile | None:
        """Wait for a file from one of `peers`; return None when the job ends. The file stays queued until `claim`."""
        while not self._closed:
            for file in self._pending:
                if file.peer in peers:
                    return file
            self._changed = anyio.Event() if self._changed.is_set() else self._changed
            await self._changed.wait()
        return None

    def claim(self, file: PendingFile, folder: Path) -> ReceivedFile | None:
        """Move a file to the executor's folder; return None if another stream has claimed it."""
        if file not in self._pending:
            return None
        target = folder / file.path.name
        os.replace(file.path, target)
        self._pending.remove(file)
        header = file.header
        return ReceivedFile(
            path=relative_text(self.work_dir, target),
            size=file.size,
            from_peer=file.peer,
            sequence=file.sequence,
            round=header.round if header else None,
            kind=header.kind if header else None,
        )

    def close(self) -> None:
        """End the queue: wake all waiters and accept nothing more."""
        self._closed = True
        self._changed.set()
