"""Files of the results: parts as they come in, checked, and moved to ``results`` once the journal has them.

A part is received in ``incoming``, under a name of its own. Its check brings it to disk; then the journal records it
with that name; then it is moved. A crash before the record leaves a file that nobody knows, one after it a file that
`settle` moves.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec

from hypha_net.errors import TransferRefusedError
from hypha_proto.codec import to_json
from hypha_proto.datasets import JSONL, MANIFEST, Manifest, SliceEntry
from hypha_proto.file_digests import digest_file
from hypha_proto.ids import PeerId
from hypha_proto.whole_directory import replace_file
from hypha_scheduler.errors import files_unusable
from hypha_scheduler.jobs.artifacts import sync_to_disk
from hypha_scheduler.strategies.inference.part_check import ErrorKind, InvalidPartError, PartCounts, check_part

RESULTS: Final = "results"
INCOMING: Final = "incoming"
_PART_NAME: Final = re.compile(r"part-(0|[1-9][0-9]{0,9})\.jsonl")


def part_name(index: int) -> str:
    """Return the name of a slice's part."""
    return f"part-{index}.jsonl"


def slice_of(name: str) -> int | None:
    """Return the slice of a part by its name, or None if it is no part's name."""
    found = _PART_NAME.fullmatch(name)
    return int(found[1]) if found else None


class PartRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of a committed part; the counts are those of `PartCounts`."""

    part: int
    """Number among the job's parts, from 1."""
    slice: int
    rows: int
    errors: int
    tokens: int
    size: int
    digest: str
    file: str
    """Name under which it was received, in ``incoming``."""
    task: str
    attempt: int
    worker: PeerId
    error_kinds: dict[str, ErrorKind] = {}


@dataclass(slots=True)
class PartFiles:
    """Files of one job's results."""

    directory: Path
    """Directory of the job."""
    rows: Sequence[int]
    """Number of rows of each slice."""
    task: str
    """What the rows are computed for."""
    checked: dict[Path, PartCounts] = field(default_factory=dict)
    """Valid parts that the operator has not heard of yet."""

    @property
    def results(self) -> Path:
        """Directory of the results."""
        return self.directory / RESULTS

    @property
    def incoming(self) -> Path:
        """Directory of parts that are received."""
        return self.directory / INCOMING

    def create(self) -> None:
        """Make the directories."""
        for path in (self.results, self.incoming):
            path.mkdir(exist_ok=True)
        sync_to_disk(self.directory)

    def new_file(self, index: int) -> Path:
        """Return a path to receive a slice's part at."""
        return self.incoming / f"{uuid.uuid4().hex[:12]}-{part_name(index)}"

    def lacks_room(self, size: int) -> str | None:
        """Return why a part of `size` bytes cannot be stored, or None if there is room for it."""
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            return files_unusable(self.directory, [error])
        if size <= free:
            return None
        return f"{self.directory}: no room for a part of {size} bytes, {free} are free; free space, then resume the job"

    async def check(self, path: Path, index: int, on_invalid: Callable[[str], None]) -> None:
        """Check a received part and bring it to disk; an invalid one is removed.

        Raises:
            TransferRefusedError: it is invalid; `on_invalid` was called with the reason.
            OSError: it cannot be read or synced.
        """
        try:
            self.checked[path] = await anyio.to_thread.run_sync(self._check, path, index)
        except InvalidPartError as error:
            on_invalid(str(error))
            raise TransferRefusedError(f"part of slice {index}: {error}") from None

    def _check(self, path: Path, index: int) -> PartCounts:
        try:
            counts = check_part(path, index, self.rows[index], self.task)
        except InvalidPartError:
            path.unlink()
            raise
        sync_to_disk(path)
        return counts

    def move(self, part: PartRecord) -> None:
        """Move a part that the journal has to the results.

        Raises:
            OSError: it cannot be moved.
        """
        os.replace(self.incoming / part.file, self.results / part_name(part.slice))
        sync_to_disk(self.results)

    # ---------------------------------------------------------------------------------------------- start and end

    def verify(self, parts: Iterable[PartRecord]) -> list[str]:
        """Return what is wrong with the files of committed parts, and which others are among the results."""
        known = {part_name(part.slice): part for part in parts}
        faults = [fault for part in known.values() if (fault := self._fault_of(part)) is not None]
        others = [name for name in _names(self.results) if name not in known and name != MANIFEST]
        if others:
            shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
            faults.append(f"{self.results} holds {shown}, which this job did not write; move other files away")
        return faults

    def _fault_of(self, part: PartRecord) -> str | None:
        path = self.results / part_name(part.slice)
        if not path.is_file():
            path = self.incoming / part.file
        if not path.is_file():
            return f"the part of slice {part.slice} is missing: {self.results / part_name(part.slice)}"
        if (found := digest_file(path)) != part.digest:
            return f"{path}: the content is {found}, and the journal has {part.digest}"
        return None

    def settle(self, parts: Iterable[PartRecord]) -> None:
        """Finish what a crash has interrupted: move parts that the journal has, and remove others."""
        self.create()
        for part in parts:
            if not (self.results / part_name(part.slice)).exists():
                os.replace(self.incoming / part.file, self.results / part_name(part.slice))
        sync_to_disk(self.results)
        for name in _names(self.incoming):
            (self.incoming / name).unlink()

    def write_manifest(self, dataset: str, parts: Iterable[PartRecord], columns: Mapping[str, str]) -> None:
        """Write the manifest of the results, which makes them a dataset."""
        entries = tuple(
            SliceEntry(file=part_name(part.slice), samples=part.rows, size=part.size, digest=part.digest)
            for part in sorted(parts, key=lambda part: part.slice)
        )
        manifest = Manifest(dataset=dataset, slices=entries, format=JSONL, columns=dict(columns))
        replace_file(self.results / MANIFEST, to_json(Manifest, manifest))


def _names(directory: Path) -> list[str]:
    """Return the names of a directory's files; hidden ones are none of a job's."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(entry.name for entry in found if not entry.name.startswith("."))
