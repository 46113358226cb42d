"""Files that peers pushed to a task, queued until its executor asks for them. Each file is delivered once.

Outer updates of a job whose scheduler commits its rounds wait until they are committed, or never will be.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.bridge_api import ReceivedFile
from hypha_proto.ids import PeerId
from hypha_proto.transfer import OUTER_UPDATE, PushHeader, Refusal
from hypha_worker.bridge.round_commits import RoundClient
from hypha_worker.task_files import safe_name
from hypha_worker.task_storage import TaskStorage

_log = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 64
"""Largest number of queued outer updates, and of all other files; further pushes are refused."""
_DISCARDED: Final = instrumentation.Counter(
    "hypha.worker.outer_updates.discarded", "{file}", "Outer updates that the scheduler does not commit."
)
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class PendingFile:
    """A queued file."""

    sequence: int
    """Number of the file among those of its job, from 0 on."""
    peer: PeerId
    header: PushHeader
    path: Path
    size: int
    digest: str
    weights: str | None = None
    """Digest of the global weights after the round that the scheduler has committed with this file."""

    @property
    def is_outer_update(self) -> bool:
        """Whether it is of the kind that the job is made for."""
        return self.header.kind == OUTER_UPDATE


@dataclass(slots=True)
class ReceiveQueue:
    """The pushed files of one job."""

    senders: Set[PeerId]
    """Peers that may push outer updates."""
    peers: Set[PeerId]
    """Peers that may push other files, besides `senders`."""
    storage: TaskStorage
    commits: RoundClient | None
    """Asks whether an outer update is committed; None where the scheduler commits none."""
    term: int = 0
    """Outer updates of parameter servers before it are refused."""
    begins: int | None = 0
    """Round from which on the executor takes outer updates; None while it has yet to join."""
    on_disk_error: Callable[[NoSpaceError | OSError], None] | None = None
    """Called when a pushed file cannot be stored on this machine."""
    _pending: list[PendingFile] = field(default_factory=list)
    _unasked: list[PendingFile] = field(default_factory=list)
    """Files of which the scheduler is to be asked whether they are committed."""
    _waiting: int = 0
    """Number of files that wait for their commit."""
    _seen: set[_Key] = field(default_factory=set)
    """What was queued or waits, so that it is delivered once."""
    _accepted: int = 0
    _completed: int = 0
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _closed: bool = False

    # ---------------------------------------------------------------------------------------------------------- arrival

    def accept(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that `peer` is about to push, or a refusal."""
        reason = self._reason_against(peer, header)
        if reason is not None:
            return Refusal(reason=reason)
        path = self.new_path()

        async def on_complete(size: int, digest: str) -> None:
            self._add(PendingFile(self._completed, peer, header, path, size, digest))

        work_dir = str(self.storage.files.work_dir)
        return FilePushTarget(path, sys.maxsize, on_complete, work_dir, self.storage, on_disk_error=self.on_disk_error)

    def new_path(self) -> Path:
        """Return a path for a file that is about to come."""
        self._accepted += 1
        return self.storage.files.staging_folder() / f"{self._accepted:06d}"

    def add_pulled(self, peer: PeerId, header: PushHeader, path: Path) -> None:
        """Queue a file that was pulled as if `peer` had pushed it."""
        self._add(PendingFile(self._completed, peer, header, path, header.size, header.digest))

    def has_passed(self, number: int, digest: str) -> bool:
        """Return whether an outer update of a round needs not come (again): it is known, or not wanted any more."""
        return self.commits is None or (number, digest) in self._seen or not self._is_wanted(number)

    def _reason_against(self, peer: PeerId, header: PushHeader) -> str | None:
        """Return why a push is refused, or None if it is accepted."""
        if self._closed:
            return "the job is ending"
        is_outer_update = header.kind == OUTER_UPDATE
        if is_outer_update and peer not in self.senders:
            return f"{peer} is not one of the peers that send results to this job"
        if peer not in self.senders | self.peers:
            return f"{peer} is in none of the references of this job"
        if is_outer_update and header.term is not None and header.term < self.term:
            return f"term: {header.term} is over, the parameter server of term {self.term} has taken its place"
        if is_outer_update and not self._is_wanted(header.round):
            return f"the executor does not take part in round {header.round}"
        waiting = sum(file.is_outer_update is is_outer_update for file in self._pending)
        waiting += self._waiting if is_outer_update else 0
        return f"the queue is full: {QUEUE_LIMIT} files wait for the executor" if waiting >= QUEUE_LIMIT else None

    def _is_wanted(self, number: int) -> bool:
        """Return whether the executor takes the outer update of a round."""
        return self.begins is not None and number >= self.begins

    def _add(self, file: PendingFile) -> None:
        """Queue a file, or let it wait until it is committed, unless a peer whose receipt was lost has repeated it."""
        if self._needs_commit(file):
            self.term = max(self.term, file.header.term or 0)
        key, is_wanted = self._key(file), not file.is_outer_update or self._is_wanted(file.header.round)
        if self._closed or key in self._seen or not is_wanted:
            file.path.unlink(missing_ok=True)
            return
        self._completed += 1
        self._seen.add(key)
        if self._needs_commit(file):
            self._waiting += 1
            self._unasked.append(file)
        else:
            self._pending.append(file)
        self._notify()

    def _needs_commit(self, file: PendingFile) -> bool:
        return self.commits is not None and file.is_outer_update

    def _key(self, file: PendingFile) -> _Key:
        """Return what tells files apart; several parameter servers may send the same outer update."""
        header = file.header
        if self._needs_commit(file):
            return header.round, file.digest
        return file.peer, header.kind, header.round, header.name, file.digest

    # ---------------------------------------------------------------------------------------------------------- commits

    async def run(self) -> None:
        """Ask for the commits of waiting files, until cancelled."""
        if self.commits is None:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                while self._unasked:
                    tasks.start_soon(self._wait_for_commit, self.commits, self._unasked.pop(0))
                await self._changed.wait()

    async def _wait_for_commit(self, commits: RoundClient, file: PendingFile) -> None:
        number = file.header.round
        status = await commits.wait(number, file.digest)
        self._waiting -= 1
        is_wanted = self._is_wanted(number)  # else the executor has begun anew meanwhile
        if is_wanted and status.committed:
            self._pending.append(replace(file, weights=status.weights))
            self._notify()
            return
        self._seen.discard(self._key(file))  # a later parameter server may compute the same again
        file.path.unlink(missing_ok=True)
        if is_wanted:
            _log.warning("outer update of round %d from %s is not committed: %s", number, file.peer, status.reason)
            _DISCARDED.add(1)

    def change_senders(self, senders: Set[PeerId], term: int) -> None:
        """Accept outer updates from `senders` only, and none of a parameter server before `term`."""
        self.senders = senders
        self.term = max(self.term, term)

    def join(self, number: int | None) -> None:
        """Accept outer updates from round `number` on, with which the executor begins; drop those before.

        None: drop all, and accept none until the next call, since the executor begins anew.
        """
        self.begins = number
        for file in list(self._pending):
            if file.is_outer_update and not self._is_wanted(file.header.round):
                self._pending.remove(file)
                file.path.unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------------------------- delivery

    async def receive(self, peers: Callable[[], Collection[PeerId]], folder: str) -> ReceivedFile | None:
        """Wait for a file from one of `peers`, which may change meanwhile, and move it to a folder of the executor.

        It has the name that its sender gave it, made safe; where a file has this name, `-1` or a higher number before
        its suffix. Returns None when the job ends.

        Raises:
            BridgeError: the folder cannot be used; the file stays queued.
        """
        while not self._closed:
            for file in self._pending:
                if file.peer in peers():
                    return self._deliver(file, folder)
            await self._changed.wait()
        return None

    def _deliver(self, file: PendingFile, folder: str) -> ReceivedFile:
        files, header = self.storage.files, file.header
        target = files.publish_beside(file.path, files.make_folder(folder), safe_name(header.name))
        self._pending.remove(file)
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
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
