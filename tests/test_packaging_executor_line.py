"""A job whose worker starts its executor with the command of the user's documents, from a released wheel.

The command is the block `worker:50` except for: the release URL (a local server), the version and extra that it
leaves to the reader, the Python interpreter, the path of accelerate's file, and the executor's name.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from support.doc_snippets import block
from support.local_network import local_network
from support.wheelhouse import ROOT, packages, release_site, uv

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

NAME = "users-own"


def executor_of_the_documents(site: str, accelerate_yaml: Path, wheels: Path, programs: Path) -> str:
    """Return TOML of the executor."""
    version = next(each.version for each in packages() if each.name == "hypha-accelerate-executor")
    text = block("worker:50").text
    for shown, given in (
        ('"diloco-transformer"', json.dumps(NAME)),
        ("<extra for CUDA/ROCm version>", "cpu"),
        ("<version without semver channel or metadata>", version),
        ("<version>", version),
        ("https://github.com", site),
        ('"3.12"', json.dumps(sys.executable)),
        ("/etc/hypha/accelerate.yaml", str(accelerate_yaml)),
    ):
        assert shown in text, shown
        text = text.replace(shown, given)
    [executor] = tomllib.loads(text)["executors"]
    assert "<" not in json.dumps(executor)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    env = {"PATH": path, "UV_FIND_LINKS": str(wheels), "UV_COMPILE_BYTECODE": "0", "VIRTUAL_ENV": ""}
    written = ", ".join(f"{name} = {json.dumps(value)}" for name, value in env.items())
    cache = os.environ.get("UV_CACHE_DIR", str(Path("~/.cache/uv").expanduser()))  # else torch fills the job's storage
    return f"\n{text}readable = {json.dumps(called())}\nwritable = [{json.dumps(cache)}]\nenv = {{ {written} }}\n"


def called() -> list[str]:
    """Return what the script `uv` of this test and the interpreter need: neither is the executor's own program."""
    program = Path(uv()[0])
    return sorted({str(program), str(program.resolve()), sys.prefix, sys.base_prefix})


def test_a_job_is_trained_by_the_documented_executor(wheels: Path, tmp_path: Path) -> None:
    accelerate_yaml = tmp_path / "accelerate.yaml"
    text = block("worker-older:339").text  # the document's file for one GPU, on a machine without one
    text = text.replace("mixed_precision: fp16", 'mixed_precision: "no"').replace("use_cpu: false", "use_cpu: true")
    accelerate_yaml.write_text(text)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uv").write_text(f'#!/bin/sh\nexec {" ".join(uv())} "$@"\n')
    (programs / "uv").chmod(0o755)
    with release_site(wheels) as site:
        toml = executor_of_the_documents(site, accelerate_yaml, wheels, programs)
        with local_network(tmp_path / "run", workers=1, worker_1=toml) as network:
            job = network.job(rounds=3, kind=NAME)
            job.wait_for_round(1, 240)
            lines = [" ".join(process.cmdline()) for process in network.executors()]
            assert job.wait(300) == 0, job.log + network.log("worker-1")
            log = network.log("worker-1")
    assert any("accelerate launch --config_file" in line for line in lines), lines
    assert any("-m hypha.accelerate_executor.training --socket" in line for line in lines), lines
    # uv itself may be in the checkout; what it starts comes from the wheels alone
    started = [line for line in lines if "accelerate" in line and not line.split(" ")[0].endswith("/uv")]
    assert not any(str(ROOT) in line.split(" ")[0] for line in started), lines
    losses = [event["loss"] for event in job.events("round")]
    assert len(losses) == 3
    assert all(loss > 0 for loss in losses)
    assert "the job is done" in log
    assert "Traceback" not in log
