"""Errors of the worker: what the bridge answers to an executor, and what ends a job.

The lowest layer of the package besides `paths`: `connectors`, `bridge`, `jobs` and `executors` all raise these.
"""

from __future__ import annotations

from hypha_net.errors import NetError, RequestTimeoutError, TransferRefusedError


class ExecutionError(Exception):
    """A job cannot continue; its scheduler reads the message as the reason."""


class StorageExceededError(TransferRefusedError):
    """The files of a job would exceed its storage; peers and executors read the message as the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.args = (reason,)  # this worker refuses, not the peer


class BridgeError(Exception):
    """A request to the bridge that failed, as the executor reads it.

    Attributes:
        status: the HTTP status.
        kind: kebab-case, for programs.
        detail: what happened and what to do, for people.
    """

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail


def bad_request(detail: str) -> BridgeError:
    """Return a 400: the body, or a path in it, is not usable."""
    return BridgeError(400, "bad-request", detail)


def not_allowed(detail: str) -> BridgeError:
    """Return a 403: the worker's owner or the job's spec does not allow it."""
    return BridgeError(403, "not-allowed", detail)


def not_found(detail: str) -> BridgeError:
    """Return a 404: the file does not exist."""
    return BridgeError(404, "not-found", detail)


def no_more_data(detail: str) -> BridgeError:
    """Return a 410: the scheduler has no further slice for this executor."""
    return BridgeError(410, "no-more-data", detail)


def peer_failed(detail: str) -> BridgeError:
    """Return a 502: the remote side was not reached, closed the connection, or refused."""
    return BridgeError(502, "peer-failed", detail)


def storage_exceeded(detail: str) -> BridgeError:
    """Return a 507: the job's files would exceed its storage."""
    return BridgeError(507, "storage-exceeded", detail)


def job_ending() -> BridgeError:
    """Return a 503: the job ended while the request was in progress."""
    return BridgeError(503, "ending", "the job is ending")


def timed_out(detail: str) -> BridgeError:
    """Return a 504: the remote side was too slow."""
    return BridgeError(504, "timeout", detail)


def to_bridge_error(error: NetError) -> BridgeError:
    """Translate a network error into the answer that an executor gets."""
    if isinstance(error, StorageExceededError):
        return storage_exceeded(str(error))
    return timed_out(str(error)) if isinstance(error, RequestTimeoutError) else peer_failed(str(error))
