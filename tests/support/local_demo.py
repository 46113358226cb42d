"""The demo as its user runs it: one command, which leaves no process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from hypha_local.processes import child_environment, script
from support.local_network import processes_of


def run_demo(folder: Path, *options: str | Path) -> tuple[dict[str, Any], str]:
    """Run the demo; return its summary and output. Fail if it fails or leaves a process."""
    command = [script("hypha-local"), "demo", "--dir", str(folder), "--format", "json", *map(str, options)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        found, said = demo.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        demo.terminate()  # on SIGTERM it ends its processes, which would survive a kill
        demo.communicate(timeout=60)
        raise
    assert demo.returncode == 0, said + last_lines(folder)
    assert processes_of(folder) == []
    return json.loads(found), said


def environment() -> dict[str, str]:
    """Return an environment without our variables and with bytecode caching."""
    return child_environment(os.environ)


def last_lines(folder: Path) -> str:
    """Return the last lines of every log."""
    logs = sorted((folder / "logs").glob("*.log"))
    return "".join(f"\n--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs)
