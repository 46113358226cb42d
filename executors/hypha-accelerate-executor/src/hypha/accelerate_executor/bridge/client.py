"""Client of the worker's job bridge: HTTP over a Unix socket.

Opened by `training`. The worker fetches and sends files and forwards reports to the scheduler; this is the package's
only connection to anything.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from hypha.accelerate_executor.errors import (
    BridgeClosed,
    BridgeRefused,
    BridgeTimeout,
    ContributionRefused,
    ExecutorError,
    NoMoreData,
    NotTakingPart,
    RoundWentOn,
    SchedulerRefused,
)
from hypha_proto import bridge_api as routes
from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
from hypha_proto.bridge_api import AnyReference, Transfer
from hypha_proto.codec import from_json, parse_json, to_json, to_plain
from hypha_proto.contributions import Contribution
from hypha_proto.errors import DecodeError
from hypha_proto.ids import is_inside
from hypha_proto.job_spec import Reference
from hypha_proto.texts import quote
from hypha_proto.training_reports import ReportAnswer, ReportError, TrainingReport, TrainingReportValue

logger = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.5
_SPANS_SECONDS: Final = 2.0
"""Seconds that reporting spans may delay training, once: it is not retried."""
_OK: Final = 200
_CONFLICT: Final = 409
_GONE: Final = 410
_UNAVAILABLE: Final = 503
_NO_FREE_SLICE: Final = "no-free-slice"
"""Kind of a 503 after which a fetch is repeated until the worker ends the task: slices are computed by others."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that the worker has written to the work directory."""

    path: Path
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """An outer update that has arrived in the work directory."""

    path: Path
    round: int
    weights: str | None = None
    """Digest of the global weights after the round, as the scheduler has committed them; None if it is not stated."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of the worker to one request."""

    status: int
    content: bytes


class _Connection(HTTPConnection):
    """HTTP over a Unix socket, by the standard library: httpx takes four times its processor time."""

    def __init__(self, path: Path) -> None:
        super().__init__("worker")
        self._path = path

    def connect(self) -> None:
        """See `HTTPConnection.connect`."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_CONNECT_SECONDS)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.timeout)

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the timeout of reads and writes; connect if there is no connection, or the worker has closed it."""
        self.timeout = seconds
        if self.sock is not None:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if poll.poll(0):  # nothing was asked: it is the end
                self.close()
        if self.sock is None:
            self.connect()
        self.sock.settimeout(seconds)

    def post(self, route: str, content: bytes) -> HTTPResponse:
        """Send a request; return the answer, whose content is still to be read."""
        self.request("POST", route, content, {"content-type": "application/json"})
        return self.getresponse()


