"""Checkpoints of a job: the last and the best loadable model of its rounds.

A checkpoint is a directory as of the result, and another job may start from it. ``index.json`` beside them names the
last and the best. As long as no round is evaluated, a running job also keeps the newest checkpoint after which training
went on without a worse loss. What writes or removes files runs in a thread.

An evaluation is the mean over the workers that evaluate a round's weights. Each evaluates the merged weights on its
share of the evaluation dataset, while the others train on. So the shares of a round arrive at any time; a round counts
as evaluated when the first result of a later one arrives.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha_proto.whole_directory import remove_tree, replace_directory
from hypha_scheduler.jobs.artifacts import write_result

CHECKPOINTS: Final = "checkpoints"
"""Directory of the checkpoints, in the job's directory."""
INDEX: Final = "index.json"
_NAME: Final = re.compile(r"round-([1-9][0-9]{0,9})")
_UNEVALUATED: Final = 2
"""Number of checkpoints that are kept until they are evaluated, beside the last and the best."""
_MAX_SAMPLES: Final = 1 << 53

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsQuality:
    """Quality of the weights after a round."""

    loss: float
    """Mean loss of the workers' results, weighted by samples."""
    accuracy: float | None
    """Mean accuracy likewise; None if no worker reports one."""
    samples: int


@dataclass(slots=True)
class Evaluations:
    """Evaluations by round."""

    _results: dict[int, WeightsQuality] = field(default_factory=dict)

    def add(self, round_number: int, loss: float, accuracy: float | None, samples: float) -> None:
        """Add the result of one worker, which `is_evaluation`; an accuracy outside 0 to 1 is left out."""
        if accuracy is not None and not 0 <= accuracy <= 1:
            accuracy = None
        new = WeightsQuality(loss, accuracy, int(samples))
        known = self._results.get(round_number)
        self._results[round_number] = new if known is None else _mean(known, new)

    def of(self, round_number: int) -> WeightsQuality | None:
        """Return the evaluation of a round so far."""
        return self._results.get(round_number)

    @property
    def newest(self) -> int:
        """Return the last round of which a result has arrived, 0 without any; the rounds before it are evaluated."""
        return max(self._results, default=0)

    def best(self, rounds: Iterable[int]) -> int | None:
        """Return the round with the lowest loss among `rounds`, the later one if they are equal; None if none has one.

        Accuracy decides nothing: it is the same for many different weights.
        """
        found = {number: self._results[number] for number in rounds if number in self._results}
        return min(found, key=lambda number: (found[number].loss, -number), default=None)

    def forget(self, kept: Collection[int]) -> None:
        """Drop the evaluations of other rounds before the newest."""
        newest = self.newest
        self._results = {n: result for n, result in self._results.items() if n in kept or n >= newest}

    def record(self) -> dict[str, Any]:
        """Return the evaluations as a JSON object."""
        return {str(number): asdict(result) for number, result in sorted(self._results.items())}

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Evaluations:
        """Return what `record` has written.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is malformed.
        """
        found = cls()
        for number, result in record.items():
            if not is_evaluation(float(result["loss"]), result["samples"]):
                raise ValueError(f"the evaluation of round {number} is not one")
            found.add(int(number), result["loss"], result["accuracy"], result["samples"])
        return found


def is_evaluation(loss: float, samples: float) -> bool:
    """Return whether the numbers of a worker's result make sense."""
    return math.isfinite(loss) and 1 <= samples <= _MAX_SAMPLES


