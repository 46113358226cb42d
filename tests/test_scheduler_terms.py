"""Outside of `strategies/diloco` no module of the scheduler names what only DiLoCo has, but for audits of its jobs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "packages" / "hypha-scheduler" / "src" / "hypha_scheduler"
TERMS = re.compile(r"diloco|(?<![a-z])rounds?(?![a-z])|outer|parameter_?server|pseudo_?gradient")
ALLOWED = re.compile(r"round_trips?")
OWN = (("strategies", "diloco"), ("audit", "diloco.py"), ("audit", "__init__.py"))
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[:2] not in OWN)


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


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_names_none_of_dilocos_terms(module: Path) -> None:
    assert named_terms(module.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["last_round = 1", "x.round", "class RoundClosed: ...", "f(outer_step=1)", "from x import y as PseudoGradient"],
)
def test_terms_are_recognised(line: str) -> None:
    assert named_terms(line)
