"""AIM itself: the only module that imports it, and where its errors become `NotWrittenError`.

`runs` asks for a job's run and writes into it. A repository is a folder, or ``aim://HOST:PORT``, an ``aim server``.
AIM is imported when the first run is opened: that takes seconds, and the HTTP side need not wait for it.
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
"""Parameter of a run that holds what Hypha knows of it."""


def aim_is_installed() -> bool:
    """Whether the package ``aim`` can be imported; without importing it."""
    return importlib.util.find_spec("aim") is not None


@contextmanager
def _aim_may_fail(doing: str) -> Iterator[None]:
    """AIM raises whatever its storage and its client raise, and bare `Exception` too."""
    try:
        yield
    except NotWrittenError:
        raise
    except Exception as error:
        raise NotWrittenError(f"{doing}: {type(error).__name__}: {error}") from error


class AimRepository:
    """Runs of one AIM repository. To be used from one thread."""

    def __init__(self, location: str) -> None:
        """Name the repository; nothing is opened.

        Args:
            location: a folder, which is made when it is not there, or ``aim://HOST:PORT``.
        """
        self._location = location
        self._aim: Any = None
        self._repo: Any = None

    def open(self, job_id: str | None) -> AimRun:
        """See `hypha_aim_driver.runs.Repository.open`."""
        with _aim_may_fail(f"opening a run in {self._location}"):
            repo = self._connected()
            known = None if job_id is None else self._find(job_id)
            # AIM takes back what a dead process of this machine has locked, but a server's locks outlive its clients
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

    def _connected(self) -> Any:
        if self._aim is None:
            self._aim = importlib.import_module("aim")
            logging.getLogger("aim").setLevel(logging.WARNING)  # importing it sets a level of its own
            logging.getLogger("aim.ext.transport").setLevel(logging.CRITICAL)  # tells every attempt; we tell the first
        if self._repo is None:
            if self._location.startswith(REMOTE):
                self._repo = self._aim.Repo(self._location)
            else:
                Path(self._location).mkdir(parents=True, exist_ok=True)
                self._repo = self._aim.Repo.from_path(self._location, init=True)
        return self._repo

    def _find(self, job_id: str) -> str | None:
        """The run that a job had before the driver started; read run by run, for AIM's index may lag behind."""
        for run_hash in self._repo.list_all_runs():
            meta = self._repo.request_tree("meta", run_hash, read_only=True)
            attributes = meta.subtree(("meta", "chunks", run_hash, "attrs"))
            if attributes.get(_JOB, {}).get("job_id") == job_id:
                return str(run_hash)
        return None


class AimRun:
    """One job's run in AIM; see `hypha_aim_driver.runs.Run`."""

    def __init__(self, run: Any, location: str) -> None:
        """Take an ``aim.Run`` that is open for writing."""
        self._run = run
        self._location = location

    def track(self, value: float, *, name: str, step: int, worker: str) -> None:
        """Write one value into the worker's context."""
        with _aim_may_fail(f"writing to {self._location}"):
            self._run.track(value, name=name, step=step, context={"worker": worker})

    def confirm(self) -> None:
        """Read from the run: an answer comes only after everything that was tracked before."""
        with _aim_may_fail(f"writing to {self._location}"):
            self._run.get(_JOB)

    def close(self) -> None:
        """End the run."""
        with _aim_may_fail(f"closing a run in {self._location}"):
            self._run.close()
