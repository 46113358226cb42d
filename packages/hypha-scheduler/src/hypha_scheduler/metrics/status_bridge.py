"""Status bridge: posts metrics of workers to an HTTP server.

A failing bridge never delays a job: metrics are queued, a background task posts them and retries failed posts, and new
metrics are dropped when the queue is full. The failure is logged once, and so is the recovery.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

_QUEUE_SIZE: Final = 1024
_POST_TIMEOUT: Final = 5.0
_RETRY_FIRST: Final = 0.5
_RETRY_LONGEST: Final = 10.0
_RETRYABLE: Final = frozenset({408, 425, 429})
"""HTTP client errors after which the same request may succeed later."""


@dataclass(slots=True)
class StatusBridge:
    """Posts metrics to ``http://<address>/status``."""

    address: str
    post_timeout: float = _POST_TIMEOUT
    """Seconds for one post, from connecting to the response."""
    _send: MemoryObjectSendStream[dict[str, object]] = field(init=False)
    _receive: MemoryObjectReceiveStream[dict[str, object]] = field(init=False)
    _reachable: bool = True
    _queued: int = 0
    _drained: anyio.Event = field(default_factory=anyio.Event)
    """Set when the queue is empty or the bridge fails."""

    def __post_init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[dict[str, object]](_QUEUE_SIZE)

    def put(self, worker: str, step: int, name: str, value: float, *, job_id: str | None = None) -> None:
        """Queue one metric; drop it if the queue is full or the value is not finite."""
        if not math.isfinite(value):
            return
        metric: dict[str, object] = {"worker_id": worker, "round": step, "metric_name": name, "value": value}
        try:
            self._send.send_nowait(metric if job_id is None else metric | {"job_id": job_id})
            self._queued += 1
        except anyio.WouldBlock:
            self._report("its queue is full, metrics are dropped")

    async def run(self) -> None:
        """Post queued metrics until cancelled."""
        import httpx  # imported late: takes 0.2 s, and most schedulers have no bridge

        logging.getLogger("httpx").setLevel(logging.WARNING)  # logs every request otherwise
        async with httpx.AsyncClient(timeout=self.post_timeout) as client, self._receive:
            async for metric in self._receive:
                await self._post_with_retries(client, metric)
                self._queued -= 1
                if not self._queued:
                    self._drained.set()

    async def drain(self, seconds: float) -> None:
        """Wait up to `seconds` until the queue is empty; return at once if the bridge is failing."""
        with anyio.move_on_after(seconds):
            while self._queued and self._reachable:
                self._drained = anyio.Event()
                await self._drained.wait()

    async def _post_with_retries(self, client: httpx.AsyncClient, metric: dict[str, object]) -> None:
        """Post a metric with retries; give up on one that the bridge rejects as invalid."""
        delay = _RETRY_FIRST
        while (failure := await self._post(client, metric)) is not None:
            why, is_final = failure
            self._report(why)
            if is_final:
                return
            await anyio.sleep(delay)
            delay = min(2 * delay, _RETRY_LONGEST)
        self._recovered()

    async def _post(self, client: httpx.AsyncClient, metric: dict[str, object]) -> tuple[str, bool] | None:
        """Return why a post failed, and whether trying it again is useless; None if it succeeded."""
        import httpx

        try:
            with anyio.fail_after(self.post_timeout):
                answer = await client.post(f"http://{self.address}/status", json=metric)
        except TimeoutError:
            return f"no response within {self.post_timeout:g} s", False
        except (httpx.InvalidURL, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}", isinstance(error, httpx.InvalidURL)
        if answer.is_success:
            return None
        is_refused = answer.is_client_error and answer.status_code not in _RETRYABLE
        return f"HTTP {answer.status_code}: {answer.text}", is_refused

    def _report(self, why: str) -> None:
        if self._reachable:
            _log.warning("status_bridge %s does not accept metrics (training continues): %s", self.address, why)
        self._reachable = False
        self._drained.set()

    def _recovered(self) -> None:
        if not self._reachable:
            _log.info("status_bridge %s accepts metrics again", self.address)
        self._reachable = True
