"""What the bridge answers when it cannot do what an executor asked."""

from __future__ import annotations


class BridgeError(Exception):
    """A request that failed, as the executor will read it.

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
    """400: the body or a path in it cannot be used."""
    return BridgeError(400, "bad-request", detail)


def not_allowed(detail: str) -> BridgeError:
    """403: the worker's owner or the job does not allow it."""
    return BridgeError(403, "not-allowed", detail)


def not_found(detail: str) -> BridgeError:
    """404: there is no such file."""
    return BridgeError(404, "not-found", detail)


def no_more_data(detail: str) -> BridgeError:
    """410: the scheduler has no further slice for this executor."""
    return BridgeError(410, "no-more-data", detail)


def peer_failed(detail: str) -> BridgeError:
    """502: the other side was not reached, broke off, or refused."""
    return BridgeError(502, "peer-failed", detail)


def timed_out(detail: str) -> BridgeError:
    """504: the other side was too slow."""
    return BridgeError(504, "timeout", detail)


def job_ending() -> BridgeError:
    """503: the job ends while the request is under way."""
    return BridgeError(503, "ending", "the job is ending")
