"""Models and preprocessors that come as a folder or as an archive, which is unpacked beside it.

What lies in such a folder and does not belong to the model is removed from the job's copy, so that no library finds it.
"""

from __future__ import annotations

from pathlib import Path

from hypha.accelerate_executor.errors import ModelError
from hypha_proto.errors import TensorFileError
from hypha_proto.file_archive import ArchiveError, is_archive, unpack_archive
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import list_companions, list_model, names_in, reader_of
from hypha_proto.whole_directory import remove_tree, replace_directory


def unpacked(path: Path, *, is_model: bool) -> Path:
    """Return the directory with the files of an archive, which it replaces; a file that is none stays.

    Only what belongs to a model, or otherwise a preprocessor, is kept in the directory. It appears with all files. A
    process that ends before leaves the archive for the next one.

    Raises:
        ModelError: it cannot be unpacked, or its files are not usable.
    """
    packed = path.with_name(f".{path.name}.tar")
    is_left = packed.exists() and not path.exists()
    try:
        if is_left or (path.is_file() and is_archive(path)):
            if not is_left:
                path.rename(packed)
            with replace_directory(path) as folder:
                unpack_archive(packed, folder)
            packed.unlink()
        if path.is_dir():
            _keep_own_files(path, is_model)
    except (ArchiveError, OSError) as error:
        raise ModelError(f"{path.name} cannot be unpacked: {error}") from None
    return path


def _keep_own_files(folder: Path, is_model: bool) -> None:
    names = names_in(folder)
    try:
        kept = list_model(names, reader_of(folder)) if is_model else list_companions(names)
    except TensorFileError as error:
        raise ModelError(f"{folder.name}: {error}") from None
    if fault := find_fault(folder, kept):
        raise ModelError(f"{folder.name}: {fault}")
    for path in folder.iterdir():
        if path.name not in kept:
            remove_tree(path)


def unpacked_files(paths: list[Path], *, is_model: bool) -> list[Path]:
    """Return the paths of fetched files, or the directory with those of the folder or archive that they are.

    Raises:
        ModelError: as `unpacked`.
    """
    return [unpacked(paths[0], is_model=is_model)] if len(paths) == 1 else paths
