"""The lowest sibling versions that a package admits have everything that its code uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.min_versions import install, lowest, siblings, taken, what_is_missing, wheel_of
from support.wheelhouse import Package, packages

BY_NAME = {package.name: package for package in packages()}
WITH_SIBLINGS = [package for package in packages() if siblings(package, BY_NAME)]
each_package = pytest.mark.parametrize("package", WITH_SIBLINGS, ids=lambda package: package.name)


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
