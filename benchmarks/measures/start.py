"""Start-up time of a daemon, and of its imports against those of the libraries that every node needs.

Then that of a process that trains until its first step on the digits model, against a plain script of transformers.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row

TIMEOUT = 60.0
REFERENCE = "import ssl, trio, cryptography.x509, cbor2, msgspec"
"""Libraries without which no node works."""
ENGINE = "import hypha_net._libp2p.endpoint"
_STEP = """
model(pixel_values=torch.zeros(16, 1, 8, 8), labels=torch.zeros(16, dtype=torch.int64)).loss.backward()
optimizer.step()
os._exit(0)
"""
EXECUTOR = f"""
import os, sys
from pathlib import Path
import hypha.accelerate_executor.training
from hypha.accelerate_executor.environment import collected_at_end, leave_out_of_collections
with collected_at_end():
    import torch
    import hypha.accelerate_executor.diloco.loop
    from hypha.accelerate_executor.modeling.hf import import_library, load_model
    from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer
    from hypha_proto.job_spec import Adam
    import_library("image-classification")
    leave_out_of_collections()
    model = load_model("image-classification", Path(sys.argv[1]))
    optimizer = InnerOptimizer(model.parameters(), Adam(learning_rate=1e-3))
{_STEP}"""
PLAIN = f"""
import os, sys
import torch
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
{_STEP}"""


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
        _first_step(run),
    ]


def _first_step(run: BenchmarkRun) -> Row:
    """Measure a process that trains, until its first step, and the plain script, in turns."""
    model = str(run.folder / "model")
    program = Path(sys.executable).parent / "hypha-accelerate-executor"
    create = [str(program), "create-model", "--arch", "resnet-digits", "--out", model]
    subprocess.run(create, check=True, capture_output=True)
    pairs = [(_run(EXECUTOR, model), _run(PLAIN, model)) for _ in range(run.repeat)]
    ours, plain = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    return Row("a training process until its first step", "s", ours, plain, "plain script of transformers", ratio)


def _run(code: str, *arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
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
