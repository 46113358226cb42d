"""Notices a process that does nothing any more, such as one that is stopped or waits for a lock for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import anyio.to_thread

from hypha_worker.hardware.usage import UsageAccumulator, read_tree

IDLE_LIMIT: Final = 600.0
"""Seconds without processor time and without a request to the bridge after which a process is given up."""
INTERVAL: Final = 20.0
"""Seconds between looks at the processes."""


async def wait_until_idle(pid: Callable[[], int | None], is_asking: Callable[[], bool]) -> None:
    """Return when a process and its descendants have done nothing for `IDLE_LIMIT` seconds.

    Args:
        pid: returns the process; None as long as it does not run.
        is_asking: returns whether it waits for an answer of its bridge.
    """
    usage, since = UsageAccumulator(), anyio.current_time()
    while anyio.current_time() - since < IDLE_LIMIT:
        await anyio.sleep(INTERVAL)
        running = pid()
        if running is None or is_asking():
            since = anyio.current_time()
            continue
        used = usage.add_sample(await anyio.to_thread.run_sync(read_tree, running, abandon_on_cancel=True))
        if used.user + used.system > 0.0:
            since = anyio.current_time()
