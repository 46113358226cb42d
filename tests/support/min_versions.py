"""Check that a package works with the lowest sibling versions that its bounds admit: build, install, inspect.

A released version is built from its tag (`hypha-net-v0.1.0`), the current version from the tree. What a package uses
of a sibling is read from its code: names that it imports, also within functions, and attributes of imported modules.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.wheelhouse import ROOT, Package, passed, run, uv

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


def lowest(requirement: Requirement) -> Version:
    """Return the lowest version that a bound admits; fail if there is no lower bound."""
    floors = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==", "~=")]
    assert len(floors) == 1, f"{requirement}: name the lowest version that works"
    return floors[0]


def siblings(package: Package, known: Mapping[str, Package]) -> list[Requirement]:
    """Return the requirements of a package on siblings, without extras."""
    required = [Requirement(text) for text in package.project.get("dependencies", [])]
    return [each for each in required if canonicalize_name(each.name) in known]


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
