"""Files of the accounts: an append-only file of leases that are over, and one of those that are held.

Every write is synced. The first file is rotated at `MAX_SIZE`, and the one before it is kept. The second is replaced as
a whole, so that a worker that is killed loses what its leases have earned since then only.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import msgspec

from hypha_proto.record_file import RecordFile, whole_lines
from hypha_proto.whole_directory import replace_file, sync
from hypha_worker.work_dir import control_folder, prepare_control_folder

MAX_SIZE: Final = 8 << 20
"""Bytes of one file: some 25,000 leases."""
STALE_AFTER: Final = 30.0
"""Seconds after which a lease that is held no longer counts as such: its worker writes more often."""
INTERRUPTED: Final = "interrupted"
RUNNING: Final = "running"
_ENDED, _PREVIOUS, _HELD, _LOCK = "accounts.jsonl", "accounts.1.jsonl", "accounts-held.json", "accounts.lock"


class LeaseAccount(msgspec.Struct, frozen=True):
    """What one lease has earned."""

    lease: str
    job: str | None
    """The job that ran on it last."""
    scheduler: str
    began: float
    """When it was accepted, seconds since the epoch."""
    updated: float
    """When it ended, or when this was written."""
    seconds: float
    """Time for which it was held and not orphaned."""
    price: float
    """Tokens an hour."""
    tokens: float
    outcome: str
    """Of its last job: finished, failed or cancelled. Of a lease without one how it ended, such as idle. `RUNNING`
    while it is held, `INTERRUPTED` if its worker was killed."""
    name: str | None = None
    """Name in the scheduler's certificate, if it is known."""


_line_decoder = msgspec.json.Decoder(LeaseAccount)
_list_decoder = msgspec.json.Decoder(list[LeaseAccount])


class AccountFiles:
    """The files of one worker, which no other one writes meanwhile."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._folder = control_folder(work_dir)
        self._stack = ExitStack()

    def open(self) -> Sequence[LeaseAccount]:
        """Lock the files; return the leases that a killed worker held, as interrupted ones that are not stored yet.

        Raises:
            OSError: the files cannot be used, or another worker uses them.
        """
        prepare_control_folder(self._work_dir)
        with ExitStack() as stack:  # an error closes the descriptor, which unlocks the files
            descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            _lock(descriptor)
            stored = {account.lease for account in _read_ended(self._folder)}
            left = [_interrupted(account) for account in _read_held(self._folder) if account.lease not in stored]
            self._stack = stack.pop_all()
        return left

    def close(self) -> None:
        """Unlock the files."""
        self._stack.close()

    def append(self, accounts: Sequence[LeaseAccount]) -> None:
        """Store leases that are over.

        Raises:
            OSError: they cannot be stored; some may have been, and are then ignored when they are stored again.
        """
        path = self._folder / _ENDED
        if path.exists() and path.stat().st_size >= MAX_SIZE:
            os.replace(path, self._folder / _PREVIOUS)
        with closing(RecordFile(path, 0o600)) as file:
            for account in accounts:
                file.append(msgspec.structs.asdict(account))
            file.sync()
        sync(self._folder)

    def store_held(self, accounts: Sequence[LeaseAccount]) -> None:
        """Store the leases that are held now, in place of those before.

        Raises:
            OSError: they cannot be stored.
        """
        replace_file(self._folder / _HELD, msgspec.json.encode(list(accounts)), mode=0o600)


def earned_since(accounts: Iterable[LeaseAccount], since: float) -> float:
    """Return the tokens that leases have earned since a time, seconds since the epoch; evenly over their time."""
    total = 0.0
    for account in accounts:
        time, later = account.updated - account.began, account.updated - max(account.began, since)
        if later > 0:
            total += account.tokens * later / time
    return total


def read_accounts(work_dir: Path, now: float) -> list[LeaseAccount]:
    """Return the account of every stored lease, the earliest first.

    Args:
        now: seconds since the epoch; leases that a worker held too long ago count as interrupted.

    Raises:
        OSError: the files cannot be read.
    """
    folder = control_folder(work_dir)
    found = {account.lease: account for account in _read_ended(folder)}
    for account in _read_held(folder):
        is_stale = account.updated < now - STALE_AFTER
        found.setdefault(account.lease, _interrupted(account) if is_stale else account)
    return sorted(found.values(), key=lambda account: account.began)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(0, "another worker uses this work_dir; give each worker one of its own") from None


def _interrupted(account: LeaseAccount) -> LeaseAccount:
    return msgspec.structs.replace(account, outcome=INTERRUPTED)


def _read_ended(folder: Path) -> Iterable[LeaseAccount]:
    for name in (_PREVIOUS, _ENDED):
        path = folder / name
        for line in whole_lines(path.read_bytes()) if path.exists() else ():
            try:
                yield _line_decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # a part of a line to which an earlier version has added a line feed


def _read_held(folder: Path) -> list[LeaseAccount]:
    path = folder / _HELD
    try:
        return _list_decoder.decode(path.read_bytes()) if path.exists() else []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OSError(f"{path} is damaged: {error}; remove it") from error