class Bridge:
    """One job's connection to its worker."""

    def __init__(self, socket: Path, work_dir: Path, timeout: float) -> None:
        """Prepare the connection without sending anything.

        Args:
            socket: path of the worker's Unix socket.
            work_dir: the job's directory; paths in answers are relative to it.
            timeout: seconds that one request may take.
        """
        self.work_dir = work_dir
        self._timeout = timeout
        self._socket = socket
        self._lock = threading.Lock()
        """Held while the next two change."""
        self._idle: list[_Connection] = []
        """Connections that no request uses."""
        self._is_closed = False
        self.has_joined = False
        """Whether `join` was answered with a round."""

    def __enter__(self) -> Bridge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send no further request; those in progress close their connections."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connected(self, route: str, timeout: float | None) -> Iterator[_Connection]:
        """Yield a connection for one request, which is used again if its answer was read to the end."""
        with self._lock:
            if self._is_closed:
                raise BridgeClosed(f"{route}: this process has closed the bridge")
            connection = self._idle.pop() if self._idle else _Connection(self._socket)
        is_read = False
        try:
            connection.wait_at_most(timeout)
            yield connection
            is_read = True
        except TimeoutError:
            raise BridgeTimeout(
                f"{route}: the worker did not answer within {timeout or _CONNECT_SECONDS:g} s"
            ) from None
        except (OSError, HTTPException) as error:
            raise BridgeClosed(f"{route}: the worker closed the bridge ({error or type(error).__name__})") from None
        finally:
            with self._lock:
                is_kept = is_read and not self._is_closed
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def fetch(
        self, reference: AnyReference, out_dir: str, count: int | None = None, *, ahead: bool = False
    ) -> list[Fetched]:
        """Fetch the files of `reference` into `out_dir`; of a dataset, or a resource of slices, the next slice.

        Args:
            reference: what to fetch.
            out_dir: folder of the work directory.
            count: number of slices of the scheduler's dataset to fetch at most; None for one, and for other references.
            ahead: whether these slices are used after `join`.

        Raises:
            NoMoreData: the scheduler has no further slice.
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, did not answer, or answered with an error.
        """
        asked = {"count": count, "ahead": ahead or None}
        given = {key: value for key, value in asked.items() if value is not None}
        body = to_plain(AnyReference, reference) | {"out_dir": out_dir} | given
        answer = self._json("fetch", self._post_with_retry(routes.FETCH, body))
        if not isinstance(answer, list):
            raise BridgeRefused("fetch", 200, "malformed-answer", "not a list of files")
        return [Fetched(self._inside(entry), _metadata(entry)) for entry in answer]

    def join(self) -> routes.RoundJoined:
        """Ask with which round to begin, and wait until the scheduler has decided.

        Raises:
            NotTakingPart: this process will never take part.
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, did not answer, or answered with an error.
        """
        try:
            answer = self._post_with_retry(routes.JOIN, {})
        except NoMoreData as end:
            raise NotTakingPart(str(end)) from None
        joined: routes.RoundJoined = _decoded("join", routes.RoundJoined, answer)
        self.has_joined = True
        return joined

    def send(
        self,
        reference: Reference,
        path: Path,
        round_number: int,
        samples: int,
        contribution: Contribution | None = None,
    ) -> None:
        """Push a file to the peers of `reference`, and wait until they have received it.

        Args:
            reference: receivers.
            path: the file, in the work directory.
            round_number: number of the round.
            samples: samples behind the file, its weight.
            contribution: what the file was computed from, for the scheduler; None states nothing.

        Raises:
            ContributionRefused: the scheduler does not accept the contribution; nothing was pushed.
            RoundClosed: the round goes on without the update; nothing was pushed.
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, did not answer, or answered with an error.
        """
        wanted = Transfer(
            reference=reference,
            path=path.relative_to(self.work_dir).as_posix(),
            round=round_number,
            samples=samples,
            contribution=contribution,
        )
        try:
            self._post_with_retry(routes.SEND, to_plain(Transfer, wanted))
        except BridgeRefused as refusal:
            if refusal.status == _CONFLICT and refusal.kind == routes.ROUND_CLOSED:
                raise RoundWentOn(refusal.detail) from None
            if refusal.status == _CONFLICT:
                raise ContributionRefused(refusal.detail) from None
            raise

    def report_task(self, metrics: Mapping[str, float]) -> bool:
        """Report a task's progress; return whether it shall finish what it has begun, and end.

        Raises:
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, did not answer, or answered with an error.
        """
        response = self._post(routes.UPDATE, json.dumps({"metrics": dict(metrics)}).encode())
        answer = self._json("update", response)
        return isinstance(answer, dict) and answer.get("draining") is True

    def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        """Report batches; return which the scheduler has counted.

        Raises:
            SchedulerRefused: the scheduler answered with an error.
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, did not answer, or answered with an error.
        """
        response = self._post(routes.BATCHES, to_json(TrainedBatches, trained))
        answer: BatchesCounted = _decoded("batches", BatchesCounted, response)
        if answer.reason:
            raise SchedulerRefused(f"the scheduler refused the batches of round {trained.round}: {answer.reason}")
        return answer

    def report(self, progress: TrainingReport) -> ReportAnswer:
        """Send a progress report to the scheduler; return its answer.

        Raises:
            SchedulerRefused: the scheduler answered with an error.
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, did not answer, or answered with an error.
        """
        response = self._post(routes.STATUS, to_json(TrainingReportValue, progress))
        answer: ReportAnswer = _decoded("status", ReportAnswer, response)
        if isinstance(answer, ReportError):
            why = f": {answer.reason}" if answer.reason else "; its log says why"
            raise SchedulerRefused(f"the scheduler refused the report {quote(progress)}{why}")
        return answer

    def report_spans(self, report: routes.SpanReport) -> None:
        """Report spans to the worker for the job's trace, with a short timeout.

        Raises:
            BridgeClosed, BridgeTimeout, BridgeRefused: the worker closed, is too slow, or answered with an error.
        """
        self._post(routes.SPANS, msgspec.json.encode(report), min(_SPANS_SECONDS, self._timeout))

    def updates(self, reference: Reference, out_dir: str) -> OuterUpdates:
        """Open the stream of outer updates from the peers of `reference`; files are written to `out_dir`."""
        return OuterUpdates(self, to_plain(Transfer, Transfer(reference=reference, path=out_dir)))

    def stream(self, route: str, body: Any) -> Iterator[str]:
        """Post and yield the lines of the answer as they arrive, without a read timeout.

        Raises:
            BridgeClosed, BridgeRefused: the worker closed or answered with an error.
        """
        with self._connected(route, None) as connection:
            answer = connection.post(route, json.dumps(body).encode())
            if answer.status != _OK:
                _check(route, _Answer(answer.status, answer.read()))
            while line := answer.readline():
                yield line.rstrip(b"\n").decode(errors="replace")

    def _post_with_retry(self, route: str, body: Any) -> _Answer:
        """Post, and retry while the worker answers that it is busy."""
        deadline = time.monotonic() + self._timeout
        content = json.dumps(body).encode()
        while True:
            try:
                return self._post(route, content)
            except BridgeRefused as refusal:
                may_wait = refusal.kind == _NO_FREE_SLICE or time.monotonic() <= deadline
                if refusal.status != _UNAVAILABLE or not may_wait:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _post(self, route: str, content: bytes, timeout: float | None = None) -> _Answer:
        with self._connected(route, self._timeout if timeout is None else timeout) as connection:
            response = connection.post(route, content)
            answer = _Answer(response.status, response.read())
        _check(route, answer)
        return answer

    def _json(self, what: str, answer: _Answer) -> Any:
        try:
            return parse_json(answer.content)
        except ValueError:
            raise BridgeRefused(what, answer.status, "malformed-answer", "not JSON") from None

    def _inside(self, entry: Any) -> Path:
        """Return the path of a file, which must be inside the work directory."""
        name = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not is_inside(name):
            raise BridgeRefused("file", 200, "malformed-answer", f"no path inside the work directory: {quote(name)}")
        return self.work_dir / name

    def received(self, entry: Any) -> Received:
        """Read one event of the stream of outer updates.

        Raises:
            BridgeRefused: the event names no file inside the work directory, or no round.
        """
        path = self._inside(entry)
        number, weights = entry.get("round"), entry.get("weights")
        if type(number) is not int:
            raise BridgeRefused("receive", 200, "malformed-answer", f"no round: {quote(number)}")
        return Received(path, number, weights if isinstance(weights, str) else None)


