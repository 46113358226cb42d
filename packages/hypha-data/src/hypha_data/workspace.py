"""Folder in which ``prepare`` works, so that an interrupted one continues: ``.prepare`` in the folder of the dataset.

It holds the plan (what is prepared and how), which another plan replaces, and a journal of the slices that are
finished.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import BinaryIO, Final

from hypha_data.errors import DatasetError
from hypha_proto.codec import from_json, split_json_lines, to_json
from hypha_proto.datasets import MANIFEST, Manifest, SliceEntry
from hypha_proto.errors import DecodeError
from hypha_proto.whole_directory import replace_file, sync

WORK: Final = ".prepare"
"""Name of the folder."""
_PLAN: Final = "plan.json"
_JOURNAL: Final = "slices.jsonl"
_LOCK: Final = "lock"


class Workspace:
    """Working folder of one dataset; a context manager that removes it unless the work can be continued.

    Attributes:
        out: folder of the dataset.
        folder: the working folder, which has the finished slices, too.
    """

    def __init__(self, out: Path, plan: bytes) -> None:
        """Take the folder; what another plan has left is removed.

        Raises:
            DatasetError: another process prepares this dataset.
            OSError: the folder cannot be written to.
        """
        self.out, self.folder = out, out / WORK
        self._made_out = not out.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock: BinaryIO = (self.folder / _LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DatasetError(
                f"{out}: another hypha-data prepare writes this dataset; wait for it or end it"
            ) from None
        path = self.folder / _PLAN
        self.is_resumed = path.is_file() and path.read_bytes() == plan
        if not self.is_resumed:
            self._clear()
            replace_file(path, plan)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, DatasetError) and not self.is_resumed):  # keep earlier work
            shutil.rmtree(self.folder)
            if error is not None and self._made_out and not any(self.out.iterdir()):
                self.out.rmdir()
        self._lock.close()

    def finished(self) -> list[SliceEntry]:
        """Return the slices that are finished, in order."""
        path = self.folder / _JOURNAL
        found: list[SliceEntry] = []
        for line in split_json_lines(path.read_bytes()) if path.is_file() else ():
            try:
                entry: SliceEntry = from_json(SliceEntry, line)
            except DecodeError:  # the last line of an interrupted write
                break
            file = self.folder / entry.file
            if not file.is_file() or file.stat().st_size != entry.size:
                break
            found.append(entry)
        return found

    def add_finished(self, entries: list[SliceEntry]) -> None:
        """Record the slices that are finished, the last of which is new."""
        sync(self.folder / entries[-1].file)
        mode = "ab" if len(entries) > 1 else "wb"
        with (self.folder / _JOURNAL).open(mode) as file:
            file.write(to_json(SliceEntry, entries[-1]) + b"\n")

    def manifest(self) -> Manifest | None:
        """Return the manifest if all slices are finished and may have been moved in part."""
        path = self.folder / MANIFEST
        if not self.is_resumed or not path.is_file():
            return None
        found: Manifest = from_json(Manifest, path.read_bytes())
        return found

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, after which the slices may be published."""
        replace_file(self.folder / MANIFEST, to_json(Manifest, manifest))

    def publish(self, manifest: Manifest, old: list[Path]) -> None:
        """Move the slices and the manifest into the dataset's folder, and remove old slices."""
        for entry in manifest.slices:
            path = self.folder / entry.file
            if path.exists():  # not moved by an interrupted attempt
                path.replace(self.out / entry.file)
        replace_file(self.out / MANIFEST, to_json(Manifest, manifest))
        for path in {*old} - {self.out / entry.file for entry in manifest.slices}:
            path.unlink(missing_ok=True)
