"""The lowest sibling versions that a package admits have everything that its code uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.min_versions import install, lowest, siblings, taken, what_is_missing, wheel_of
from support.wheelhouse import Package, packages, passed, run

BY_NAME = {package.name: package for package in packages()}
WITH_SIBLINGS = [package for package in packages() if siblings(package, BY_NAME)]
each_package = pytest.mark.parametrize("package", WITH_SIBLINGS, ids=lambda package: package.name)

PYPROJECT = """[project]
name = "{name}"
version = "{version}"
requires-python = ">=3.11"

[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""


@pytest.mark.nightly
@each_package
def test_the_lowest_siblings_have_what_is_used_of_them(package: Package, tmp_path: Path, wheels: Path) -> None:
    required = siblings(package, BY_NAME)
    chosen = [BY_NAME[canonicalize_name(each.name)] for each in required]
    built = [wheel_of(sibling, lowest(each), tmp_path, wheels) for sibling, each in zip(chosen, required, strict=True)]
    place = tmp_path / "installed"
    install(built, place)
    needs = list(taken(package.folder / "src", [sibling.module.split(".")[0] for sibling in chosen]))
    assert needs, "an unused sibling need not be required"
    assert what_is_missing(needs, place) == []


# ------------------------------------------------------ the check itself, on a repository with a bound that is too low


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Package `low`, released as 0.1.0 without `later`, at 0.2.0 with it."""
    root = tmp_path / "repository"
    source = root / "packages" / "low" / "src" / "low"
    source.mkdir(parents=True)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root)]
    passed(run(["git", "init", "--quiet", str(root)]))
    for version, code in (("0.1.0", "def first(): ..."), ("0.2.0", "def first(): ...\ndef later(): ...")):
        text = PYPROJECT.format(name="low", version=version, module="low")
        (root / "packages" / "low" / "pyproject.toml").write_text(text)
        (source / "__init__.py").write_text("")
        (source / "parts.py").write_text(code)
        passed(run([*git, "add", "."]))
        passed(run([*git, "commit", "--quiet", "-m", version]))
    passed(run([*git, "tag", "low-v0.1.0", "HEAD~1"]))
    return root


@pytest.mark.nightly
@pytest.mark.parametrize(
    "use", ["from low.parts import later", "def f():\n    from low import parts\n    parts.later()"]
)
def test_a_bound_that_is_too_low_is_found(use: str, repository: Path, tmp_path: Path) -> None:
    low = Package(repository / "packages" / "low", {"name": "low", "version": "0.2.0"})
    high = tmp_path / "high"
    high.mkdir()
    (high / "__init__.py").write_text(f"from low.parts import first\n{use}\n")
    needs = list(taken(high, ["low"]))
    wheel = wheel_of(low, lowest(Requirement("low>=0.1,<0.3")), tmp_path, tmp_path, repository)
    assert "-0.1.0-" in wheel.name
    install([wheel], tmp_path / "installed")
    assert what_is_missing(needs, tmp_path / "installed") == ["low.parts has no later"]
    assert what_is_missing(needs, low.folder / "src") == []


def test_a_bound_without_or_with_an_unknown_lowest_version_is_refused(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="name the lowest version that works"):
        lowest(Requirement("low<0.3"))
    low = Package(repository / "packages" / "low", {"name": "low", "version": "0.2.0"})
    with pytest.raises(AssertionError, match=r"low 0\.1\.5 has no tag, and the tree is at 0\.2\.0"):
        wheel_of(low, Version("0.1.5"), tmp_path, tmp_path, repository)
