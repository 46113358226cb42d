"""Demo run of the task `text`, compared with workers that train alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_local.demo_tasks import TEXT


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_joint_training_reaches_a_lower_loss_than_each_worker_alone(tmp_path: Path) -> None:
    """Compare held-out loss in nats per byte with workers that train alone on their shards for as many steps."""
    program = str(Path(sys.executable).parent / "hypha-local")
    command = [program, "demo", "--task", TEXT.name, "--compare", "--dir", str(tmp_path / "run"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["workers"], summary["parameters"]) == (TEXT.rounds, 3, 1_033_488)
    assert len(summary["alone_losses"]) == 3
    assert summary["test_loss"] < min(summary["alone_losses"]) - 0.05
    assert summary["test_loss"] < 2.2
