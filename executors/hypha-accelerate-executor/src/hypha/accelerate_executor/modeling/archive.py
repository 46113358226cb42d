"""Models and preprocessors that come as one file: an archive, unpacked beside it, or one of a preprocessor's files."""

from __future__ import annotations

from pathlib import Path

from hypha.accelerate_executor.errors import ModelError
from hypha_proto.file_archive import ArchiveError, is_archive, unpack_archive
from hypha_proto.whole_directory import replace_directory


def unpacked(path: Path) -> Path:
    """Return the directory with the files of an archive, which it replaces; other files and directories stay.

    The directory appears with all files. A process that ends before leaves the archive for the next one.

    Raises:
        ModelError: it cannot be unpacked.
    """
    packed = path.with_name(f".{path.name}.tar")
    is_left = packed.exists() and not path.exists()
    if not is_left and (path.is_dir() or not is_archive(path)):
        return path
    try:
        if not is_left:
            path.rename(packed)
        with replace_directory(path) as folder:
            unpack_archive(packed, folder)
        packed.unlink()
    except (ArchiveError, OSError) as error:
        raise ModelError(f"{path.name} cannot be unpacked: {error}") from None
    return path


def unpacked_files(paths: list[Path]) -> list[Path]:
    """Return the paths of fetched files, or the directory with those of the archive that they are.

    Raises:
        ModelError: it cannot be unpacked.
    """
    return [unpacked(paths[0])] if len(paths) == 1 else paths
