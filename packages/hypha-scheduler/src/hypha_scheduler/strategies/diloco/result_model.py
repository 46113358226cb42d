"""The weights of a job on the scheduler's disk: float32 state of each round, checkpoints, and the result.

The parameter server pushes the outer updates to the scheduler as to the workers. `advance` writes the state after a
round completely and syncs it, before the journal records the round; `commit` makes it the job's after that. So the
state of the last recorded round is whole whenever the scheduler dies (`hypha_proto.global_model`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.file_digests import digest_file
from hypha_proto.job_spec import Nesterov
from hypha_proto.model_listing import CONFIG
from hypha_proto.whole_directory import replace_directory, sync
from hypha_scheduler.errors import JobFailedError, files_unusable, waits_for_room
from hypha_scheduler.strategies.diloco.checkpoints import CHECKPOINTS, Checkpoints

if TYPE_CHECKING:
    from hypha_proto.global_model import GlobalModel, RoundState

START_MODEL: Final = "start-model"
"""Directory of the start model, in the job's directory; never changed."""
OUTER_STATE: Final = "outer-state"
"""Directory of float32 weights and outer momentum."""
UPDATES: Final = "updates"
"""Directory of outer updates."""
MODEL: Final = "model"
"""Directory of the result."""
_UPDATE_NAME: Final = re.compile(r"round-([1-9][0-9]{0,9})(-[^.]*)?\.safetensors")
_OWN_FILES: Final = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
"""Files of a start model that no file of a preprocessor replaces."""
_NUMBERED: Final = re.compile(r"LABEL_[0-9]+")
"""Names that transformers gives to classes without one."""
_DEFAULT_CLASSES: Final = 2
"""Number of classes of a config.json that states none."""

_log = logging.getLogger(__name__)


class UpdateFileError(JobFailedError):
    """An outer update that cannot be added to the weights."""


