"""The end of a lease as messages state it. Called by `jobs.job_manager`."""

from __future__ import annotations

import time

from hypha_proto.resources import Timestamp


def expiry_fields(remaining: float) -> tuple[Timestamp, int]:
    """Return the end of a lease with `remaining` seconds, in both forms that messages carry.

    Older peers read a time of the worker's clock; current ones read milliseconds from receipt, which need no
    synchronised clocks.
    """
    return Timestamp.of(time.time() + remaining), int(remaining * 1000)
