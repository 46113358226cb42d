"""Pulls of small files, for tests that look at their content."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypha_net import transfer
from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest


async def pull_bytes(endpoint: Endpoint, peer: PeerId, request: PullRequest, **options: Any) -> bytes:
    """Pull a file with the options of `transfer.pull`, and return its content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pulled"
        await transfer.pull(endpoint, peer, request, path, **options)
        return path.read_bytes()
