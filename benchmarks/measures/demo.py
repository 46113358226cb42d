"""The digits demo from its scheduler's start: the first round, the last one, and everything until the summary.

With another version's checkout (`--before`), whose environment is in its folder ``.venv``, both run in turns.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row

TIMEOUT = 600.0
_STEP = re.compile(r"^ *(\d+\.\d) s  (.*)$", re.MULTILINE)
_BEGIN = "scheduler started with the job"
_STAGES = {
    "round 1/": "scheduler's start to the end of the first round",
    "round 16/": "scheduler's start to the end of the last round",
    "model evaluated": "scheduler's start to the evaluated model",
}


def measure(run: BenchmarkRun) -> list[Row]:
    """Run the demo of this version, and that of another version if there is one, in turns."""
    versions = {"ours": Path(sys.executable).parent}
    if run.before is not None:
        versions["before"] = run.before / ".venv" / "bin"
    found: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for _ in range(run.repeat):
        for name, programs in versions.items():
            found[name].append(_times(_run(programs / "hypha-local", run.folder / "demo")))
    return [_row(stage, found) for stage in _STAGES.values()]


def _row(stage: str, found: dict[str, list[dict[str, float]]]) -> Row:
    ours = [times[stage] for times in found["ours"]]
    what = f"digits demo, {stage}"
    if "before" not in found:
        return Row(what, "s", statistics.median(ours))
    before = [times[stage] for times in found["before"]]
    ratio = statistics.median(one / other for one, other in zip(ours, before, strict=True))
    return Row(what, "s", statistics.median(ours), statistics.median(before), "the version before", ratio, "≤ 0.7")


def _run(program: Path, folder: Path) -> str:
    """Run the demo; return the steps that it shows."""
    command = [str(program), "demo", "--dir", str(folder), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program} ended with exit code {done.returncode}: {done.stderr[-1000:]}")
    return done.stderr


def _times(shown: str) -> dict[str, float]:
    """Return the seconds from the scheduler's start to the end of each stage."""
    steps = [(float(seconds), text) for seconds, text in _STEP.findall(shown)]
    [begin] = [seconds for seconds, text in steps if text == _BEGIN]
    return {
        stage: next(seconds for seconds, text in steps if text.startswith(start)) - begin
        for start, stage in _STAGES.items()
    }
