"""The task definition of the user's early design on a real network: a dataset in S3, a model by its digest, a cache."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.doc_snippets import block
from support.fake_s3 import SECRET, s3_server
from support.local_network import running
from support.task_network import TaskNetwork, executor

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(180)]

DATASET = b"a,b\n1,2\n" * 100_000
MODEL = bytes(range(256)) * 10_000
SHA256 = hashlib.sha256(MODEL).hexdigest()
CHECK = f"""
import hashlib, json, pathlib, sys
settings = json.load(open('job.json'))['settings']
found = [hashlib.sha256(pathlib.Path(settings[name]).read_bytes()).hexdigest() for name in ('dataset', 'model')]
sys.exit(found != {[hashlib.sha256(DATASET).hexdigest(), SHA256]!r})
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with s3_server("my-bucket", {"data.csv": DATASET}) as url:
        yield url


def corrected(text: str) -> dict[str, Any]:
    """Return the block as JSON, with a whole digest: without ``...`` and trailing commas."""
    text = re.sub(r",(\s*[}\]])", r"\1", text.replace("...", ""))
    definition: dict[str, Any] = json.loads(text.replace("abcdef1234567890", SHA256))
    return definition


def plan(root: Path, endpoint: str) -> TaskNetwork:
    network = TaskNetwork(root, 1, 1)
    (network.shared / "model.bin").write_bytes(MODEL)
    text = network.configuration("worker-1").read_text()
    s3 = f'buckets = ["my-bucket"]\ns3_endpoint = "{endpoint}"\ns3_access_key = "id"\ns3_secret_key = "{SECRET}"\n'
    text = text.replace("[connectors]\n", f"[connectors]\n{s3}", 1)
    text += f'[cache]\npath = "{root / "cache"}"\nmax_size = 0.1\n'
    network.configuration("worker-1").write_text(text + executor("pytorch", "-c", CHECK))
    data = network.configuration("data").read_text()
    provide = f"provide = {json.dumps([str(network.shared / 'model.bin')])}\n"
    network.configuration("data").write_text(provide + data)
    return network


def test_the_task_of_the_early_design_runs_and_a_second_one_fetches_nothing(tmp_path: Path, endpoint: str) -> None:
    task = corrected(block("api:37").text)
    with running(plan(tmp_path / "run", endpoint)) as network:
        for _ in range(2):
            assert network.submit(task).wait(60)["totals"]["tasks"] == 1
        data, worker = network.log("data"), network.log("worker-1")
        assert data.count(f"{len(MODEL)} bytes") - data.count(f"is sha256:{SHA256}") == 1
        unknown = {**task, "retries": 0, "resources": [{"name": "model", "dht": "0" * 64}]}
        error = network.submit(unknown).wait_for_failure(60)
        assert f"resource model: sha256:{'0' * 64}: no peer announces it" in error
        denied = {**task, "retries": 0, "resources": [{"name": "dataset", "s3": {"bucket": "others", "key": "x"}}]}
        assert "connectors.buckets" in network.submit(denied).wait_for_failure(60)
        stored = [path.read_bytes() for path in network.folders.runs.rglob("*") if path.is_file()]
        assert not any(SECRET.encode() in content for content in [*stored, data.encode(), worker.encode()])
