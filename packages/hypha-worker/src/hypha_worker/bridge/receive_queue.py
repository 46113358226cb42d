"""Files that peers pushed to a task, queued until its executor asks for them. Each file is delivered once.

Outer updates of a job whose scheduler commits its rounds are queued when they are committed (`uncommitted_updates`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import anyio

from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.bridge_api import ReceivedFile
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader, Refusal
from hypha_worker.bridge.uncommitted_updates import PendingFile, UncommittedUpdates
from hypha_worker.task_storage import TaskStorage

QUEUE_LIMIT: Final = 64
"""Largest number of queued files of the job's own kind, and of all other files; further pushes are refused."""


@dataclass(slots=True)
class ReceiveQueue:
    """The pushed files of one job."""

    work_dir: Path
    senders: Set[PeerId]
    """Peers that may push files of `kind`."""
    storage: TaskStorage
    kind: str
    """The kind of file that the job is made for, as named in a header."""
    peers: Set[PeerId] = frozenset()
    """Peers that may push files of other kinds, besides `senders`."""
    on_disk_error: Callable[[NoSpaceError | OSError], None] | None = None
    """Called when a pushed file cannot be stored on this machine."""
    uncommitted: UncommittedUpdates | None = None
    """Keeps the files of `kind` until the scheduler has committed them; None where it commits none."""
    _pending: list[PendingFile] = field(default_factory=list)
    _seen: set[tuple[PeerId, str, int, str, str]] = field(default_factory=set)
    _accepted: int = 0
    _completed: int = 0
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _closed: bool = False

    def accept(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that `peer` is about to push, or a refusal."""
        reason = self._reason_against(peer, header)
        if reason is not None:
            return Refusal(reason=reason)
        path = self.new_path()

        async def on_complete(size: int, digest: str) -> None:
            self._add(PendingFile(self._completed, peer, header, path, size), digest)

        return FilePushTarget(
            path, sys.maxsize, on_complete, str(self.work_dir), self.storage, on_disk_error=self.on_disk_error
        )

    def new_path(self) -> Path:
        """Return a path for a file that is about to come."""
        self._accepted += 1
        return self.storage.files.staging_folder() / f"{self._accepted:06d}"

    def add_pulled(self, peer: PeerId, header: PushHeader, path: Path) -> None:
        """Queue a file that was pulled as if `peer` had pushed it."""
        self._add(PendingFile(self._completed, peer, header, path, header.size), header.digest)

    def has_passed(self, number: int, digest: str) -> bool:
        """Return whether an outer update of a round needs not come (again): it is known, or not wanted any more."""
        uncommitted = self.uncommitted
        return uncommitted is None or uncommitted.is_known(number, digest) or not uncommitted.is_wanted(number)

    def change_senders(self, senders: Set[PeerId], term: int) -> None:
        """Accept outer updates from `senders` only, and none of a parameter server before `term`."""
        self.senders = senders
        if self.uncommitted is not None:
            self.uncommitted.term = max(self.uncommitted.term, term)

    def leave(self) -> None:
        """Drop all outer updates, and accept none until `join`: the executor begins anew."""
        if self.uncommitted is not None:
            self.uncommitted.begins = None
            self._drop_unwanted(self.uncommitted)

    def join(self, number: int) -> None:
        """Accept outer updates from round `number` on, with which the executor begins; drop those before."""
        if self.uncommitted is not None:
            self.uncommitted.begins = number
            self._drop_unwanted(self.uncommitted)

    def _drop_unwanted(self, uncommitted: UncommittedUpdates) -> None:
        for file in list(self._pending):
            if self._is_own_kind(file.header) and not uncommitted.is_wanted(file.header.round):
                self._pending.remove(file)
                file.path.unlink(missing_ok=True)

    def _reason_against(self, peer: PeerId, header: PushHeader) -> str | None:
        """Return why a push is refused, or None if it is accepted."""
        if self._closed:
            return "the job is ending"
        if self._is_own_kind(header):
            if peer not in self.senders:
                return f"{peer} is not one of the peers that send results to this job"
        elif peer not in self.senders | self.peers:
            return f"{peer} is in none of the references of this job"
        uncommitted = self.uncommitted if self._is_own_kind(header) else None
        if uncommitted is not None and (reason := uncommitted.reason_against(header)) is not None:
            return reason
        waiting = sum(self._is_own_kind(file.header) is self._is_own_kind(header) for file in self._pending)
        waiting += 0 if uncommitted is None else uncommitted.count
        return f"the queue is full: {QUEUE_LIMIT} files wait for the executor" if waiting >= QUEUE_LIMIT else None

    def _is_own_kind(self, header: PushHeader) -> bool:
        return header.kind == self.kind

    def _add(self, file: PendingFile, digest: str) -> None:
        if self._closed or not self._keep(file, digest):
            file.path.unlink(missing_ok=True)
            return
        self._completed += 1

    def _keep(self, file: PendingFile, digest: str) -> bool:
        """Queue a file, or let it wait until it is committed; return False if it is a repetition."""
        if self.uncommitted is not None and self._is_own_kind(file.header):
            return self.uncommitted.add(file, digest)
        if self._is_repeated(file, digest):
            return False
        self._queue(file)
        return True

    def _queue(self, file: PendingFile) -> None:
        self._pending.append(file)
        self._changed.set()

    async def run(self) -> None:
        """Ask for the commits of waiting files until the job ends; must run if there is an `uncommitted`."""
        if self.uncommitted is not None:
            await self.uncommitted.run(self._queue)

    def _is_repeated(self, file: PendingFile, digest: str) -> bool:
        """Return whether a peer whose receipt was lost has pushed a file again: the executor gets it once."""
        header = file.header
        key = (file.peer, header.kind, header.round, header.name, digest)
        repeated = key in self._seen
        self._seen.add(key)
        return repeated

    async def next_file(self, peers: Callable[[], Collection[PeerId]]) -> PendingFile | None:
        """Wait for a file from one of `peers`, which may change meanwhile; return None when the job ends.

        The file stays queued until `claim`.
        """
        while not self._closed:
            for file in self._pending:
                if file.peer in peers():
                    return file
            self._changed = anyio.Event() if self._changed.is_set() else self._changed
            await self._changed.wait()
        return None

    def claim(self, file: PendingFile, folder: PurePosixPath) -> ReceivedFile | None:
        """Move a file to the executor's folder; return None if another stream has claimed it.

        It has the name that its sender gave it; where a file has this name, `-1` or a higher number before its suffix.

        Raises:
            BridgeError: the folder cannot be used; the file stays queued.
        """
        if file not in self._pending:
            return None
        target = self.storage.files.publish_beside(file.path, folder, file.name)
        self._pending.remove(file)
        header = file.header
        return ReceivedFile(
            path=str(target),
            size=file.size,
            from_peer=file.peer,
            sequence=file.sequence,
            round=header.round,
            kind=header.kind,
            weights=file.weights,
        )

    def close(self) -> None:
        """End the queue: wake all waiters and accept nothing more."""
        self._closed = True
        self._changed.set()
        if self.uncommitted is not None:
            self.uncommitted.close()