def _mean(first: WeightsQuality, second: WeightsQuality) -> WeightsQuality:
    samples = first.samples + second.samples
    loss = (first.loss * first.samples + second.loss * second.samples) / samples
    if first.accuracy is None or second.accuracy is None:
        accuracy = second.accuracy if first.accuracy is None else first.accuracy
    else:
        accuracy = (first.accuracy * first.samples + second.accuracy * second.samples) / samples
    return WeightsQuality(loss, accuracy, samples)


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints in a directory."""

    directory: Path
    every: int = 0
    """Number of rounds between checkpoints; 0 for none."""
    evaluate_every: int = 0
    """Number of rounds between evaluations; 0 for none."""
    good: int = 0
    """Last round whose weights have trained well (`LossTrend.good`)."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    """What has arrived until the last `settle`."""
    _arrived: deque[tuple[int, float, float | None, float]] = field(default_factory=deque)
    """Results of workers that are not in `evaluations` yet: they arrive while another thread works with it."""
    _rounds: set[int] = field(default_factory=set)
    _written: dict[str, Any] = field(default_factory=dict)
    """Contents of ``index.json``."""

    def is_due(self, round_number: int) -> bool:
        """Return whether a checkpoint is to be written after a round."""
        return self.every > 0 and round_number % self.every == 0

    def path(self, round_number: int) -> Path:
        """Return the directory of a round's checkpoint."""
        return self.directory / f"round-{round_number}"

    @property
    def last(self) -> int | None:
        """Return the round of the last checkpoint."""
        return max(self._rounds, default=None)

    def best(self, *, complete: bool = False) -> int | None:
        """Return the round of the best checkpoint that was evaluated; None if none was.

        Args:
            complete: whether no further result of the newest evaluation is expected.
        """
        newest = self.evaluations.newest
        return self.evaluations.best(number for number in self._rounds if complete or number < newest)

    def last_good(self) -> int | None:
        """Return the round of the best checkpoint, or else of the last that has trained well; None without either."""
        good = max((number for number in self._rounds if number <= self.good), default=None)
        return self.best() or good

    def evaluated(self, round_number: int, loss: float, accuracy: float | None, samples: float) -> bool:
        """Take the result of one worker; return False if it is ignored since its numbers make no sense."""
        if not is_evaluation(loss, samples):
            return False
        self._arrived.append((round_number, loss, accuracy, samples))
        return True

    def write(self, round_number: int, fill: Callable[[Path], None]) -> None:
        """Write the checkpoint of a round with `fill`, which is given an empty directory; delete what is not kept.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        with replace_directory(self.path(round_number)) as folder:
            fill(folder)
        self._rounds.add(round_number)
        self.settle()

    def settle(self, *, complete: bool = False) -> None:
        """Write ``index.json`` if something has changed, and delete the checkpoints that are not kept.

        Args:
            complete: whether no further result of the newest evaluation is expected.

        Raises:
            OSError: a file cannot be written or deleted.
        """
        while self._arrived:
            self.evaluations.add(*self._arrived.popleft())
        kept = self._kept(complete)
        self.evaluations.forget(kept)
        index = {**self.summary(complete=complete), "evaluations": self.evaluations.record()}
        if self._rounds and index != self._written:
            write_result(self.directory / INDEX, index)
            self._written = index
        for number in sorted(self._rounds - kept):
            remove_tree(self.path(number))
            self._rounds.discard(number)

    def _kept(self, complete: bool) -> set[int]:
        wanted = {self.last, self.best(complete=True) if complete else self.last_good()}
        if not complete and self.evaluate_every:
            newest = self.evaluations.newest
            waiting = [n for n in self._rounds if n >= newest and n % self.evaluate_every == 0]
            wanted |= set(sorted(waiting)[-_UNEVALUATED:])
        return {number for number in wanted if number is not None}

    def summary(self, *, complete: bool = True) -> dict[str, Any]:
        """Return the last and the best checkpoint: round, directory and evaluation; null where there is none."""
        return {"last": self._describe(self.last), "best": self._describe(self.best(complete=complete))}

    def _describe(self, round_number: int | None) -> dict[str, Any] | None:
        if round_number is None:
            return None
        result = self.evaluations.of(round_number)
        found = {"round": round_number, "directory": self.path(round_number).name}
        return found if result is None else {**found, **asdict(result)}

    def restore(self, round_number: int) -> None:
        """Go on with the checkpoints of an earlier run, up to a round; delete others and what was not completed.

        Raises:
            OSError: a file cannot be read or deleted.
        """
        self._rounds.clear()
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[1]) <= round_number and path.is_dir():
                self._rounds.add(int(match[1]))
            elif path.name != INDEX:
                remove_tree(path)
        self.evaluations = self._read_evaluations()
        self.settle()

    def _read_evaluations(self) -> Evaluations:
        path = self.directory / INDEX
        try:
            return Evaluations.parse(json.loads(path.read_bytes())["evaluations"])
        except FileNotFoundError:
            return Evaluations()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.warning("%s is malformed, so earlier evaluations do not count: %r", path, error)
            return Evaluations()
