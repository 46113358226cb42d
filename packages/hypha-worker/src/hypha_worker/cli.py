"""The command ``hypha-worker``: the commands of every daemon; ``init`` fills in this machine's resources."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_net.node.cli import daemon_cli
from hypha_worker.config import WorkerConfig

if TYPE_CHECKING:
    from hypha_net.node.lifecycle import Node

WORK_DIR = "hypha-work"


async def _serve(config: WorkerConfig, node: Node) -> None:
    from hypha_worker.service import serve  # imported late: `init` and `config` do not need it

    await serve(config, node)


def example() -> dict[str, Any]:
    """Return the values that ``init`` fills in: the detected resources, and both kinds of executor."""
    from hypha_worker.hardware.detection import detect

    found = detect(Path(WORK_DIR))
    resources: dict[str, Any] = {"cpu": float(found.cpu), "memory": found.memory, "storage": found.storage}
    if found.devices:
        resources["gpu"] = sum(memory for _, memory in found.devices)
        resources["devices"] = [{"index": index, "memory": memory} for index, memory in found.devices]
    arguments = ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    train = {"class": "train", "name": "diloco-transformer", "runtime": "process"}
    server = {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"}
    command, *args = _trainer()
    return {
        "work_dir": WORK_DIR,
        "resources": resources,
        "executors": [{**train, "cmd": command, "args": [*args, *arguments]}, server],
    }


def _trainer() -> list[str]:
    """Return the training executor's command: from this environment if installed here, else through uv."""
    module = ["-m", "hypha.accelerate_executor.training"]
    try:
        found = find_spec("hypha.accelerate_executor")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return [sys.executable, *module]
    return ["uv", "run", "--no-project", "--with", "hypha-accelerate-executor", "--", "python", *module]


main = daemon_cli("hypha-worker", WorkerConfig, _serve, role="worker", example=example)
