"""What tests need of the machine: in CI, where `.ci/run` has installed it, its absence fails them."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_outside_ci(reason: str) -> NoReturn:
    """Skip a test that this machine cannot run; where ``CI=true``, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
