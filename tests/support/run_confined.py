"""A program that runs one script as an executor's process, in the layers of this machine, and prints what came of it.

Started by `support.confined_runs`, as any user, with a JSON object as its argument.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import anyio

from hypha_proto.resources import Resources
from hypha_worker.errors import ExecutionError
from hypha_worker.executors.isolation.stack import make_stack
from hypha_worker.executors.process.fork_server_client import ForkServer
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.logs.run_log import LogFolder


async def run(options: dict[str, Any]) -> dict[str, Any]:
    """Run the script, and return exit code, output and the layers' findings."""
    work_dir = Path(options["work_dir"])
    private = (work_dir, Path(options["key"]))
    stack = make_stack(work_dir, private=private, disabled=options["disabled"])
    stack.sweep()
    job = work_dir / "hypha-job"
    job.mkdir(mode=0o700, exist_ok=True)
    (job / "given").write_text("by the worker")
    keys = {key: options[key] for key in ("env", "network", "readable", "writable")}
    command = {"cmd": sys.executable, "args": ["-I", "-S", "-c", options["script"], *options["args"]]}
    settings = ExecutorSection.model_validate({"class": "train", "name": "x", **command, **keys})
    host = HostSettings(
        job, has_devices=False, logs=LogFolder(job, max_size=1 << 20, keep=1), stack=stack, fork_server=ForkServer()
    )
    place = ProcessPlace(
        work_dir=job,
        allocation=Allocation(Resources(cpu=1.0, memory=1.0)),
        storage=options["storage"],
        scope=anyio.CancelScope(),
        log_name="run",
    )
    runner = ProcessRunner(settings, host, place)
    error = None
    with socket.socket(socket.AF_UNIX) as bridge:
        (job / "bridge.sock").unlink(missing_ok=True)
        bridge.bind(str(job / "bridge.sock"))
        (job / "bridge.sock").chmod(0o600)
        bridge.listen()
        try:
            values = {"{SOCKET_PATH}": str(job / "bridge.sock"), "{WORK_DIR}": str(job)}
            async with anyio.create_task_group() as tasks:
                if options["cancelled"]:
                    tasks.start_soon(_cancel_when_ready, job / "ready", place.scope)
                with place.scope:
                    await runner.run(values, lambda: print("started", flush=True))
                tasks.cancel_scope.cancel()
        except* ExecutionError as raised:
            error = str(raised.exceptions[0])
    findings = {name: finding.works for name, finding in stack.findings.items()}
    trace = runner.trace
    return {"exit_code": trace.exit_code, "lines": trace.last_lines, "error": error, "findings": findings}


async def _cancel_when_ready(file: Path, scope: anyio.CancelScope) -> None:
    """End the run, as the end of its lease does, once its script has made a file."""
    while not await anyio.Path(file).exists():
        await anyio.sleep(0.02)
    scope.cancel()


if __name__ == "__main__":
    print(json.dumps(anyio.run(run, json.loads(sys.argv[1]), backend="trio")))
