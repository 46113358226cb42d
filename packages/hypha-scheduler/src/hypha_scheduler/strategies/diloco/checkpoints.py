"""Checkpoints of a job: the last and the best loadable model of its rounds.

A checkpoint is a directory as of the result, and another job may start from it. ``index.json`` beside them names the
last and the best. As long as none is evaluated, a job that runs also keeps the last one that training has shown to be
good. All of it runs in a thread, but for `evaluated`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha_proto.whole_directory import remove_tree, replace_directory
from hypha_scheduler.jobs.artifacts import write_result
from hypha_scheduler.strategies.diloco.evaluations import Evaluations, is_evaluation

CHECKPOINTS: Final = "checkpoints"
"""Directory of the checkpoints, in the job's directory."""
INDEX: Final = "index.json"
_NAME: Final = re.compile(r"round-([1-9][0-9]{0,9})")
_UNEVALUATED: Final = 2
"""Number of checkpoints that are kept until they are evaluated, beside the last and the best."""

_log = logging.getLogger(__name__)


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
