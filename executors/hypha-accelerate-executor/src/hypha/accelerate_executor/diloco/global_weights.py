"""Keeps an executor's global weights equal to those that the scheduler has committed.

After each outer update the digest of the weights is compared with the scheduler's, where the worker knows it. If they
differ, or if the executor begins with a round from other weights than its own, they are fetched.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge, Received
from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.distributed.process_group import LoadWeights, ProcessGroup
from hypha.accelerate_executor.errors import BridgeRefused, BridgeTimeout, ModelError
from hypha_proto.errors import TensorFileError
from hypha_proto.job_spec import TrainConfig
from hypha_proto.safetensors_io import TensorFile
from hypha_proto.texts import quote

logger = logging.getLogger(__name__)

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Seconds before each further attempt to fetch weights: the scheduler may just be starting again."""
_UNREACHABLE: Final = frozenset({502, 503, 504})
_FOLDER: Final = "weights"


class GlobalWeights:
    """The global weights of one job at the leader of its processes.

    Attributes:
        round: round of the outer update that they contain last; 0 for the start model.
        fetched: whether they were fetched since `take_fetched` was called.
    """

    def __init__(self, bridge: Bridge, replica: Replica, group: ProcessGroup, config: TrainConfig) -> None:
        """Begin with the values of the model's files."""
        self._bridge = bridge
        self._replica = replica
        self._group = group
        self._config = config
        self._digest: str | None = None
        self.round = 0
        self.fetched = False

    @property
    def digest(self) -> str:
        """Return the digest of the weights."""
        if self._digest is None:
            self._digest = self._replica.digest()
        return self._digest

    def fetch(self, number: int) -> None:
        """Fetch the weights after a round, or a later one, and set the module of all processes to them.

        Raises:
            ExecutorError: they cannot be fetched, or do not fit.
        """
        self._fetch(number, None)
        self._load()

    def begin_from(self, number: int, expected: str | None) -> bool:
        """Take the weights after round `number`, and set the module of all processes to them.

        Args:
            number: 0 for the start model.
            expected: their digest; None for those of the start model.

        Returns:
            Whether they were taken; False if the scheduler has gone on meanwhile.

        Raises:
            ExecutorError: they cannot be fetched, do not fit, or have another digest.
        """
        if expected is None and self.round:
            raise ModelError(
                f"round {number + 1} begins from the start model, and this process has merged {self.round}"
            )
        if expected is not None and expected != self.digest:
            if self._config.weights is None:
                raise ModelError(
                    f"the weights after round {number} are needed, and the job says nowhere where they are"
                )
            self._fetch(number, expected)
            if self.round != number:
                return False
        self.round = number
        self._load()
        return True

    def merge(self, outer: Received, number: int) -> None:
        """Add the outer update of a round, and set the module of all processes to the weights after it.

        An update that fetched weights contain already is not added again.

        Raises:
            ModelError: the update does not fit the model.
            ExecutorError: the weights differ from the scheduler's and cannot be fetched.
        """
        if number > self.round:
            self._replica.add(outer.path)
            self.round, self._digest = number, None
        if outer.weights is not None and number == self.round and outer.weights != self.digest:
            self._repair(number, outer.weights)
        self._load()

    def take_fetched(self) -> bool:
        """Return whether the weights were found to differ and fetched since the last call."""
        fetched, self.fetched = self.fetched, False
        return fetched

    def _repair(self, number: int, expected: str) -> None:
        if self._config.weights is None:
            logger.warning("round %d: the weights differ from the scheduler's, which offers none to fetch", number)
            return
        logger.warning(
            "round %d: the weights have the digest %s, the scheduler's %s: fetching them", number, self.digest, expected
        )
        self._fetch(number, expected)
        self.fetched = True

    def _load(self) -> None:
        self._group.scatter_commands([LoadWeights()] * self._group.size)
        self._replica.load_global()

    def _fetch(self, number: int, expected: str | None) -> None:
        """Replace the weights by the scheduler's of round `number`, or of a later one if it has gone on meanwhile."""
        for pause in (*PAUSES, None):
            fault = self._try_fetch(number)
            if fault is None:
                break
            if pause is None:
                raise ModelError(f"the global weights of round {number} cannot be fetched: {fault}")
            logger.info("fetching the weights again in %g s: %s", pause, fault)
            time.sleep(pause)
        if expected is not None and self.round == number and self.digest != expected:
            raise ModelError(
                f"the fetched weights of round {number} have the digest {self.digest}, and the scheduler has committed "
                f"{expected}"
            )

    def _try_fetch(self, number: int) -> str | None:
        """Fetch and load weights; return why another attempt is needed, or None.

        Raises:
            ModelError: the file does not fit the model.
            ExecutorError: the worker cannot fetch it.
        """
        assert self._config.weights is not None
        try:
            fetched = self._bridge.fetch(self._config.weights, _FOLDER)
        except BridgeTimeout as late:
            return str(late)
        except BridgeRefused as refusal:
            if refusal.status not in _UNREACHABLE:
                raise
            return str(refusal)
        try:
            if len(fetched) != 1:
                raise ModelError(f"weights: the worker fetched {len(fetched)} files, expected one")
            return self._take(fetched[0].path, number)
        finally:
            for file in fetched:
                file.path.unlink(missing_ok=True)

    def _take(self, path: Path, number: int) -> str | None:
        found = read_round(path)
        if found < number:
            return f"the scheduler sent the weights of round {found}, expected those of round {number}"
        self._replica.replace(path)
        self.round, self._digest = found, None
        if found > number:
            logger.warning("the weights are those after round %d already, not after round %d", found, number)
        return None


def read_round(path: Path) -> int:
    """Return the round that the metadata of a file of weights states.

    Raises:
        ModelError: it states none, or the file is malformed.
    """
    try:
        with TensorFile(path) as file:
            text = file.metadata.get("round", "")
    except TensorFileError as error:
        raise ModelError(f"weights {error}") from None
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise ModelError(f"weights {path.name}: round is {quote(text)} in its metadata, expected a number")
    return int(text)
