"""The values of the placeholders in an executor's arguments and environment, and the file with its specification.

Called by the executions of this folder before the process starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hypha_worker.executors.process.output_log import HIDDEN
from hypha_worker.job_files import JobFiles

JOB_JSON: Final = HIDDEN
"""Placeholder whose value is replaced by its name wherever the output of the process shows it."""
SOCKET_PATH: Final = "{SOCKET_PATH}"
WORK_DIR: Final = "{WORK_DIR}"
JOB_FILE: Final = "{JOB_FILE}"
_FILE_NAME: Final = "job.json"


def make_placeholders(files: JobFiles, socket_path: Path, specification: str) -> dict[str, str]:
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
