"""Errors of connectors: why a file cannot be fetched from where it is."""

from __future__ import annotations

from enum import StrEnum
from functools import partial

from hypha_net.redaction import redact_urls
from hypha_proto.texts import shorten


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

    Its middle is left out if it has more than 1,000 characters: a service may answer anything.

    Attributes:
        reason: for programs.
        detail: what happened and what to do, for people.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = shorten(redact_urls(detail), 1000)
        super().__init__(self.detail)


bad_request = partial(FetchError, Reason.BAD_REQUEST)
"""A name that is not usable."""
not_allowed = partial(FetchError, Reason.NOT_ALLOWED)
"""A resource that may not be read."""
not_found = partial(FetchError, Reason.NOT_FOUND)
"""A resource that does not exist."""
source_failed = partial(FetchError, Reason.SOURCE_FAILED)
"""A service that was not reached, interrupted the download, or sent something unexpected."""
timed_out = partial(FetchError, Reason.TIMEOUT)
"""A service that was too slow."""
