"""AIM repository (https://aimstack.readthedocs.io): the only module that imports AIM; translates its errors.

A repository is a directory, or ``aim://HOST:PORT`` for an ``aim server``. AIM is imported when the first run is opened,
since that takes seconds and the HTTP application need not wait for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hypha_aim_driver.retry_queue import NotWrittenError

EXPERIMENT: Final = "hypha"
REMOTE: Final = "aim://"
_JOB: Final = "hypha"
"""Run parameter that holds Hypha's own data."""


def aim_is_installed() -> bool:
    """Return whether the package ``aim`` is installed, without importing it."""
    return importlib.util.find_spec("aim") is not None


@contextmanager
def _translate_errors(doing: str) -> Iterator[None]:
    """Raise `NotWrittenError` for any error of AIM, which raises errors of its storage and client, and `Exception`."""
    try:
        yield
    except NotWrittenError:
        raise
    except Exception as error:
        raise NotWrittenError(f"{doing}: {type(error).__name__}: {error}") from error


class AimRepository:
    """Runs of one AIM repository. Not thread-safe."""

    def __init__(self, location: str) -> None:
        """Set the location; opens nothing yet.

        Args:
            location: a directory, created if missing, or ``aim://HOST:PORT``.
        """
        self._location = location
        self._aim: Any = None
        self._repo: Any = None

    def open(self, job_id: str | None) -> AimRun:
        """Open the existing run of a job or create one; always create one without a job id.

        Raises:
            NotWrittenError: AIM fails.
        """
        with _translate_errors(f"opening a run in {self._location}"):
            repo = self._connect()
            known = None if job_id is None else self._find(job_id)
            # AIM breaks locks of dead processes on this machine, but locks on a server outlive its clients
            run = self._aim.Run(
                known,
                repo=repo,
                experiment=EXPERIMENT,
                force_resume=known is not None and self._location.startswith(REMOTE),
                system_tracking_interval=None,
                capture_terminal_logs=False,
            )
            if known is None:
                run[_JOB] = {"job_id": job_id}
                run.name = "Hypha" if job_id is None else f"job {job_id}"
            return AimRun(run, self._location)

    def _connect(self) -> Any:
        if self._aim is None:
            self._aim = importlib.import_module("aim")
            logging.getLogger("aim").setLevel(logging.WARNING)  # importing AIM sets another level
            logging.getLogger("aim.ext.transport").setLevel(logging.CRITICAL)  # logs every attempt; the queue logs one
        if self._repo is None:
            if self._location.startswith(REMOTE):
                self._repo = self._aim.Repo(self._location)
            else:
                Path(self._location).mkdir(parents=True, exist_ok=True)
                self._repo = self._aim.Repo.from_path(self._location, init=True)
        return self._repo

    def _find(self, job_id: str) -> str | None:
        """Return the hash of a job's run from before the driver started; reads every run, as AIM's index may lag."""
        for run_hash in self._repo.list_all_runs():
            meta = self._repo.request_tree("meta", run_hash, read_only=True)
            attributes = meta.subtree(("meta", "chunks", run_hash, "attrs"))
            if attributes.get(_JOB, {}).get("job_id") == job_id:
                return str(run_hash)
        return None


class AimRun:
    """One job's run in AIM. Every method raises `NotWrittenError` when AIM fails."""

    def __init__(self, run: Any, location: str) -> None:
        """Wrap an ``aim.Run`` that is open for writing."""
        self._run = run
        self._location = location

    def track(self, value: float, *, name: str, step: int, worker: str) -> None:
        """Write one value in the worker's context; the same name, step and worker overwrite an earlier value."""
        with _translate_errors(f"writing to {self._location}"):
            self._run.track(value, name=name, step=step, context={"worker": worker})

    def confirm(self) -> None:
        """Read from the run, which AIM answers only after everything tracked before was written."""
        with _translate_errors(f"writing to {self._location}"):
            self._run.get(_JOB)

    def close(self) -> None:
        """End the run."""
        with _translate_errors(f"closing a run in {self._location}"):
            self._run.close()
