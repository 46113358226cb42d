"""Versions are static and in the changelog, bounds between packages exist, and one tag releases one package.

A package works with the lowest sibling versions that its bounds admit. A released version is built from its tag
(`hypha-net-v0.1.0`), the current version from the tree. What a package uses of a sibling is read from its code: names
that it imports, also within functions, and attributes of imported modules.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.wheelhouse import OVERRIDE, ROOT, Package, packages, passed, quiet_environment, run, uv

_LOOK = """
import importlib, json, sys
problems = []
for module, name in json.load(sys.stdin):
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        problems.append(f"{module}: {error}")
        continue
    if name and not hasattr(found, name):
        try:
            importlib.import_module(f"{module}.{name}")
        except ImportError:
            problems.append(f"{module} has no {name}")
print(json.dumps(sorted(set(problems))))
"""


def wheel_of(package: Package, version: Version, folder: Path, wheels: Path) -> Path:
    """Return the wheel of a package version: built from its tag, or from the tree if it is the current version.

    Args:
        folder: where the content of a tag is unpacked and built.
        wheels: folder with the wheels of the tree.
    """
    for tag in (f"{package.name}-v{text}" for text in (version, f"{version}.0")):
        if run(["git", "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}"], cwd=ROOT).returncode == 0:
            return _built(package, tag, folder)
    assert Version(package.version) == version, (
        f"{package.name} {version} has no tag, and the tree is at {package.version}"
    )
    [wheel] = wheels.glob(f"{package.name.replace('-', '_')}-*.whl")
    return wheel


def _built(package: Package, tag: str, folder: Path) -> Path:
    sources, out = folder / tag, folder / f"{tag}-wheel"
    sources.mkdir(parents=True)
    archive = folder / f"{tag}.tar"
    passed(run(["git", "archive", "--output", str(archive), tag, str(package.folder.relative_to(ROOT))], cwd=ROOT))
    passed(run(["tar", "-xf", str(archive), "-C", str(sources)]))
    place = sources / package.folder.relative_to(ROOT)
    passed(run([*uv(), "build", "--quiet", "--wheel", "--out-dir", str(out), str(place)]))
    [wheel] = out.glob("*.whl")
    return wheel


def taken(sources: Path, modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what code uses of other packages: module and name, or a module with an empty name.

    Args:
        modules: names of the packages, such as ``hypha_net``.
    """
    for path in sorted(sources.rglob("*.py")):
        tree = ast.parse(path.read_text())
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in modules:
                        yield alias.name, ""
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in modules:
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    yield str(node.module), alias.name
        yield from _attributes(tree, aliases)


