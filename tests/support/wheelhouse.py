"""Wheels of this tree, and empty environments to install them into, as a user without a clone has them.

Needs uv, searched in `.uv`, on PATH and in this interpreter, in this order.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.fake_http_server import files, served

ROOT = Path(__file__).parents[2]
OVERRIDE = "fastecdsa>=4"
"""The override that an installation without a compiler needs; see the root pyproject.toml."""


@functools.cache
def uv() -> tuple[str, ...]:
    """Return the command that starts uv; fail with the remedy if there is none."""
    own = ROOT / ".uv" / "bin" / "uv"
    if own.is_file():
        return (str(own),)
    if found := shutil.which("uv"):
        return (found,)
    if importlib.util.find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    raise AssertionError(
        "no uv in .uv/bin, on PATH or in this interpreter: python3 -m venv .uv && .uv/bin/pip install uv"
    )


def quiet_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without variables that point uv elsewhere or slow installation down."""
    hidden = ("VIRTUAL_ENV", "UV_COMPILE_BYTECODE", "UV_PROJECT", "UV_FIND_LINKS", "UV_OVERRIDE", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "UV_PYTHON_DOWNLOADS": "never", **changes}


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion."""
    return subprocess.run(
        list(command),
        env=dict(env or quiet_environment()),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def passed(done: subprocess.CompletedProcess[str]) -> str:
    """Return the standard output of a command that must have succeeded."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Package:
    """One distribution of this tree, as described by its pyproject.toml."""

    folder: Path
    project: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the distribution."""
        return str(self.project["name"])

    @property
    def version(self) -> str:
        """Return the static version."""
        return str(self.project["version"])

    @property
    def module(self) -> str:
        """Return the import name."""
        return "hypha.accelerate_executor" if "executor" in self.name else self.name.replace("-", "_")

    @property
    def programs(self) -> tuple[str, ...]:
        """Return the names of its console scripts."""
        return tuple(self.project.get("scripts", {}))


@functools.cache
def packages() -> tuple[Package, ...]:
    """Return all distributions of the workspace, sorted by name."""
    files = [
        path for folder in ("packages", "executors", "drivers") for path in ROOT.glob(f"{folder}/*/pyproject.toml")
    ]
    found = [Package(path.parent, tomllib.loads(path.read_text())["project"]) for path in files]
    return tuple(sorted(found, key=lambda package: package.name))


def build_wheelhouse(folder: Path) -> Path:
    """Build the sdist of every package, and its wheel from the sdist."""
    passed(run([*uv(), "build", "--quiet", "--all-packages", "--out-dir", str(folder)], cwd=ROOT))
    (folder / ".gitignore").unlink(missing_ok=True)
    return folder


@dataclass(frozen=True)
class Environment:
    """A virtual environment with access to the wheelhouse and uv, and nothing else of this tree."""

    folder: Path
    wheels: Path

    def variables(self) -> dict[str, str]:
        """Return the variables for its commands: PATH has only its own programs and uv, so no compiler."""
        path = os.pathsep.join([str(self.folder / "bin"), str(self.folder / "only-uv")])
        return quiet_environment(PATH=path, VIRTUAL_ENV=str(self.folder), UV_FIND_LINKS=str(self.wheels))

    def shell(self, text: str, timeout: float = 300) -> str:
        """Run shell text in an empty folder; return its output."""
        bash = shutil.which("bash")
        assert bash is not None
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return passed(run([bash, "-euc", text], env=self.variables(), cwd=empty, timeout=timeout))

    def program(self, name: str, *words: str) -> str:
        """Run one of its programs; return its output."""
        return passed(run([str(self.folder / "bin" / name), *words], env=self.variables(), cwd=self.folder))

    def evaluate(self, code: str) -> str:
        """Run Python code in isolated mode; return its output."""
        return self.program("python", "-I", "-c", code).strip()


@contextmanager
def empty_environment(folder: Path, wheels: Path) -> Iterator[Environment]:
    """Create an empty environment; removed at the end, because some grow to gigabytes."""
    passed(run([*uv(), "venv", "--quiet", "--python", sys.executable, str(folder)]))
    (folder / "only-uv").mkdir()
    launcher = folder / "only-uv" / "uv"
    launcher.write_text(f'#!{shutil.which("sh")}\nexec {" ".join(uv())} "$@"\n')
    launcher.chmod(0o755)
    try:
        yield Environment(folder, wheels)
    finally:
        shutil.rmtree(folder)


@contextmanager
def release_site(wheels: Path) -> Iterator[str]:
    """Serve the wheels of a release under any folder, as a release page does; yields the URL."""

    def find(path: str) -> tuple[bytes | None, dict[str, str]]:
        wheel = wheels / Path(urlsplit(path).path).name
        return (wheel.read_bytes() if wheel.is_file() and "/releases/download/" in path else None), {}

    with served(files(find)) as url:
        yield url
