"""Start-up time of a daemon, and of its imports against those of the libraries that every node needs."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row

TIMEOUT = 60.0
REFERENCE = "import ssl, trio, cryptography.x509, cbor2, msgspec"
"""Libraries without which no node works."""
ENGINE = "import hypha_net._libp2p.endpoint"


def measure(run: BenchmarkRun) -> list[Row]:
    """Start a gateway as an operator does and wait until its port accepts connections."""
    files = run.organisation.node("gateway", "gateway")
    names = ("pass", "import hypha_net", REFERENCE, ENGINE)
    runs: dict[str, list[float]] = {name: [] for name in (*names, "start")}
    for index in range(run.repeat):
        for name in names:
            runs[name].append(_run(name))
        runs["start"].append(_start(run, files, index))
    found = {name: statistics.median(values) for name, values in runs.items()}
    nothing, is_nothing = found["pass"], "an interpreter that does nothing"
    engine, reference = (max(0.0, found[name] - nothing) for name in (ENGINE, REFERENCE))
    return [
        Row(
            "start of a gateway until it serves",
            "s",
            found["start"],
            nothing,
            is_nothing,
            found["start"] / nothing,
            "≤ 2 s",
        ),
        Row("import of hypha_net", "s", max(0.0, found["import hypha_net"] - nothing)),
        Row(
            "import of the endpoint, py-libp2p included",
            "s",
            engine,
            reference,
            "ssl, trio, cryptography, cbor2 and msgspec",
            engine / reference,
            "≤ 3.5, aim 2.5",
        ),
    ]


def _run(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def _start(run: BenchmarkRun, files: dict[str, str], index: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = run.folder / "gateway.toml"
    lines = {f"{kind}_pem": path for kind, path in files.items()}
    lines["state_dir"] = str(run.folder / f"state-{index}")
    text = "".join(f'{key} = "{value}"\n' for key, value in lines.items())
    config.write_text(f'{text}listen_addresses = ["/ip4/127.0.0.1/tcp/{port}"]\n')
    command = [sys.executable, "-c", "from hypha_gateway.cli import main; main()", "run", "--config", str(config)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        return _wait_for(port, process, began)
    finally:
        process.terminate()
        process.wait(TIMEOUT)


def _wait_for(port: int, process: subprocess.Popen[str], began: float) -> float:
    while time.perf_counter() - began < TIMEOUT:
        if process.poll() is not None:
            said = "" if process.stderr is None else process.stderr.read()
            raise RuntimeError(f"the gateway ended with exit code {process.returncode}: {said[-1000:]}")
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return time.perf_counter() - began
        except OSError:
            time.sleep(0.005)
    raise TimeoutError(f"the gateway did not serve within {TIMEOUT:g} s")