def _attributes(tree: ast.AST, aliases: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield attributes of imported modules, such as `instrumentation.span`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            imported = aliases[node.value.id]
            if imported.rsplit(".", 1)[1].islower():
                yield imported, node.attr


def what_is_missing(needs: Sequence[tuple[str, str]], place: Path) -> list[str]:
    """Return which of `needs` the packages unpacked at `place` lack."""
    modules = {name for name, _ in needs if _is_module(name, place)}
    asked = [
        need for need in needs if need[0] in modules or "." not in need[0] or need[0].rsplit(".", 1)[0] not in modules
    ]
    done = subprocess.run(
        [sys.executable, "-c", _LOOK],
        input=json.dumps(sorted(set(asked))),
        env={"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    problems: list[str] = json.loads(passed(done))
    return problems


def _is_module(name: str, place: Path) -> bool:
    path = place.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def install(wheels: Sequence[Path], place: Path) -> None:
    """Install exactly these wheels into a folder, without their dependencies."""
    command = [*uv(), "pip", "install", "--quiet", "--no-deps", "--offline", "--target", str(place)]
    passed(run([*command, "--python", sys.executable, *map(str, wheels)]))


BY_NAME = {package.name: package for package in packages()}
each_package = pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)

DISTRIBUTIONS = {
    "dns": "dnspython",
    "google": "protobuf",
    "opentelemetry": "opentelemetry-sdk",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
}
"""Imported names whose distribution has another name."""


def requirements(package: Package) -> list[Requirement]:
    return [Requirement(text) for text in package.project["dependencies"]]


def siblings(package: Package) -> list[Requirement]:
    """Return the requirements of a package on siblings, without extras."""
    return [each for each in requirements(package) if canonicalize_name(each.name) in BY_NAME]


def lowest(requirement: Requirement) -> Version:
    """Return the lowest version that a bound admits; fail if there is no lower bound."""
    floors = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
    assert len(floors) == 1, f"{requirement}: name the lowest version that works"
    return floors[0]


def released(package: Package) -> list[Version]:
    """Return the versions in a package's changelog."""
    headings = re.findall(r"^## (\S+)", (package.folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    return [Version(heading) for heading in headings]


@each_package
def test_the_version_is_static_and_in_the_changelog(package: Package) -> None:
    assert "dynamic" not in package.project
    assert released(package)[0] == Version(package.version)


@each_package
def test_bounds_between_packages_admit_the_sibling_and_begin_at_a_version_that_exists(package: Package) -> None:
    for requirement in siblings(package):
        sibling = BY_NAME[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(sibling.version), requirement
        assert lowest(requirement) in released(sibling), f"{requirement}: {sibling.name} has no such version"
        # before 1.0 each minor version may break: the bound must not admit a future one
        newest = Version(sibling.version)
        assert not requirement.specifier.contains(f"{newest.major}.{newest.minor + 1}.0"), requirement


def imported(package: Package) -> set[str]:
    """Return the distributions that the package's code imports, also within functions."""
    names = set()
    for path in (package.folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    own = package.module.split(".")[0]
    foreign = {name for name in names if name not in sys.stdlib_module_names and name != own}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in foreign}


@each_package
def test_what_is_imported_is_declared(package: Package) -> None:
    optional = [
        Requirement(text) for texts in package.project.get("optional-dependencies", {}).values() for text in texts
    ]
    declared = {canonicalize_name(each.name) for each in requirements(package)}
    extras = {canonicalize_name(each.name) for each in optional}
    assert imported(package) - declared - extras == set()


def test_the_documents_name_the_override_of_the_lock_file() -> None:
    assert OVERRIDE in (ROOT / "pyproject.toml").read_text()
    assert OVERRIDE in (ROOT / "docs" / "install.md").read_text()
    assert OVERRIDE in (ROOT / "README.md").read_text()


def workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    return loaded


def check_step(tag: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Run the workflow step that reads the tag."""
    [step] = [step for step in workflow()["jobs"]["release"]["steps"] if step.get("id") == "tag"]
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step["run"]],
        cwd=ROOT,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TAG": tag, "GITHUB_OUTPUT": str(output)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@each_package
def test_a_tag_releases_one_package(package: Package, tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = check_step(f"{package.name}-v{package.version}", output)
    assert done.returncode == 0, done.stderr
    assert dict(line.split("=", 1) for line in output.read_text().splitlines()) == {
        "package": package.name,
        "version": package.version,
        "folder": str(package.folder.relative_to(ROOT)),
    }


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("v0.1.0", "names no package"),
        ("hypha-nothing-v0.1.0", "no package hypha-nothing"),
        ("hypha-net-v9.9.9", "pyproject.toml says"),
        ("hypha-net-v", "names no package"),
        ("../../x-v1", "names no package"),
    ],
)
def test_a_tag_that_matches_no_package_releases_nothing(tag: str, reason: str, tmp_path: Path) -> None:
    done = check_step(tag, tmp_path / "output")
    assert done.returncode == 1
    assert reason in done.stdout + done.stderr
    assert not (tmp_path / "output").exists()


def test_the_workflow_is_triggered_by_package_tags_alone() -> None:
    triggers = workflow()[True]  # YAML 1.1 reads the key `on` so
    assert triggers == {"push": {"tags": ["*-v*"]}}
    assert workflow()["permissions"] == {"contents": "write"}


VARIANTS = ("mps_cu128", "cpu", "cu126", "cu129", "rocm64")
EXECUTOR = next(package for package in packages() if package.name == "hypha-accelerate-executor")


def test_the_extras_are_those_of_the_documents() -> None:
    extras = EXECUTOR.project["optional-dependencies"]
    assert set(VARIANTS) <= set(extras)
    page = (ROOT / "docs" / "install.md").read_text()
    assert set(VARIANTS) == set(re.findall(r"^\|[^|]*\| `(\w+)` \|", page, re.MULTILINE))
    for variant in VARIANTS:
        [requirement] = extras[variant]
        assert re.fullmatch(r"torch>=2\.\d+", requirement)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["", *VARIANTS])
def test_a_variant_resolves(wheels: Path, tmp_path: Path, variant: str) -> None:
    wanted = tmp_path / "wanted.txt"
    wanted.write_text(f"hypha-accelerate-executor[{variant}]" if variant else "hypha-accelerate-executor")
    command = [*uv(), "pip", "compile", "--no-header", "--no-annotate", "--python", sys.executable, str(wanted)]
    resolved = passed(run(command, env=quiet_environment(UV_FIND_LINKS=str(wheels))))
    names = {canonicalize_name(re.split(r"[=\[ ]", line)[0]) for line in resolved.splitlines() if line}
    assert {"hypha-accelerate-executor", "hypha-proto", "torch", "accelerate", "transformers"} <= names


@pytest.mark.nightly
def test_the_page_names_the_cuda_version_of_the_lock_file() -> None:
    """The page names the build in the lock file and must change with it."""
    lock = (ROOT / "uv.lock").read_text()
    [version] = re.findall(r'name = "torch"\nversion = "(\d+\.\d+)', lock)
    [cuda] = set(re.findall(r'name = "nvidia-cudnn-cu(\d+)"\nversion', lock))
    assert f"for {version} is CUDA {cuda}" in (ROOT / "docs" / "install.md").read_text().replace("\n", " ")


WITH_SIBLINGS = [package for package in packages() if siblings(package)]
each_with_siblings = pytest.mark.parametrize("package", WITH_SIBLINGS, ids=lambda package: package.name)


@pytest.mark.nightly
@each_with_siblings
def test_the_lowest_siblings_have_what_is_used_of_them(package: Package, tmp_path: Path, wheels: Path) -> None:
    required = siblings(package)
    chosen = [BY_NAME[canonicalize_name(each.name)] for each in required]
    built = [wheel_of(sibling, lowest(each), tmp_path, wheels) for sibling, each in zip(chosen, required, strict=True)]
    place = tmp_path / "installed"
    install(built, place)
    needs = list(taken(package.folder / "src", [sibling.module.split(".")[0] for sibling in chosen]))
    assert needs, "an unused sibling need not be required"
    assert what_is_missing(needs, place) == []
