"""Slices fetched ahead of their use, as many as training needs to go on while the next ones are fetched.

`data.batches` says how many samples it has in hand; `PrefetchDemand` computes from the speed of training and the
duration of a fetch how many further slices to request, and `SlicePrefetch` fetches them in threads.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.errors import BridgeRefused, ExecutorError, NoMoreData
from hypha_proto.bridge_api import ASSIGNED
from hypha_proto.datasets import MAX_ASSIGNED

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 << 20
"""Bytes of slices in hand and on their way beyond which none is requested that the next batch does not need."""
MAX_SLICES: Final = 32
"""Slices in hand and on their way, more only if two batches need more. Schedulers let a worker hold 256 whatever their
size, those of batches that it has not reported among them."""
MAX_PARALLEL: Final = 4
_REQUEST_SECONDS: Final = 0.25
"""Seconds of training for whose slices one request asks: a request takes some 5 ms of processor time, in all processes
together."""
_REQUEST_BYTES: Final = 1 << 20
"""Bytes of the slices for which one request asks: they can be used when all have come."""
_MARGIN: Final = 2.0
"""Samples in hand, as a multiple of those that are trained while a slice is fetched."""
_KEPT: Final = 15
"""Number of the last measurements whose median counts."""
_LEAST: Final = 3
"""Number of batches after which the speed of training is known."""
_SHORTEST: Final = 1e-9
"""Seconds a sample takes at least, so that a clock may stand still."""


@dataclass(frozen=True, slots=True)
class InHand:
    """What was fetched and not used."""

    samples: int
    slices: int
    bytes: int
    is_half_used: bool
    """Whether it is half a slice or less."""


def _measurements() -> deque[float]:
    return deque(maxlen=_KEPT)


@dataclass(slots=True)
class PrefetchDemand:
    """How many slices to fetch ahead, from what was measured. Pure."""

    batch_size: int
    max_bytes: int = MAX_BYTES
    _fetch_seconds: deque[float] = field(default_factory=_measurements)
    _sample_seconds: deque[float] = field(default_factory=_measurements)
    _samples: deque[float] = field(default_factory=_measurements)
    """Samples of the last slices."""
    _bytes: deque[float] = field(default_factory=_measurements)

    def add_fetch(self, seconds: float) -> None:
        """Record the duration of a fetch."""
        self._fetch_seconds.append(seconds)

    def add_slice(self, samples: int, size: int) -> None:
        """Record a fetched slice: its samples to be used, and its bytes."""
        self._samples.append(samples)
        self._bytes.append(size)

    def add_batch(self, samples: int, seconds: float) -> None:
        """Record a batch and the seconds from when it was in hand until the next one was asked for."""
        self._sample_seconds.append(max(_SHORTEST, seconds / samples))

    @property
    def samples_per_fetch(self) -> float:
        """Samples that are trained while a slice is fetched; 0 as long as too little was measured."""
        if len(self._sample_seconds) < _LEAST or not self._fetch_seconds:
            return 0.0
        return statistics.median(self._fetch_seconds) / statistics.median(self._sample_seconds)

    @property
    def samples_ahead(self) -> float:
        """Samples to have in hand while a batch is trained: those of a batch at least."""
        return max(self.batch_size, _MARGIN * self.samples_per_fetch)

    @property
    def slices_per_request(self) -> int:
        """Number of slices for which one request asks: small ones together."""
        if len(self._sample_seconds) < _LEAST or not self._samples:
            return 1
        seconds = statistics.median(self._sample_seconds) * statistics.median(self._samples)
        most = min(_REQUEST_SECONDS / seconds, _REQUEST_BYTES / max(1.0, statistics.median(self._bytes)), MAX_ASSIGNED)
        return max(1, int(most))

    @property
    def parallel(self) -> int:
        """Number of fetches at a time that keep up with training."""
        if not self._samples:
            return 1
        samples = statistics.median(self._samples) * self.slices_per_request
        return max(1, min(MAX_PARALLEL, math.ceil(self.samples_per_fetch / samples)))

    def further(self, wanted: float, in_hand: InHand, coming: int) -> int:
        """Return how many slices to request now: as many as are lacking, rounded up to whole requests.

        Args:
            wanted: samples to have in hand.
            in_hand: what was fetched.
            coming: number of slices on their way.
        """
        is_short = not coming and (in_hand.samples < self.batch_size or in_hand.is_half_used)
        if not self._samples:
            return int(is_short)
        size, samples = statistics.median(self._bytes), statistics.median(self._samples)
        each = self.slices_per_request
        lacking = math.ceil((math.ceil((wanted - in_hand.samples) / samples) - coming) / each) * each
        slices = max(MAX_SLICES, math.ceil(2 * self.batch_size / samples)) - in_hand.slices - coming
        stored = (self.max_bytes - in_hand.bytes - coming * size) // max(1.0, size)
        return max(int(min(lacking, slices, stored)), int(is_short))


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Slices that were requested together."""

    files: Future[tuple[list[Fetched], float]]
    """Their files, in the order of their assignment, and how many seconds it took to fetch them."""
    slices: int
    """Number of slices, at most."""
    is_ahead: bool
    """Whether training can go on without them."""

    @property
    def number(self) -> int:
        """Number of the first assignment; -1 if there was none, or assignments are not numbered."""
        return -1 if self.files.exception() is not None else _assigned_number(self.files.result()[0][:1])


