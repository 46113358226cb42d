"""Architecture: import layers hold, walkthroughs name what exists, and only DiLoCo's modules name its terms."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WALKTHROUGHS = ("job.md", "slice.md", "result.md")
_NAME = re.compile(r"`(hypha(?:_[a-z]+)?(?:\.\w+)+)`")


def names_in(page: str) -> list[str]:
    """Return every dotted name of our packages in backticks."""
    return _NAME.findall(page)


def split(name: str) -> tuple[str, list[str]]:
    """Import the longest module of a dotted name; return its name, and the attributes that follow.

    Raises:
        LookupError: no such module.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module_name = ".".join(parts[:end])
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its imports does not
        else:
            return module_name, parts[end:]
    raise LookupError(f"{name}: no such module")


def resolve(name: str) -> object:
    """Return what a dotted name means. Raises `LookupError` if there is no such thing."""
    module_name, attributes = split(name)
    found: object = sys.modules[module_name]
    for attribute in attributes:
        if not hasattr(found, attribute):
            raise LookupError(f"{name}: {module_name} has no {'.'.join(attributes)}")
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("page", WALKTHROUGHS)
def test_a_walkthrough_names_only_functions_that_exist(page: str) -> None:
    names = names_in((ROOT / "docs" / "walkthroughs" / page).read_text())
    assert len(names) >= 5, f"{page} names no functions"
    missing = []
    for name in dict.fromkeys(names):
        try:
            resolve(name)
        except LookupError as error:
            missing.append(str(error))
    assert missing == []


@pytest.mark.parametrize("page", WALKTHROUGHS)
def test_a_walkthrough_returns_to_no_module_that_it_has_left(page: str) -> None:
    names = names_in((ROOT / "docs" / "walkthroughs" / page).read_text())
    passed = [module for module, _ in itertools.groupby(split(name)[0] for name in names)]
    assert [module for module, visits in Counter(passed).items() if visits > 1] == []


def test_resolve_finds_names_and_rejects_unknown_ones() -> None:
    assert names_in(
        "`hypha_proto.codec.encode`, `hypha.accelerate_executor.training`, `os.path`, `hypha-data run`"
    ) == [
        "hypha_proto.codec.encode",
        "hypha.accelerate_executor.training",
    ]
    assert callable(resolve("hypha_proto.ids.PeerId"))
    for wrong in ("hypha_proto.ids.PeerIdd", "hypha_proto.nowhere.x", "hypha_nowhere.x"):
        with pytest.raises(LookupError, match=wrong):
            resolve(wrong)


def test_imports_keep_to_the_layers() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the imports of each of our modules, also within functions."""
    found = {}
    for source in ROOT.glob("*/*/src/**/*.py"):
        tree = ast.parse(source.read_text(), str(source))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {
            node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level
        }
        parts = source.with_suffix("").parts
        found[".".join(parts[parts.index("src") + 1 :])] = imported
    return found


def importers(library: str) -> set[str]:
    """Return our modules that import `library`."""
    return {
        module for module, names in imports().items() if any(f"{name}.".startswith(f"{library}.") for name in names)
    }


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("libp2p", r"hypha_net\._libp2p(\..+)?"),
        ("torch", r"hypha\.accelerate_executor\..+"),
        ("accelerate", r"hypha\.accelerate_executor\..+"),
        ("transformers", r"hypha\.accelerate_executor\..+"),
        ("click", r".+\.cli(_\w+)?"),
        ("opentelemetry.sdk", r"hypha_net\.node\.telemetry"),
    ],
)
def test_a_library_is_imported_only_where_allowed(library: str, allowed: str) -> None:
    assert {module for module in importers(library) if not re.fullmatch(allowed, module)} == set()


def test_importers_finds_known_imports() -> None:
    assert "hypha_local.cli" in importers("click")
    assert any(module.startswith("hypha_net._libp2p.") for module in importers("libp2p"))


SCHEDULER = ROOT / "packages" / "hypha-scheduler" / "src" / "hypha_scheduler"
TERMS = re.compile(r"diloco|(?<![a-z])rounds?(?![a-z])|outer|parameter_?server|pseudo_?gradient")
ALLOWED = re.compile(r"round_trips?")
OWN = (("strategies", "diloco"), ("audit", "diloco.py"), ("audit", "__init__.py"))
MODULES = sorted(path for path in SCHEDULER.rglob("*.py") if path.relative_to(SCHEDULER).parts[:2] not in OWN)


def identifiers(source: str) -> Iterator[tuple[str, int]]:
    """Yield each identifier of a module with its line; the builtin function `round` is none of the module's."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id="round"):
                continue
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name, line
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, line
            case ast.alias(name=name, asname=alias):
                yield from ((part, line) for part in (*name.split("."), alias or ""))
            case ast.ImportFrom(module=str(module)):
                yield from ((part, line) for part in module.split("."))


def in_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def named_terms(source: str) -> list[str]:
    """Return the identifiers that name one of DiLoCo's terms, with their lines."""
    return [
        f"line {line}: {name}"
        for name, line in identifiers(source)
        if TERMS.search(ALLOWED.sub("", in_snake_case(name)))
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SCHEDULER)))
def test_module_names_none_of_dilocos_terms(module: Path) -> None:
    assert named_terms(module.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["last_round = 1", "x.round", "class RoundClosed: ...", "f(outer_step=1)", "from x import y as PseudoGradient"],
)
def test_terms_are_recognised(line: str) -> None:
    assert named_terms(line)
