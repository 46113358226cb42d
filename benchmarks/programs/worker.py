"""Worker that makes offers, as `hypha-worker` does; no job is dispatched to it."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio

from benchmarks.children import options, serve_commands_async
from benchmarks.programs.node import open_node
from hypha_worker.config import WorkerConfig
from hypha_worker.service import open_worker


def configuration(files: dict[str, str], gateway: str, work_dir: str) -> WorkerConfig:
    """Return the configuration of a worker with one lease, for both roles of a job."""
    command = {"runtime": "process", "cmd": "true"}
    return WorkerConfig.model_validate(
        {
            "cert_pem": files["cert"],
            "key_pem": files["key"],
            "trust_pem": files["trust"],
            "gateway_addresses": [gateway],
            "work_dir": work_dir,
            "resources": {"cpu": 1.0},
            "offer": {"price": 50.0},
            "executors": [
                {"class": "train", "name": "diloco-transformer", **command},
                {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"},
            ],
        }
    )


async def main() -> None:
    given = options()
    work_dir = Path(given.pop("work_dir"))
    async with open_node(**given) as endpoint:
        config = configuration(given["files"], given["gateway"], str(work_dir))
        async with open_worker(config, endpoint):
            await serve_commands_async({"peer": str(endpoint.peer_id)}, {})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
