"""Errors of the worker: what the bridge answers to an executor, and what ends a job.

The lowest layer of the package: `connectors`, `bridge`, `jobs` and `executors` all raise these.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from hypha_net.connectors.errors import FetchError, Reason
from hypha_net.errors import NetError, NoSpaceError, RequestTimeoutError, TransferRefusedError
from hypha_net.redaction import redact_urls
from hypha_proto.bridge_api import ROUND_CLOSED
from hypha_proto.ids import PeerId
from hypha_proto.texts import shorten

_DISK_FAULTS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE}
)
"""Errors of a disk that no other peer and no repetition cures."""
_LONGEST: Final = 4000
"""Characters of what an executor reads: it repeats what peers and services answered."""


class ExecutionError(Exception):
    """A job cannot continue; its scheduler reads the message, without secret parts of URLs, as the reason."""


class ExecutorStartError(ExecutionError):
    """An executor's process cannot be started, whatever the job is: its command or folders are not as configured."""


class ExecutorExitError(ExecutionError):
    """An executor's process exited by itself with an error that is not said to be the job's or for want of memory."""


class WorkReturnedError(ExecutionError):
    """This worker cannot continue a job, for a reason of its own: the job may go on without it."""


class IsolationError(Exception):
    """A layer of isolation that the owner requires does not work."""


class StorageExceededError(TransferRefusedError):
    """The files of a job would exceed its storage; peers and executors read the message as the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.args = (reason,)  # this worker refuses, not the peer


class BridgeError(Exception):
    """A request to the bridge that failed, as the executor reads it: without secret parts of URLs.

    Attributes:
        status: the HTTP status.
        kind: kebab-case, for programs.
        detail: what happened and what to do, for people.
    """

    def __init__(self, status: int, kind: str, detail: str) -> None:
        self.status = status
        self.kind = kind
        self.detail = shorten(redact_urls(detail), _LONGEST)
        super().__init__(self.detail)


class UnusableFileError(BridgeError):
    """A 502: no peer has the file as it must be, and asking them again would not help.

    Attributes:
        failures: what is wrong, for each peer that was asked.
    """

    def __init__(self, detail: str, failures: Mapping[PeerId, str]) -> None:
        super().__init__(502, "peer-failed", detail)
        self.failures = failures


class PushRefusedError(BridgeError):
    """A 502: every peer that was to have a file has refused it.

    Attributes:
        reasons: why, as each of them says.
    """

    def __init__(self, detail: str, reasons: Sequence[str]) -> None:
        super().__init__(502, "peer-failed", detail)
        self.reasons = reasons


class DiskFaultError(BridgeError):
    """A 500: this worker's disk is full or fails, so that it cannot continue the job."""

    def __init__(self, detail: str) -> None:
        super().__init__(500, "worker-failed", detail)


def is_disk_fault(error: OSError) -> bool:
    """Return whether an error means that this machine's disk is full or fails."""
    return error.errno in _DISK_FAULTS


def disk_fault_of(error: Exception, folder: Path) -> str | None:
    """Return a reason that names the path, `folder` if the error names none; None if the disk is not to blame."""
    if isinstance(error, DiskFaultError):
        return error.detail
    if isinstance(error, NoSpaceError):
        return str(error)
    if not isinstance(error, OSError) or not is_disk_fault(error):
        return None
    remedy = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check this worker's disk"
    return f"{error.filename or folder}: {error.strerror or error}; {remedy}"


bad_request = partial(BridgeError, 400, "bad-request")
"""400: the body, or a path in it, is not usable."""
not_allowed = partial(BridgeError, 403, "not-allowed")
"""403: the worker's owner or the job's spec does not allow it."""
update_refused = partial(BridgeError, 409, "update-refused")
"""409: the scheduler or the parameter server does not accept the executor's update."""
round_closed = partial(BridgeError, 409, ROUND_CLOSED)
"""409: the round goes on without the executor's update; it is to begin anew."""
never_joins = partial(BridgeError, 410, "never-joins")
"""410: the scheduler lets the executor take part in no round."""
not_found = partial(BridgeError, 404, "not-found")
"""404: the file does not exist."""
no_more_data = partial(BridgeError, 410, "no-more-data")
"""410: the scheduler has no further slice for this executor."""
no_free_slice = partial(BridgeError, 503, "no-free-slice")
"""503: all slices that are left are assigned to others, and may come back."""
peer_failed = partial(BridgeError, 502, "peer-failed")
"""502: the remote side was not reached, closed the connection, or refused."""
storage_exceeded = partial(BridgeError, 507, "storage-exceeded")
"""507: the job's files would exceed its storage."""
job_ending = partial(BridgeError, 503, "ending", "the job is ending")
"""503: the job ended while the request was in progress."""
timed_out = partial(BridgeError, 504, "timeout")
"""504: the remote side was too slow."""


def to_bridge_error(error: NetError) -> BridgeError:
    """Translate a network error into the answer that an executor gets."""
    if isinstance(error, StorageExceededError):
        return storage_exceeded(str(error))
    return timed_out(str(error)) if isinstance(error, RequestTimeoutError) else peer_failed(str(error))


def from_fetch_error(error: FetchError) -> BridgeError:
    """Translate the error of a connector into the answer that an executor gets."""
    return _OF_REASON[error.reason](error.detail)


_OF_REASON: Final[Mapping[Reason, Callable[[str], BridgeError]]] = {
    Reason.BAD_REQUEST: bad_request,
    Reason.NOT_ALLOWED: not_allowed,
    Reason.NOT_FOUND: not_found,
    Reason.SOURCE_FAILED: peer_failed,
    Reason.TIMEOUT: timed_out,
}
