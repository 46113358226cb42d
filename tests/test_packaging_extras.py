"""PyTorch extras named in the documents: their metadata resolves. The contents of an index are not checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.wheelhouse import ROOT, packages, passed, quiet_environment, run, uv

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
