"""Limit of open files and connections of a daemon (``ulimit -n``)."""

from __future__ import annotations

import logging
import sys
from typing import Final

FEW: Final = 1024
"""Limit of open files and connections below which a node cannot serve many peers."""
_MANY: Final = 1 << 16
"""The same, where the system names no limit."""

_log = logging.getLogger(__name__)


def descriptor_limit() -> int | None:
    """Return how many files a daemon that is started from here may have open; None if there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process to the hard one, and warn if that is low."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError) as error:
            _log.info("the limit of open files stays %d: %s", soft, error)
    if soft != resource.RLIM_INFINITY and soft < FEW:
        _log.warning(
            "this process may have %d files and connections open (ulimit -n); allow %d or more, or peers and tasks may "
            "have to wait",
            soft,
            FEW,
        )
