"""Fixtures of the worker's tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("hypha-worker", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("hypha-worker")


@pytest.fixture
def anyio_backend() -> str:
    return "trio"
