"""Live metrics of a job: events written to ``metrics.jsonl`` and the log, and worker metrics posted to a status bridge.

A failing bridge never delays a job: metrics are queued, a background task posts them and retries failed posts, and new
metrics are dropped when the queue is full. The failure is logged once, and so is the recovery. Called by `reporting`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from hypha_scheduler.json_lines import JsonLinesFile

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

EVENTS: Final = "metrics.jsonl"
"""Name of the event file in a job's directory."""
_QUEUE_SIZE: Final = 1024
_POST_TIMEOUT: Final = 5.0
_RETRY_FIRST: Final = 0.5
_RETRY_LONGEST: Final = 10.0
_RETRYABLE: Final = frozenset({408, 425, 429})
"""HTTP client errors after which the same request may succeed later."""
_MAX_TEXT: Final = 300
_DEBUG_EVENTS: Final = frozenset({"metric"})


class EventFile:
    """Appends events to a file as JSON lines; each line is written at once."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending."""
        self._file = JsonLinesFile(path)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def write(self, event: str, at: float | None = None, /, **fields: object) -> None:
        """Write an event with its time, by default now, and log it; numbers that are not finite become null.

        Raises:
            OSError: it could not be written; the file ends with the event before.
        """
        line = {"event": event, "time": at or round(time.time(), 3)} | {
            key: _plain(value) for key, value in fields.items()
        }
        self._file.append(line)
        level = logging.DEBUG if event in _DEBUG_EVENTS else logging.INFO
        _log.log(level, "%s", _readable(event, fields), extra={"event": event, "fields": line})


def _readable(event: str, fields: Mapping[str, object]) -> str:
    """Format an event's scalar fields as a log line."""
    short = [f"{key}={_short(value)}" for key, value in fields.items() if isinstance(value, int | float | str)]
    return " ".join([event, *short])


def _short(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).partition("\n")[0][:_MAX_TEXT]


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class _PostFailure:
    """Reason why a post failed."""

    why: str
    final: bool = False
    """Whether retrying is useless."""


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

    def put(self, worker: str, round_number: int, name: str, value: float, *, job_id: str | None = None) -> None:
        """Queue one metric; drop it if the queue is full or the value is not finite."""
        if not math.isfinite(value):
            return
        metric: dict[str, object] = {"worker_id": worker, "round": round_number, "metric_name": name, "value": value}
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
            self._report(failure.why)
            if failure.final:
                return
            await anyio.sleep(delay)
            delay = min(2 * delay, _RETRY_LONGEST)
        self._recovered()

    async def _post(self, client: httpx.AsyncClient, metric: dict[str, object]) -> _PostFailure | None:
        import httpx

        try:
            with anyio.fail_after(self.post_timeout):
                answer = await client.post(f"http://{self.address}/status", json=metric)
        except TimeoutError:
            return _PostFailure(f"no response within {self.post_timeout:g} s")
        except httpx.InvalidURL as error:
            return _PostFailure(f"{type(error).__name__}: {error}", final=True)
        except httpx.HTTPError as error:
            return _PostFailure(f"{type(error).__name__}: {error}")
        if answer.is_success:
            return None
        refused = answer.is_client_error and answer.status_code not in _RETRYABLE
        return _PostFailure(f"HTTP {answer.status_code}: {answer.text[:_MAX_TEXT]}", final=refused)

    def _report(self, why: str) -> None:
        if self._reachable:
            _log.warning("status_bridge %s does not accept metrics (training continues): %s", self.address, why)
        self._reachable = False
        self._drained.set()

    def _recovered(self) -> None:
        if not self._reachable:
            _log.info("status_bridge %s accepts metrics again", self.address)
        self._reachable = True
