"""Runs of executors in the layers of this machine, by root and by an ordinary user, for tests of isolation."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hypha_worker.executors.isolation.visible_paths import program_paths
from support.requirements import skip_outside_ci

ROOT = Path(__file__).parents[2]
NOBODY = 65534
"""The ordinary user that root's tests become."""
TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run."""

    exit_code: int
    lines: Sequence[str]
    error: str | None
    findings: dict[str, bool]

    @property
    def answer(self) -> Any:
        """The JSON that the script has printed last."""
        assert self.lines, self
        return json.loads(self.lines[-1])


@dataclass(frozen=True, slots=True)
class ConfinedRuns:
    """Starts runs in a folder, as one user."""

    folder: Path
    as_nobody: bool

    @property
    def work_dir(self) -> Path:
        """The worker's folder, with the folders of jobs."""
        return self.folder / "work"

    def run(self, script: str, *needed: str, **options: Any) -> Run:
        """Run a script to its end. Skips the test if a layer in `needed` does not work, or fails it in CI as root."""
        done = subprocess.run(
            self.command(script, **options),
            env=options.get("environment"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        run = Run(**json.loads(done.stdout.splitlines()[-1]))
        for name in needed:
            require_layer(name, run.findings)
        return run

    def command(self, script: str, **options: Any) -> list[str]:
        """Return the command that runs a script."""
        self.work_dir.mkdir(exist_ok=True)
        if self.as_nobody:
            os.chown(self.work_dir, NOBODY, NOBODY)
        told = {
            "work_dir": str(self.work_dir),
            "key": str(self.folder / "key.pem"),
            "script": script,
            "args": options.get("args", []),
            "env": options.get("env", {}),
            "network": options.get("network", True),
            "readable": [str(path) for path in options.get("readable", [])],
            "writable": [str(path) for path in options.get("writable", [])],
            "storage": options.get("storage", 10**9),
            "disabled": options.get("disabled", []),
            "cancelled": options.get("cancelled", False),
        }
        command = [sys.executable, str(ROOT / "tests" / "support" / "run_confined.py"), json.dumps(told)]
        return as_user(command, [self.folder], NOBODY) if self.as_nobody else command


def require_layer(name: str, findings: dict[str, bool]) -> None:
    """Skip a test that needs a layer which does not work here; in CI, where all are installed, fail it."""
    if not findings.get(name):
        skip_outside_ci(f"the layer {name} does not work on this machine")


def as_user(command: Sequence[str], folders: Sequence[Path], uid: int) -> list[str]:
    """Return a command that runs `command` as another user, who can reach Python, the checkout and `folders`.

    In a mount namespace of its own, the folders above them that are closed to others are covered by open ones.
    """
    needed = [path for path in (*program_paths(Path(sys.executable)), ROOT, *folders) if path.exists()]
    closed = sorted({_closed_ancestor(path) for path in needed} - {None}, key=str)
    steps = ["mount --make-rprivate /"]
    for ancestor in closed:
        inside = [path for path in needed if _closed_ancestor(path) == ancestor]
        steps += [f"exec {number + 3}<{shlex.quote(str(path))}" for number, path in enumerate(inside)]
        steps.append(f"mount -t tmpfs -o mode=755 none {shlex.quote(str(ancestor))}")
        for number, path in enumerate(inside):
            made = path if path.is_dir() else path.parent
            steps.append(f"mkdir -p {shlex.quote(str(made))}")
            if not path.is_dir():
                steps.append(f"touch {shlex.quote(str(path))}")
            steps.append(f"mount --no-canonicalize --rbind /proc/self/fd/{number + 3} {shlex.quote(str(path))}")
            steps.append(f"exec {number + 3}<&-")
    change = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", *command]
    return ["unshare", "--mount", "sh", "-ec", "\n".join((*steps, f"exec {shlex.join(change)}"))]


def _closed_ancestor(path: Path) -> Path | None:
    """Return the highest folder above `path` that other users cannot enter."""
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)


def users() -> list[Any]:
    """Return the users that tests run as: every night root becomes an ordinary one, too."""
    is_root = os.geteuid() == 0
    can_change = is_root and shutil.which("setpriv") is not None and shutil.which("unshare") is not None
    return [
        pytest.param(False, id="root" if is_root else "user"),
        *([pytest.param(True, id="nobody", marks=pytest.mark.nightly)] if can_change else []),
    ]