@dataclass(slots=True)
class ResultModel:
    """The job's weights, to which outer updates are added."""

    directory: Path
    """The job's directory; the start model is in `START_MODEL`."""
    optimizer: Nesterov
    """The job's outer optimizer."""
    keep_updates: bool = False
    """Whether all outer updates stay in `UPDATES`, as ``round-N.safetensors``; otherwise the last one does for now."""
    preprocessor: Path | None = None
    """Directory of the preprocessor's files, which each written model gets."""
    checkpoint_every: int = 0
    """Number of rounds between checkpoints; 0 for none."""
    evaluate_every: int = 0
    """Number of rounds between evaluations; 0 for none."""
    class_names: Sequence[str] = ()
    """Names of the classes in the training data, which each written model gets if its own are only numbered."""
    round: int = 0
    """Last committed round."""
    weights: str | None = None
    """Digest of the weights after that round; None before round 1."""
    update_bytes: int = 0
    """Size of the last outer update in bytes."""
    _pending: dict[int, tuple[RoundState, Path]] = field(default_factory=dict)
    """State and update of rounds that are on disk and not committed."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _checkpoints: Checkpoints = field(init=False)
    _checkpoint_due: int | None = None
    """Round whose checkpoint is to be written next."""
    _checkpoint_begun: int | None = None
    """Round whose checkpoint is being written."""
    _checkpoint_lock: anyio.Lock = field(default_factory=anyio.Lock)

    def __post_init__(self) -> None:
        self._checkpoints = Checkpoints(self.directory / CHECKPOINTS, self.checkpoint_every, self.evaluate_every)

    @property
    def start_dir(self) -> Path:
        """Return the directory of the start model."""
        return self.directory / START_MODEL

    @property
    def model_dir(self) -> Path:
        """Return the directory of the result."""
        return self.directory / MODEL

    # ---------------------------------------------------------------------------------------------------------- rounds

    async def advance(self, update: Path, round_number: int) -> RoundState:
        """Write the state after a round and sync it to disk; the round is not committed by that.

        Can be repeated, also after an error, until the round is committed.

        Args:
            update: file of the outer update.
            round_number: its round; the one before must be committed, or recorded and about to be.

        Raises:
            UpdateFileError: the update does not fit, or holds NaN or infinity; nothing of it is left.
            OSError: a file cannot be written, as when the disk is full; nothing of it is left.
            ValueError: it is not the turn of this round.
        """
        async with self._lock:
            latest = max(self._pending, default=self.round)
            if not self.round < round_number <= latest + 1:
                raise ValueError(f"round {round_number} does not follow round {self.round}")
            self.update_bytes = (await anyio.Path(update).stat()).st_size
            state = await anyio.to_thread.run_sync(self._add, update, round_number)
            self._pending = {n: found for n, found in self._pending.items() if n < round_number}
            self._pending[round_number] = (state, update)
            return state

    def _add(self, update: Path, round_number: int) -> RoundState:
        try:
            state = self._model().add(update, round_number)
            if self.keep_updates:
                sync(update)
        except TensorFileError as error:
            raise UpdateFileError(f"the outer update of round {round_number} cannot be used: {error}") from None
        except OSError as error:
            if error.filename is None:  # as from writing to an open file
                error = OSError(error.errno, error.strerror, str(self.directory))
            raise error from None
        return state

    async def discard(self, update: Path) -> None:
        """Delete an outer update of a round that is known already."""
        await anyio.Path(update).unlink(missing_ok=True)

    async def commit(self, round_number: int) -> None:
        """Make an advanced round the last one, after its record is on disk; older states and updates are deleted.

        `round` and `weights` change at once. Can be repeated after an error. A checkpoint that is due is written by
        `write_checkpoint`.

        Raises:
            OSError: a file cannot be moved or deleted.
        """
        state, update = self._pending[round_number]
        if round_number > self.round and self._checkpoints.is_due(round_number):
            if self._checkpoint_due is not None:
                _log.info("round %d gets no checkpoint: an earlier one is still being written", self._checkpoint_due)
            self._checkpoint_due = round_number
        self.round, self.weights = round_number, state.weights
        async with self._lock:
            await anyio.to_thread.run_sync(self._settle_updates, round_number, update)
            await self._remove_states()
        del self._pending[round_number]

    async def write_checkpoint(self) -> Path | None:
        """Write the checkpoint that is due, if one is; bring the index of the checkpoints up to date in any case.

        Called after each `commit`, in the background: further rounds can be advanced and committed meanwhile. If
        several are due by then, only the newest is written next.

        Returns:
            The directory of the checkpoint, if one was written. For want of room it is left out, which is logged.

        Raises:
            JobFailedError: a file of the model is malformed.
        """
        async with self._checkpoint_lock:
            if (due := self._checkpoint_due) is None:
                await self._try_to_write("the index of the checkpoints", self._checkpoints.settle)
                return None
            self._checkpoint_due, self._checkpoint_begun = None, due
            write = partial(self._checkpoints.write, due, partial(self._fill, due))
            try:
                written = await self._try_to_write(f"the checkpoint of round {due}", write)
            finally:
                self._checkpoint_begun = None
            async with self._lock:
                await self._remove_states()
            return self._checkpoints.path(due) if written else None

    async def _remove_states(self) -> None:
        """Delete the states that nothing needs any more."""
        needed = {self.round, *self._pending, self._checkpoint_due, self._checkpoint_begun}
        kept = {number for number in needed if number is not None}
        await anyio.to_thread.run_sync(self._model().remove_others, kept)

    async def _try_to_write(self, what: str, write: Callable[[], None]) -> bool:
        """Write something without which the job can go on; return whether it worked."""
        try:
            await anyio.to_thread.run_sync(write)
        except OSError as error:
            _log.warning("%s: %s could not be written: %s", self.directory, what, error)
            return False
        return True

    def evaluated(self, round_number: int, loss: float, accuracy: float | None, samples: float) -> None:
        """Take what a worker measured with the weights after a round, on its share of the evaluation dataset.

        Called when its report arrives, at any time before `finish`. Numbers that make no sense are ignored.
        """
        is_known = 0 < round_number <= self.round + 1
        if not is_known or not self._checkpoints.evaluated(round_number, loss, accuracy, samples):
            _log.warning("ignoring an evaluation of round %d: loss %r, %r samples", round_number, loss, samples)

    def note_good(self, round_number: int) -> None:
        """Take the last round whose weights have trained well, whose checkpoint is kept (`LossTrend.good`)."""
        self._checkpoints.good = round_number

    def good_checkpoint(self) -> Path | None:
        """Return the directory of the checkpoint to go on from if later weights are lost; None if there is none."""
        good = self._checkpoints.last_good()
        return None if good is None else self._checkpoints.path(good)

    def summary(self) -> dict[str, object]:
        """Return the part of ``result.json`` on the model and its checkpoints."""
        return {"model_dir": str(self.model_dir), "checkpoints": self._checkpoints.summary()}

    def _settle_updates(self, round_number: int, update: Path) -> None:
        """Keep the update of a committed round, and delete files of earlier ones that are not kept."""
        for path in sorted(update.parent.glob("round-*.safetensors")):
            match = _UPDATE_NAME.fullmatch(path.name)
            if match is not None and int(match[1]) < round_number and not (self.keep_updates and match[2] is None):
                path.unlink(missing_ok=True)
        self._settle_update(round_number, update)

    def _settle_update(self, round_number: int, update: Path) -> None:
        kept = update.with_name(f"round-{round_number}.safetensors")
        if update.exists() or (self.keep_updates and not kept.exists()):
            os.replace(update, kept)
            sync(update.parent)

    def _kept_update(self, round_number: int) -> Path:
        return self.directory / UPDATES / f"round-{round_number}.safetensors"

    def restore(self, round_number: int, weights: str | None) -> None:
        """Go on from the last recorded round of an earlier run: check its state, delete that of other rounds.

        Reads the whole state.

        Args:
            round_number: the round; 0 if none was recorded.
            weights: digest of the weights after it, as recorded.

        Raises:
            JobFailedError: the state is missing, damaged or of other weights; the message names the file.
        """
        try:
            update = None
            if round_number:
                state = self._model().check(round_number)
                if state.weights != weights:
                    raise JobFailedError(
                        f"{self._model().directory(round_number)}: its weights have the digest {state.weights}, the "
                        f"journal records {weights} for round {round_number}: they are of another job"
                    )
                update = state.update
            self._model().remove_others({round_number})
            self._restore_updates(round_number, update)
            self._checkpoints.restore(round_number)
        except TensorFileError as error:
            raise JobFailedError(f"{self.directory / OUTER_STATE}: the job cannot go on: {error}") from None
        except OSError as error:
            raise JobFailedError(files_unusable(self.directory, [error])) from None
        self.round, self.weights = round_number, weights
        self._pending.clear()
        lacking = round_number > 0 and self._checkpoints.is_due(round_number) and self._checkpoints.last != round_number
        self._checkpoint_due = round_number if lacking else None

    def _restore_updates(self, round_number: int, digest: str | None) -> None:
        """Delete outer updates that are not kept, and complete what `commit` does with the last one."""
        for path in sorted((self.directory / UPDATES).glob("*")):
            match = _UPDATE_NAME.fullmatch(path.name)
            if self.keep_updates and match and match[2] is None and int(match[1]) <= round_number:
                continue
            if match and int(match[1]) == round_number and digest_file(path) == digest:
                self._settle_update(round_number, path)
            elif path.is_file():
                path.unlink()

    # ----------------------------------------------------------------------------------------------------------- files

    def weights_file(self) -> Path | None:
        """Return the file of the weights after the last committed round; None before round 1."""
        from hypha_proto.global_model import WEIGHTS

        return self._model().directory(self.round) / WEIGHTS if self.round else None

    def update_file(self) -> Path | None:
        """Return the file of the outer update of the last committed round; None if there is none."""
        path = self._kept_update(self.round)
        return path if self.round and path.exists() else None

    def momentum_file(self) -> Path | None:
        """Return the file of the outer momentum after the last committed round; None if there is none."""
        from hypha_proto.global_model import MOMENTUM

        return self._model().directory(self.round) / MOMENTUM if self.round and self.optimizer.momentum else None

    def largest_update(self) -> int:
        """Return the size limit of an outer update in bytes: float32 for a model stored in 8 bits or more a number."""
        return 4 * self.model_bytes() + (16 << 20)

    def model_bytes(self) -> int:
        """Return the size of the start model's weights in bytes."""
        return sum(path.stat().st_size for path in self.start_dir.glob("*.safetensors"))

    def lacks_room(self, size: int) -> str | None:
        """Return why an outer update of `size` bytes cannot be stored, or None if there is room for it."""
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            return waits_for_room(self.directory, error)
        if size <= free:
            return None
        full = OSError(errno.ENOSPC, f"an outer update has {size} bytes, {free} are free", str(self.directory))
        return waits_for_room(self.directory, full)

    async def finish(self) -> None:
        """Write the model after the last committed round to `MODEL` and sync it to disk; complete the checkpoints.

        Raises:
            JobFailedError: a file is malformed.
            OSError: a file cannot be written; nothing of it is left.
        """
        await self.write_checkpoint()
        async with self._checkpoint_lock, self._lock:
            await anyio.to_thread.run_sync(self._write_result)

    def _write_result(self) -> None:
        with replace_directory(self.model_dir) as folder:
            self._fill(self.round, folder)
        self._checkpoints.settle(complete=True)
        if not self.keep_updates:
            self._kept_update(self.round).unlink(missing_ok=True)

    def _fill(self, round_number: int, folder: Path) -> None:
        """Write the loadable model after a round to an empty directory."""
        try:
            self._copy_other_files(folder)
            self._model().write_model(round_number, folder)
            if self.class_names and (folder / CONFIG).is_file():
                name_classes(folder / CONFIG, self.class_names)
        except (TensorFileError, DecodeError) as error:
            raise JobFailedError(f"the model after round {round_number} cannot be written: {error}") from None

    def _copy_other_files(self, folder: Path) -> None:
        """Copy configuration, tokenizer and preprocessor files; the preprocessor's are those that were trained with."""
        for source in (self.start_dir, self.preprocessor):
            for path in [] if source is None else sorted(source.rglob("*")):
                name = path.relative_to(source or path)
                kept = source is not self.start_dir and (folder / name).exists() and any(map(name.match, _OWN_FILES))
                if path.is_file() and path.suffix != ".safetensors" and not kept:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, folder / name)

    def _model(self) -> GlobalModel:
        from hypha_proto.global_model import GlobalModel  # imported late: numpy takes 0.1 s

        return GlobalModel(self.start_dir, self.directory / OUTER_STATE, self.optimizer)


def name_classes(config_file: Path, names: Sequence[str]) -> None:
    """Write names of classes to the config.json of a classifier that has as many, and no names but ``LABEL_0``, ….

    Raises:
        DecodeError: it is not JSON.
    """
    config = parse_json(config_file.read_bytes())
    if not isinstance(config, dict):
        raise DecodeError(f"{config_file.name} is not a JSON object")
    own = config.get("id2label")
    known = list(own.values()) if isinstance(own, dict) else []
    count = len(known) or config.get("num_labels", _DEFAULT_CLASSES)
    if count != len(names) or not all(_NUMBERED.fullmatch(str(name)) for name in known):
        return
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    config["label2id"] = {name: number for number, name in enumerate(names)}
    config_file.write_text(json.dumps(config, indent=2) + "\n")
