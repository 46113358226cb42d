"""Print the number of code lines of each package: without blank lines, comments and docstrings.

A line counts if a token of code begins, continues or ends on it. Run from the root of the repository:
``python tools/code_lines.py``.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

GROUPS = ("packages", "executors", "drivers")
_IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def count_code_lines(source: str) -> int:
    """Return how many lines of a module hold code; strings that stand alone as statements do not count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print a table: code lines, all lines, files and lines of tests of each package, and the sums."""
    packages = sorted(found.parent for group in GROUPS for found in Path(group).glob("*/src"))
    rows = [(package.name, *_measure(package / "src"), *_measure(package / "tests")[1:2]) for package in packages]
    rows.append(("tests", 0, 0, 0, _measure(Path("tests"))[1]))
    rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, 5))))
    print(f"{'package':30}{'code':>8}{'lines':>8}{'files':>7}{'tests':>8}")
    for name, code, total, files, tests in rows:
        print(f"{name:30}{code:8,}{total:8,}{files:7,}{tests:8,}")


def _measure(folder: Path) -> tuple[int, int, int]:
    """Return the code lines, all lines and files of the modules in a folder."""
    sources = [path.read_text() for path in folder.rglob("*.py")]
    return sum(map(count_code_lines, sources)), sum(source.count("\n") for source in sources), len(sources)


if __name__ == "__main__":
    main()
