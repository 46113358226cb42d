"""The environment and the arguments of an executor's process, the values of their placeholders, and its job file.

Of the worker's own environment a process gets only what `PASSED` names and what holds no secret; see docs/executor.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import translate
from pathlib import Path
from typing import Final

from hypha_proto.bridge_api import MEMORY_VARIABLE
from hypha_proto.resources import GIGABYTE, Resources
from hypha_worker.executors.process.output_log import HIDDEN
from hypha_worker.logs.redaction import SECRET_NAME
from hypha_worker.task_files import TaskFiles

PASSED: Final = (
    *(
        "PATH",
        "LD_LIBRARY_PATH",
        "LANG",
        "LANGUAGE",
        "LC_*",
        "TZ",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
    ),
    *("CUDA_*", "NVIDIA_*", "ROCR_*", "ROCM_*", "HIP_*", "HSA_*", "NCCL_*", "OMP_*", "MKL_*", "OPENBLAS_*"),
    *("UV_*", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
)
"""Patterns of the variables that a process gets from the worker's own environment."""
_PASSED_NAME: Final = re.compile("|".join(translate(pattern) for pattern in PASSED))
TEMPORARY_FOLDER: Final = ".tmp"
"""Name of the folder for temporary files in a process's work directory."""
JOB_JSON: Final = HIDDEN
"""Placeholder of the task as JSON. Where the output of the process contains the value, the placeholder is shown."""
SOCKET_PATH: Final = "{SOCKET_PATH}"
WORK_DIR: Final = "{WORK_DIR}"
JOB_FILE: Final = "{JOB_FILE}"
_FILE_NAME: Final = "job.json"
_SECRET_VALUE: Final = re.compile(r"://[^/\s]*@")
_USER: Final = "hypha"


_UV_FOLDERS: Final = {"UV_CACHE_DIR": "~/.cache/uv", "UV_PYTHON_INSTALL_DIR": "~/.local/share/uv/python"}
"""Folders of uv with their defaults. A process has the owner's only if it may change them."""


def base_environment(work_dir: Path, resources: Resources, writable: Sequence[Path]) -> dict[str, str]:
    """Return the variables of a process that its executor's own ones may replace.

    Args:
        work_dir: the process's folder, which is also its home; some libraries fail without a user's name.
        resources: what its lease has: the number of its threads, and main memory.
        writable: folders that it may change; uv's cache is the owner's if it lies in one of them.
    """
    amounts = {"OMP_NUM_THREADS": str(max(1, int(resources.cpu)))}
    if memory := int(resources.memory * GIGABYTE):
        amounts[MEMORY_VARIABLE] = str(memory)
    files = {"HOME": str(work_dir), "TMPDIR": str(work_dir / TEMPORARY_FOLDER), "USER": _USER, "LOGNAME": _USER}
    return {**amounts, **_passed(), **files, **_uv_folders(writable)}


def _passed() -> dict[str, str]:
    """Return what a process gets of the worker's environment: neither secrets nor the owner's folders of uv."""
    return {
        name: value
        for name, value in os.environ.items()
        if _PASSED_NAME.match(name)
        and not SECRET_NAME.search(name)
        and not _SECRET_VALUE.search(value)
        and name not in _UV_FOLDERS
    }


def _uv_folders(writable: Sequence[Path]) -> dict[str, str]:
    found = {}
    for name, default in _UV_FOLDERS.items():
        with suppress(RuntimeError):  # there is no home, and so none of its folders
            folder = Path(os.environ.get(name, default)).expanduser()
            if any(folder.is_relative_to(allowed) for allowed in writable):
                found[name] = str(folder)
    return found


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder by its value; placeholders inside values are not replaced."""
    names: Sequence[str] = sorted(values, key=text.find)
    first = next((name for name in names if name in text), None)
    if first is None:
        return text
    before, after = text.split(first, 1)
    return before + values[first] + substitute(after, values)


def make_placeholders(files: TaskFiles, socket_path: Path, specification: str) -> dict[str, str]:
    """Write a job's file, which only its owner can read; return the value of each placeholder.

    Args:
        files: the job's files.
        socket_path: of its bridge.
        specification: JSON of what its process is to know, without secrets.

    Raises:
        OSError: the file cannot be written.
    """
    job_file = files.write_file(_FILE_NAME, specification.encode())
    return {
        SOCKET_PATH: str(socket_path),
        WORK_DIR: str(files.work_dir),
        JOB_JSON: specification,
        JOB_FILE: str(job_file),
    }
