"""Quotas of control groups of both versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from hypha_worker.hardware.control_groups import Mount, cpu_quota, memory_quota

NEWER = "0::/machine/job\n"
OLDER = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n"


def mounts(folder: Path, text: str) -> list[Mount]:
    if text == NEWER:
        return [Mount(folder, PurePosixPath("/"), frozenset())]
    root = PurePosixPath("/docker/abc")  # as in a container without a namespace of its own
    return [Mount(folder / name, root, frozenset({name})) for name in ("cpu", "memory")]


@pytest.mark.parametrize(
    ("groups", "files", "cores", "size"),
    [
        (NEWER, {"machine/job/cpu.max": "50000 100000", "machine/job/memory.max": "2000000000"}, 0.5, 2e9),
        (NEWER, {"machine/cpu.max": "150000 100000", "machine/job/cpu.max": "max 100000"}, 1.5, math.inf),
        (NEWER, {"memory.max": "1000", "machine/job/memory.max": "max"}, math.inf, 1000.0),
        (NEWER, {"machine/job/cpu.max": "200000 100000", "cpu.max": "100000 100000"}, 1.0, math.inf),
        (NEWER, {"../cpu.max": "1 100000", "other/memory.max": "1"}, math.inf, math.inf),
        (
            OLDER,
            {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000", "memory/memory.limit_in_bytes": "3000"},
            0.5,
            3000.0,
        ),
        (OLDER, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, math.inf),
        (OLDER, {"cpu/cpu.cfs_quota_us": "junk", "memory/memory.limit_in_bytes": ""}, math.inf, math.inf),
        ("", {}, math.inf, math.inf),
    ],
)
def test_quotas_of_groups_and_those_above_them(
    tmp_path: Path, groups: str, files: Mapping[str, str], cores: float, size: float
) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = mounts(root, groups)
    assert (cpu_quota(found, groups), memory_quota(found, groups)) == (cores, size)