class OuterUpdates:
    """The stream of outer updates, read by one thread for the whole job and ordered by round."""

    def __init__(self, bridge: Bridge, body: Any) -> None:
        self._bridge = bridge
        self._changed = threading.Condition()
        """Held while the next two change."""
        self._arrived: dict[int, Received] = {}
        self._failure: ExecutorError | None = None
        # a daemon thread: a blocked read must not delay the exit of the process
        threading.Thread(target=self._listen, args=(body,), name="outer-updates", daemon=True).start()

    def wait(self, round_number: int, timeout: float) -> Received:
        """Wait for the outer update of a round; files of earlier rounds are deleted.

        Raises:
            BridgeTimeout: none arrived within `timeout` seconds.
            BridgeClosed, BridgeRefused: the stream has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: round_number in self._arrived or self._failure is not None, timeout)
            for number in [number for number in self._arrived if number < round_number]:
                logger.info("dropping the outer update of round %d, which is over", number)
                self._arrived.pop(number).path.unlink(missing_ok=True)
            if round_number in self._arrived:
                return self._arrived.pop(round_number)
            raise self._failure or BridgeTimeout(f"no outer update of round {round_number} came within {timeout:g} s")

    def _listen(self, body: Any) -> None:
        failure: ExecutorError = BridgeClosed("the worker closed the stream of outer updates")
        try:
            for line in self._bridge.stream(routes.RECEIVE, body):
                if line.startswith("data:"):
                    self._take(line.removeprefix("data:"))
        except ExecutorError as error:
            failure = error
        with self._changed:
            self._failure = failure
            self._changed.notify()

    def _take(self, text: str) -> None:
        try:
            event = parse_json(text)
        except ValueError:
            raise BridgeRefused("receive", 200, "malformed-answer", f"not JSON: {quote(text)}") from None
        received = self._bridge.received(event)
        with self._changed:
            self._arrived[received.round] = received
            self._changed.notify()


def _decoded(what: str, kind: Any, answer: _Answer) -> Any:
    try:
        return from_json(kind, answer.content)
    except DecodeError as error:
        raise BridgeRefused(what, answer.status, "malformed-answer", str(error)) from None


def _metadata(entry: Any) -> dict[str, str]:
    metadata = entry.get("metadata")
    return {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _check(route: str, answer: _Answer) -> None:
    if answer.status == _OK:
        return
    try:
        body = parse_json(answer.content)
        kind, detail = str(body["error"]), str(body["detail"])
    except (ValueError, KeyError, TypeError):
        kind, detail = "error", answer.content.decode(errors="replace")
    if answer.status == _GONE:
        raise NoMoreData(detail)
    raise BridgeRefused(route, answer.status, kind, detail)
