"""Accounts of a job's leases: what each has cost, kept in ``leases.jsonl`` of the job's directory.

`runner` notes when a lease begins and ends, and ends the job before its budget is overspent; the command `accounts`
reads the files of all jobs. A worker charges a lease from the renewal that accepts it to its release or expiry.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from msgspec import convert

from hypha_proto.codec import parse_json
from hypha_proto.ids import PeerId
from hypha_proto.record_file import RecordFile, whole_lines
from hypha_scheduler.errors import JobFailedError

_log = logging.getLogger(__name__)

FILE: Final = "leases.jsonl"
HOUR: Final = 3600.0
MARK_INTERVAL: Final = 5.0
"""Seconds between marks that the leases are held: what the accounts of a killed scheduler lack at most."""


class AccountsFileError(JobFailedError):
    """A file of accounts contains something else."""


@dataclass(frozen=True, slots=True)
class LeaseCost:
    """What one lease has cost so far, in one run of the scheduler; times are seconds since the epoch."""

    lease: str
    peer: str
    name: str | None
    """Name in the worker's certificate, if it was known."""
    role: str
    price: float
    """Tokens per hour."""
    began: float
    updated: float
    """When it ended, or the time up to which it is charged."""
    has_ended: bool = False

    @property
    def seconds(self) -> float:
        """Seconds for which it is charged."""
        return max(0.0, self.updated - self.began)

    @property
    def tokens(self) -> float:
        """What they cost."""
        return self.price * self.seconds / HOUR


class LeaseAccounts:
    """The accounts of one job while it runs. Where they cannot be written, which is logged once, they go on."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Take up the accounts of the job's earlier runs, whose leases have ended with the last mark in the file.

        Args:
            directory: the job's.
            clock: seconds since the epoch.

        Raises:
            OSError: the file cannot be read.
            AccountsFileError: the file contains something else.
        """
        self._path = directory / FILE
        self._clock = clock
        self._earlier = read_accounts(self._path)
        self._spent_before = sum(account.tokens for account in self._earlier)
        self._held: dict[uuid.UUID, LeaseCost] = {}
        self._file: RecordFile | None = None
        self._has_failed = False
        self._is_closed = False
        for account in self._earlier:
            if not account.has_ended:  # before a new mark extends it
                self._append(replace(account, has_ended=True))

    @property
    def rate(self) -> float:
        """Tokens per second that the held leases cost."""
        return sum(account.price for account in self._held.values()) / HOUR

    def spent(self) -> float:
        """Return the tokens that the leases of this run and of earlier ones have cost."""
        now = self._clock()
        return self._spent_before + sum(replace(account, updated=now).tokens for account in self._held.values())

    def begin(self, lease: uuid.UUID, peer: PeerId, role: str, price: float, name: str | None = None) -> None:
        """Note a lease that its worker has confirmed, or that was taken back from an earlier run."""
        if self._is_closed:  # it is released at once
            return
        now = self._clock()
        for earlier in self._earlier:
            if earlier.lease == str(lease) and earlier.updated > now:  # it was charged up to its expiry
                shorter = replace(earlier, updated=now, has_ended=True)
                self._spent_before -= earlier.tokens - shorter.tokens
                self._append(shorter)
        account = LeaseCost(str(lease), str(peer), name, role, price, now, now)
        self._held[lease] = account
        self._append(account)

    def end(self, lease: uuid.UUID, in_seconds: float = 0.0) -> None:
        """Note that a lease ends, if it was noted before: now, or in so many seconds, when it expires."""
        if (account := self._held.pop(lease, None)) is not None:
            ended = replace(account, updated=self._clock() + max(0.0, in_seconds), has_ended=True)
            self._spent_before += ended.tokens
            self._append(ended)

    def mark(self) -> None:
        """Note that the held leases are held still."""
        if self._held and self._file is not None:
            try:
                os.utime(self._path)
            except OSError as error:
                self._failed(error)

    def close(self) -> None:
        """End what is still held, and close the file."""
        for lease in list(self._held):
            self.end(lease)
        self._is_closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, account: LeaseCost) -> None:
        try:
            if self._file is None:
                self._file = RecordFile(self._path)
            self._file.append(asdict(account))
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            _log.warning("the accounts of leases are incomplete: %s", error)
        self._has_failed = True


def read_accounts(path: Path) -> list[LeaseCost]:
    """Return the accounts in a job's file in the order of their beginnings; none if there is no file.

    A lease that was taken back by a later run has one for each run. One that the file says is held is charged up to the
    file's last mark.

    Raises:
        OSError: the file cannot be read.
        AccountsFileError: the file contains something else.
    """
    found: dict[tuple[str, float], LeaseCost] = {}
    try:
        with path.open("rb") as file:
            marked = os.fstat(file.fileno()).st_mtime
            for number, line in enumerate(whole_lines(file.read()), 1):
                account = _parse(line, f"{path}:{number}")
                found[account.lease, account.began] = account
    except FileNotFoundError:
        return []
    return [
        account if account.has_ended else replace(account, updated=max(account.updated, marked))
        for account in found.values()
    ]


def _parse(line: bytes, place: str) -> LeaseCost:
    try:
        return convert(parse_json(line), LeaseCost)
    except ValueError as error:
        raise AccountsFileError(f"{place}: no account of a lease: {error}") from None
