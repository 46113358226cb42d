"""Every package builds and installs from its wheel without a compiler and without a clone of this tree."""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from support.wheelhouse import OVERRIDE, ROOT, Package, empty_environment, packages

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

ON_LIBP2P = {"hypha-data", "hypha-gateway", "hypha-local", "hypha-net", "hypha-scheduler", "hypha-worker"}
"""Packages that need the override."""
WITH_NUMPY = {
    "hypha_proto.global_model",
    "hypha_proto.model_contents",
    "hypha_proto.outer_step",
    "hypha_proto.outer_momentum",
    "hypha_proto.safetensors_io",
    "hypha_proto.update_file",
    "hypha_proto.weights_digest",
}
"""Modules that need hypha-proto's extra `update`."""
each_package = pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)


def wheel_of(wheels: Path, package: Package) -> Path:
    [found] = wheels.glob(f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl")
    return found


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_ten_packages_are_built(wheels: Path) -> None:
    assert len(packages()) == 10
    assert len(list(wheels.glob("*.whl"))) == len(list(wheels.glob("*.tar.gz"))) == 10


@each_package
def test_a_wheel_holds_its_package_alone_with_licence_and_types(wheels: Path, package: Package) -> None:
    wheel = wheel_of(wheels, package)
    metadata = metadata_of(wheel)
    assert (metadata["Name"], metadata["Version"]) == (package.name, package.version)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    folder = package.module.replace(".", "/")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    assert all(name.startswith(f"{folder}/") for name in names)
    assert f"{folder}/py.typed" in names
    assert not [name for name in names if not name.endswith((".py", "py.typed", ".json", ".html", ".css", ".js"))]


@each_package
def test_an_sdist_has_what_is_needed_to_build_and_test(wheels: Path, package: Package) -> None:
    with tarfile.open(wheels / f"{package.name.replace('-', '_')}-{package.version}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"} <= names
    assert any(name.startswith("tests/test_") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def documented_installation(name: str) -> str:
    """Return the documented installation command for a package."""
    blocks = re.findall(r"```bash\n(uv pip install .*?)\n", (ROOT / "docs" / "install.md").read_text())
    [command] = [block for block in blocks if "--override" in block]
    assert OVERRIDE in command
    assert command.endswith(" hypha-worker")
    command = command.removesuffix("hypha-worker") + name
    return command if name in ON_LIBP2P else f"uv pip install {name}"


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(each, marks=pytest.mark.gate if each.name == "hypha-worker" else (), id=each.name)
        for each in packages()
    ],
)
def test_it_installs_alone_without_a_compiler_and_shows_its_help(
    wheels: Path, tmp_path: Path, package: Package
) -> None:
    with empty_environment(tmp_path / "env", wheels) as environment:
        environment.shell(documented_installation(package.name))
        shown = environment.evaluate(f"import {package.module} as m; print(m.__file__ or list(m.__path__)[0])")
        assert Path(shown).is_relative_to(environment.folder)
        for program in package.programs:
            shown = environment.program(program, "--help")
            assert "Usage:" in shown
            assert environment.program(program, "-h") == shown
            assert package.version in environment.program(program, "--version")
            if "  init " in shown:
                environment.shell(f"{program} init --out node.toml && {program} config show --config node.toml")
            if program == "hypha-worker":
                check_executor_by_uv(environment.folder / "empty" / "node.toml")


def check_executor_by_uv(file: Path) -> None:
    """Check that `init` of a worker names a command that works without an installed executor."""
    [train, _] = tomllib.loads(file.read_text())["executors"]
    separator = train["args"].index("--")
    assert train["cmd"] == "uv"
    assert train["args"][:separator] == ["run", "--no-project", "--with", "hypha-accelerate-executor"]
    assert train["args"][separator + 1 : separator + 4] == ["python", "-m", "hypha.accelerate_executor.training"]


def test_hypha_proto_needs_only_msgspec_and_cbor2(wheels: Path, tmp_path: Path) -> None:
    proto = next(package for package in packages() if package.name == "hypha-proto")
    with empty_environment(tmp_path / "env", wheels) as environment:
        environment.shell(f"uv pip install msgspec cbor2 && uv pip install --no-deps {wheel_of(wheels, proto)}")
        with zipfile.ZipFile(wheel_of(wheels, proto)) as archive:
            files = [name for name in archive.namelist() if name.endswith(".py")]
        modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
        bare = sorted(set(modules) - WITH_NUMPY)
        assert len(bare) > 10
        code = f"import importlib, importlib.metadata as m\nfor n in {bare!r}: importlib.import_module(n)\n"
        code += "print(*sorted(d.name for d in m.distributions()))"
        assert environment.evaluate(code) == "cbor2 hypha-proto msgspec"


def test_a_network_of_installed_wheels_trains_a_model(wheels: Path, tmp_path: Path) -> None:
    with empty_environment(tmp_path / "env", wheels) as environment:
        environment.shell(documented_installation("hypha-local"))
        environment.shell("hypha-local demo --workers 1 --rounds 2 --dir run --format json > summary.json", timeout=240)
        summary = json.loads((environment.folder / "empty" / "summary.json").read_text())
        assert summary["rounds"] == 2
        assert (environment.folder / "empty" / "run" / "model" / "config.json").is_file()
