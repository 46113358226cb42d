"""What is told while a job runs: events in ``metrics.jsonl`` and the log, and worker metrics to a bridge.

A dead bridge costs the job nothing: metrics wait in a bounded queue, in a task of its own, and are dropped when it is
full. That the bridge cannot be reached is reported once, and once more when it is back.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

_log = logging.getLogger(__name__)

_QUEUE: Final = 1024
_POST_TIMEOUT: Final = 5.0
_LINE: Final = 300
_FREQUENT: Final = frozenset({"metric"})


class EventFile:
    """Appends events to a file, one JSON object a line, each line whole as soon as it is written."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending."""
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def write(self, event: str, **fields: object) -> None:
        """Tell that something happened; numbers that are not finite become null."""
        line = {"event": event, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in fields.items()}
        self._file.write(json.dumps(line).encode() + b"\n")
        level = logging.DEBUG if event in _FREQUENT else logging.INFO
        _log.log(level, "%s", _readable(event, fields), extra={"event": event, "fields": line})


def _readable(event: str, fields: Mapping[str, object]) -> str:
    """An event in a line for people: what is short of it."""
    short = [f"{key}={_short(value)}" for key, value in fields.items() if isinstance(value, int | float | str)]
    return " ".join([event, *short])


def _short(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).partition("\n")[0][:_LINE]


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class StatusBridge:
    """Posts metrics to ``http://<address>/status``."""

    address: str
    _send: MemoryObjectSendStream[dict[str, object]] = field(init=False)
    _receive: MemoryObjectReceiveStream[dict[str, object]] = field(init=False)
    _reachable: bool = True

    def __post_init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[dict[str, object]](_QUEUE)

    def put(self, worker: str, round_number: int, name: str, value: float) -> None:
        """Queue one metric; dropped when the queue is full."""
        if not math.isfinite(value):
            return
        try:
            self._send.send_nowait({"worker_id": worker, "round": round_number, "metric_name": name, "value": value})
        except anyio.WouldBlock:
            self._report("its queue is full, metrics are dropped")

    async def run(self) -> None:
        """Post what is queued until cancelled."""
        import httpx  # here: most schedulers have no bridge, and start without its 0.2 s

        async with httpx.AsyncClient(timeout=_POST_TIMEOUT) as client, self._receive:
            async for metric in self._receive:
                try:
                    answer = await client.post(f"http://{self.address}/status", json=metric)
                    answer.raise_for_status()
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    self._report(f"{type(error).__name__}: {error}")
                else:
                    self._recovered()

    def _report(self, why: str) -> None:
        if self._reachable:
            _log.warning("status_bridge %s does not take metrics (training goes on): %s", self.address, why)
        self._reachable = False

    def _recovered(self) -> None:
        if not self._reachable:
            _log.info("status_bridge %s takes metrics again", self.address)
        self._reachable = True
