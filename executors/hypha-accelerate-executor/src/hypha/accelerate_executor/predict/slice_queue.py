"""Fetches slices and sends parts beside the computation; imports no torch, so that the first slice comes before it."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hypha.accelerate_executor.bridge.client import Bridge, Fetched
from hypha.accelerate_executor.errors import DataError, NoMoreData
from hypha.accelerate_executor.predict.settings import SLICES, InferenceTask
from hypha_proto.bridge_api import ResourceReference
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import One, PeersReference

logger = logging.getLogger(__name__)


class SliceQueue:
    """Fetches slices and sends parts beside the computation.

    A slice is fetched when the part before the last has been received, and never keeps a part from being sent: the
    scheduler may hold back its answer until other parts have come.
    """

    def __init__(self, bridge: Bridge, task: InferenceTask) -> None:
        """Prepare; nothing is fetched before `prefetch`."""
        self._bridge, self._task = bridge, task
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._coming: Future[Fetched | None] | None = None
        self._sent: Future[None] | None = None

    def prefetch(self) -> None:
        """Start to fetch a slice once the last part has been received, unless one is being fetched."""
        if self._coming is None:
            self._coming = self._fetching.submit(self._fetch, self._sent)

    def take(self) -> Fetched | None:
        """Wait for the next slice; None if there is none.

        Raises:
            ExecutorError: it could not be fetched, or a part before it could not be sent.
        """
        self.prefetch()
        assert self._coming is not None
        fetched = self._coming.result()
        self._coming = None
        return fetched

    def send(self, path: Path, slice_index: int, rows: int) -> None:
        """Start to send a part, when the part before has been received.

        Raises:
            ExecutorError: the part before could not be sent.
        """
        self.flush()
        self._sent = self._sending.submit(self._send, path, slice_index, rows)

    def flush(self) -> None:
        """Wait until the last part has been received.

        Raises:
            ExecutorError: it could not be sent.
        """
        if self._sent is not None:
            self._sent.result()
            self._sent = None

    def close(self) -> None:
        """Discard what has not begun."""
        for thread in (self._fetching, self._sending):
            thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, before: Future[None] | None) -> Fetched | None:
        if before is not None:
            before.result()
        try:
            files = self._bridge.fetch(ResourceReference(name=SLICES), SLICES)
        except NoMoreData as end:
            logger.info("no further slice: %s", end)
            return None
        if len(files) != 1:
            raise DataError(f"a slice is one file; the worker fetched {len(files)}")
        return files[0]

    def _send(self, path: Path, slice_index: int, rows: int) -> None:
        scheduler = PeersReference(peers=(PeerId.parse(self._task.scheduler),), strategy=One())
        self._bridge.send(scheduler, path, slice_index, rows)
        path.unlink(missing_ok=True)