class SlicePrefetch:
    """Fetches slices in threads; they are taken in the order in which the scheduler has assigned them.

    One request at a time, as long as that is enough or assignments are not numbered, as those of local files: then the
    order of requests is that of assignments.
    """

    def __init__(self, fetch: Callable[[int], list[Fetched]], clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without a request.

        Args:
            fetch: fetches as many of the next slices as it is told, or fewer; raises `NoMoreData` if there is none.
            clock: returns seconds.
        """
        self._fetch = fetch
        self._clock = clock
        self._coming: list[_Request] = []
        self._parallel = 1
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slices")
        self._last = -1
        """Number of the assignment that was taken last; -1 if it is not known."""
        self._most: int | None = None
        """Number of slices that the worker or the scheduler lets this process have; None if none was refused."""
        self.is_over = False
        """Whether the scheduler has said that it assigns no further slice."""

    @property
    def coming(self) -> int:
        """Number of slices that were requested and not taken, at most."""
        return sum(request.slices for request in self._coming)

    def request(self, count: int, in_hand: int, parallel: int = 1, each: int = 1, *, is_ahead: bool = True) -> None:
        """Request further slices, as long as not so many are held that one more was refused.

        Args:
            count: how many.
            in_hand: number of slices that were taken and are not used up.
            parallel: how many requests are sent at a time, where the order of assignments is known.
            each: for how many slices one request asks at most.
            is_ahead: whether training can go on without the first of them, if no other is held.
        """
        self._widen(parallel)
        while count > 0 and not self.is_over:
            held = in_hand + self.coming
            slices = min(count, each, each if self._most is None or not held else self._most - held)
            if slices <= 0:
                return
            request = self._pool.submit(self._timed, slices)
            self._coming.append(_Request(request, slices, is_ahead or held > 0))
            count -= slices

    def take(self, in_hand: int, *, waits: bool) -> tuple[list[Fetched], float] | None:
        """Take the slices of the request that was assigned next; None if none has come.

        Args:
            in_hand: number of slices that were taken and are not used up.
            waits: whether to wait for a request that is being answered, and raise its error if it fails.

        Returns:
            Their files, and the seconds that it took to fetch them.

        Raises:
            ExecutorError: they could not be fetched.
        """
        while (request := self._next(waits)) is not None:
            error = request.files.exception()
            is_fatal = error is not None and not self._goes_on_after(error, request)
            if is_fatal and not waits:
                return None  # it is raised when training needs the slices
            self._coming.remove(request)
            if error is None:
                files, seconds = request.files.result()
                self._last = _assigned_number(files[-1:])
                if self._most is not None:
                    self._most += len(files)
                return files, seconds
            if is_fatal:
                raise error
            self._note(error, in_hand)
        return None

    def drop(self) -> list[Fetched]:
        """Give up what was requested, and wait for the next slices and what is being fetched; return their files."""
        begun = [*self._coming[:1], *(request for request in self._coming[1:] if not request.files.cancel())]
        self._coming, self.is_over = [], False
        files: list[Fetched] = []
        for request in begun:
            try:
                found, _ = request.files.result()  # bounded by the timeouts of the bridge
            except ExecutorError as error:
                logger.info("a slice on its way did not come: %s", error)
            else:
                self._last = max(self._last, _assigned_number(found[-1:]))
                files += found
        return files

    def close(self) -> None:
        """Begin no further request; one that is being answered goes on."""
        for request in self._coming:
            request.files.cancel()
        self._pool.shutdown(wait=False)

    def _timed(self, slices: int) -> tuple[list[Fetched], float]:
        began = self._clock()
        files = self._fetch(slices)
        return files, self._clock() - began

    def _widen(self, parallel: int) -> None:
        """Send more requests at a time from now on; never fewer, since order and speed vary."""
        if parallel <= self._parallel or self._last < 0:
            return
        logger.info("training is faster than one request for slices at a time: up to %d from now on", parallel)
        self._parallel = parallel
        self._pool.shutdown(wait=False)  # it fetches what was requested before
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="slices")

    def _next(self, waits: bool) -> _Request | None:
        """Return the request that was assigned next, when it is known; None if it is not, or there is no request."""
        while self._coming:
            in_turn = self._coming if self._parallel > 1 else self._coming[:1]
            done = [request for request in in_turn if request.files.done()]
            if done:
                first = min(done, key=lambda request: request.number)
                # an assignment in between may have failed; then nothing is left that could come before
                if self._parallel == 1 or first.number <= self._last + 1 or len(done) == len(self._coming):
                    return first
            if not waits:
                return None
            wait([request.files for request in in_turn if request not in done], return_when=FIRST_COMPLETED)
        return None

    @staticmethod
    def _goes_on_after(error: BaseException, request: _Request) -> bool:
        """Return whether training goes on although slices did not come."""
        return isinstance(error, NoMoreData) or (isinstance(error, BridgeRefused) and request.is_ahead)

    def _note(self, error: BaseException, in_hand: int) -> None:
        """Request no slice like this one again: never, or not while as many are in hand."""
        if isinstance(error, NoMoreData):
            logger.info("no further slice: %s", error)
            self.is_over = True
            return
        if self._most is None:
            logger.warning("no slice ahead of its use while %d are in hand: %s", in_hand, error)
        self._most = max(1, in_hand)


def _assigned_number(files: Iterable[Fetched]) -> int:
    """Return the number of the first slice's assignment; -1 if it is not numbered."""
    text = next((file.metadata[ASSIGNED] for file in files if ASSIGNED in file.metadata), "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
