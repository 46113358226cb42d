"""The limit of open files and connections is raised as far as it may be."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import logging, resource, sys
from hypha_net.node.descriptors import raise_descriptor_limit
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard"), [(64, 1024), (90, 90), (64, 500)])
def test_the_soft_limit_becomes_the_hard_one_with_a_warning_if_that_is_low(soft: int, hard: int) -> None:
    command = [sys.executable, "-c", CODE, str(soft), str(hard)]
    *told, limit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert int(limit) == hard
    warning = f"this process may have {hard} files and connections open (ulimit -n); allow 1024 or more, or peers and "
    assert told == ([] if hard == 1024 else [f"{warning}tasks may have to wait"])
