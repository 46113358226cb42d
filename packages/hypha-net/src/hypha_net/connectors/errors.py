"""Errors of connectors: why a file cannot be fetched from where it is."""

from __future__ import annotations

from enum import StrEnum

from hypha_net.redaction import redact_urls


class Reason(StrEnum):
    """Why a file cannot be fetched, for programs."""

    BAD_REQUEST = "bad-request"
    """The reference to it is not usable."""
    NOT_ALLOWED = "not-allowed"
    """The owner of this node, or of the service, does not allow it."""
    NOT_FOUND = "not-found"
    SOURCE_FAILED = "source-failed"
    """The service was not reached, interrupted the download, or sent something unexpected."""
    TIMEOUT = "timeout"


class FetchError(Exception):
    """A file cannot be fetched; the text names resource, source and remedy, without secret parts of URLs.

    Attributes:
        reason: for programs.
        detail: what happened and what to do, for people.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = redact_urls(detail)
        super().__init__(self.detail)


def bad_request(detail: str) -> FetchError:
    """Return the error of a name that is not usable."""
    return FetchError(Reason.BAD_REQUEST, detail)


def not_allowed(detail: str) -> FetchError:
    """Return the error of a resource that may not be read."""
    return FetchError(Reason.NOT_ALLOWED, detail)


def not_found(detail: str) -> FetchError:
    """Return the error of a resource that does not exist."""
    return FetchError(Reason.NOT_FOUND, detail)


def source_failed(detail: str) -> FetchError:
    """Return the error of a service that was not reached, interrupted the download, or sent something unexpected."""
    return FetchError(Reason.SOURCE_FAILED, detail)


def timed_out(detail: str) -> FetchError:
    """Return the error of a service that was too slow."""
    return FetchError(Reason.TIMEOUT, detail)
