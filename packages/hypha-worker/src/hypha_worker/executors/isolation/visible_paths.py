"""Which files of the machine a confined executor sees: the system's, those of its program, and what its owner named."""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

SYSTEM_FOLDERS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store")
ETC: Final = tuple(
    f"/etc/{name}"
    for name in (
        *("alternatives", "ca-certificates", "crypto-policies", "debian_version", "fonts", "gai.conf", "group"),
        *("host.conf", "hostname", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime"),
        *("machine-id", "magic", "mime.types", "netconfig", "nsswitch.conf", "OpenCL", "os-release", "passwd", "pki"),
        *("protocols", "python3", "python3.11", "python3.12", "python3.13", "resolv.conf", "services", "ssl/certs"),
        *("ssl/cert.pem", "ssl/openssl.cnf", "timezone", "vulkan", "xml"),
    )
)
"""Entries of /etc that programs need and that hold no secrets; what else is there stays hidden."""
_SHEBANG: Final = re.compile(rb"#!\s*(\S+)(?:\s+(\S+))?")
_LINK_LIMIT: Final = 40
LOOK_AGAIN: Final = 2.0
"""Seconds for which what was found in the file system may be used again: small tasks start many times a second."""


def program_paths(program: Path, writable: Sequence[Path] = ()) -> list[Path]:
    """Return what a program needs beside the system's folders: itself, its Python environment, its interpreter.

    Looks again `LOOK_AGAIN` seconds after it has looked last.

    Args:
        program: absolute path. Symbolic links, the ``home`` of ``pyvenv.cfg``, folders in ``.pth`` files (editable
            installations) and the first line of a script are followed.
        writable: folders that jobs may change. They are shown in any case; what is in them names nothing further, since
            a job may have put it there for the next one.
    """
    return list(_find_program_paths(program, tuple(writable), current_period()))


def current_period() -> int:
    """Return a number that is another one every `LOOK_AGAIN` seconds: a part of the key of what is kept so long."""
    return int(time.monotonic() / LOOK_AGAIN)


@functools.lru_cache(maxsize=64)
def _find_program_paths(program: Path, writable: Sequence[Path], _period: int) -> list[Path]:
    shown = _with_targets(writable)
    found: dict[Path, None] = {}
    waiting = [program]
    while waiting:
        path = waiting.pop()
        if path in found or _is_of_system(path) or _lies_in(path, shown) or not _exists(path):
            continue
        found[path] = None
        if path.is_dir():
            continue
        targets = _link_targets(path)
        if any(_lies_in(target, shown) for target in targets):
            continue
        waiting += targets
        waiting += _interpreters(path)
        if (prefix := _python_prefix(path)) is not None and not _lies_in(prefix, shown):
            waiting += [prefix, *_referenced(prefix)]
    return _outermost(found)


def _link_targets(path: Path) -> list[Path]:
    """Return what a symbolic link names, link by link."""
    targets: list[Path] = []
    while path.is_symlink() and len(targets) < _LINK_LIMIT:
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        targets.append(path)
    return [*targets, path.resolve()]


def _interpreters(path: Path) -> list[Path]:
    """Return the programs that the first line of a script names, if they are named by absolute paths."""
    try:
        with path.open("rb") as file:
            match = _SHEBANG.match(file.read(256))
    except OSError:
        return []
    words = [] if match is None else [Path(os.fsdecode(word)) for word in match.groups() if word]
    return [word for word in words if word.is_absolute()]


def _python_prefix(program: Path) -> Path | None:
    """Return the folder of the virtual environment or Python installation that a program belongs to."""
    if program.parent.name != "bin":
        return None
    prefix = program.parent.parent
    is_environment = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    return prefix if is_environment or any(prefix.glob("lib/python3*/os.py")) else None


def _referenced(prefix: Path) -> list[Path]:
    """Return the base installation of a virtual environment, and the folders of packages that lie outside of it."""
    found: list[Path] = []
    if (config := prefix / "pyvenv.cfg").is_file():
        homes = re.findall(r"^home\s*=\s*(.+?)\s*$", config.read_text(), re.MULTILINE)
        # the folder's own programs lead to its prefix
        found += [program for home in homes for program in Path(home).glob("python3")]
    for file in prefix.glob("lib/python3*/site-packages/*.pth"):
        lines = [Path(line.strip()) for line in file.read_text(errors="replace").splitlines()]
        found += [line for line in lines if line.is_absolute() and line.is_dir()]
    return found


def configured_paths(texts: Iterable[str], writable: Sequence[Path] = ()) -> list[Path]:
    """Return the existing files and folders that an executor's arguments and variables name by absolute paths.

    Args:
        texts: arguments and values of variables.
        writable: folders that jobs may change; paths in them are left out, as in `program_paths`.
    """
    shown = _with_targets(writable)
    return _outermost(path for text in texts for path in _paths_in(text, shown))


def _paths_in(text: str, shown: Sequence[Path]) -> Iterator[Path]:
    for part in text.rpartition("=")[2].split(os.pathsep):
        if part.startswith("/") and "\0" not in part and _exists(path := Path(os.path.normpath(part))):
            targets = _link_targets(path)
            if not any(_lies_in(each, shown) for each in (path, *targets)):
                yield path
                if path.is_symlink():
                    yield targets[-1]


def _with_targets(folders: Iterable[Path]) -> list[Path]:
    return [each for folder in folders for each in (folder, folder.resolve())]


def _lies_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a path, or a folder that may not be searched
        return False


def without_ancestors(paths: Iterable[Path], private: Sequence[Path]) -> list[Path]:
    """Return those of `paths` that lead to nothing private; a warning names the others.

    Used for paths that were guessed from arguments; what the owner lists in ``readable`` counts, and private files in
    it are covered.
    """
    kept: list[Path] = []
    for path in paths:
        if path == Path("/") or any(each.resolve().is_relative_to(path.resolve()) for each in private):
            _log.warning("an executor's argument names %s, which has the worker's private files: list in readable "
                         "what the executor needs of it", path)  # fmt: skip
        else:
            kept.append(path)
    return kept


def not_yet_shown(paths: Iterable[Path], shown: Sequence[Path]) -> list[Path]:
    """Return those of `paths` that lie in no other one and in none of `shown`.

    A sandbox cannot show a symbolic link once more that lies in a folder which it shows read-only.
    """
    return list(_find_not_yet_shown(tuple(paths), tuple(shown)))


@functools.lru_cache(maxsize=64)
def _find_not_yet_shown(paths: Sequence[Path], shown: Sequence[Path]) -> list[Path]:
    return [path for path in _outermost(paths) if not _lies_in(path, shown)]


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that lie in no other one and not in a folder of the system."""
    unique = {path for path in paths if not _is_of_system(path)}
    return sorted(path for path in unique if unique.isdisjoint(path.parents))


def _is_of_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SYSTEM_FOLDERS)
