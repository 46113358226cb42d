"""What the bridge answers when it cannot do what an executor asked."""

from __future__ import annotations


class BridgeFault(Exception):
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


def bad_request(detail: str) -> BridgeFault:
    """400: the body or a path in it cannot be used."""
    return BridgeFault(400, "bad-request", detail)


def not_allowed(detail: str) -> BridgeFault:
    """403: the worker's owner or the job does not allow it."""
    return BridgeFault(403, "not-allowed", detail)


def not_found(detail: str) -> BridgeFault:
    """404: there is no such file."""
    return BridgeFault(404, "not-found", detail)


def no_more_data(detail: str) -> BridgeFault:
    """410: the scheduler has no further slice for this executor."""
    return BridgeFault(410, "no-more-data", detail)


def peer_failed(detail: str) -> BridgeFault:
    """502: the other side was not reached, broke off, or refused."""
    return BridgeFault(502, "peer-failed", detail)


def timed_out(detail: str) -> BridgeFault:
    """504: the other side was too slow."""
    return BridgeFault(504, "timeout", detail)


def ending() -> BridgeFault:
    """503: the job ends while the request is under way."""
    return BridgeFault(503, "ending", "the job is ending")
