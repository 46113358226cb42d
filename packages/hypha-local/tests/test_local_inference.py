"""Inference demo without processes: options, configuration, prompts, progress and summary."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from rich.console import Console

from hypha_local.cli import main
from hypha_local.datasets.prompts import MAX_BYTES, write_prompts
from hypha_local.demo_tasks import INFERENCE_TASKS
from hypha_local.display import PARTS_SHOWN, Display
from hypha_local.inference_demo import Inference, write_inference_configuration
from hypha_local.inference_summary import EXAMPLES, summarize_inference
from hypha_local.network_layout import Folders, plan_nodes
from hypha_local.processes import local_processes


@pytest.mark.parametrize("task", INFERENCE_TASKS.values(), ids=lambda task: task.name)
def test_every_node_has_its_own_configuration(tmp_path: Path, task: Any) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    nodes = plan_nodes(3, parameter_server=False)
    inference = Inference(workers=3, seed=7, task=task, kill="worker")
    write_inference_configuration(folders, nodes, inference, sys.executable)
    files = {path.stem: tomllib.loads(path.read_text()) for path in folders.configuration.iterdir()}
    assert set(files) == {"gateway", "data", "worker-1", "worker-2", "worker-3", "scheduler"}
    [executor] = files["worker-2"]["executors"]
    assert (executor["class"], executor["name"]) == ("inference", "transformers")
    assert executor["args"][:2] == ["-m", "hypha.accelerate_executor.inference"]
    assert executor["env"] == {"HYPHA_EXECUTOR_DELAY": "0.25"}
    assert [each["name"] for each in files["data"]["datasets"]] == [task.dataset]
    job = files["scheduler"]["scheduler"]["job"]
    assert (job["type"], job["dataset"], job["model"]["type"]) == ("inference", task.dataset, task.trained.type)
    assert (job["inference"]["task"], job["inference"]["seed"]) == (task.kind, 7)
    assert (job["results"]["columns"], job["resources"]["num_workers"]) == ([*task.columns], 3)


def test_prompts_begin_definitions_of_files_that_are_not_trained_on(tmp_path: Path) -> None:
    files = []
    for number in range(21):
        files.append(tmp_path / f"{number:02}.py")
        files[-1].write_text(f"import os\n\ndef function_{number}(x):\n    return x\n\nclass Other(int):\n    pass\n")
    assert write_prompts(tmp_path / "prompts.jsonl", files) == 3
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    expected = [(f"def function_{number}(", f"{number:02}.py") for number in (0, 10, 20)]
    assert [(row["prompt"], row["source"]) for row in rows] == expected


def test_prompts_of_the_standard_library_are_short(tmp_path: Path) -> None:
    count = write_prompts(tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == count > 20
    assert all(len(row["prompt"].encode()) <= MAX_BYTES and row["prompt"].endswith("(") for row in rows)


REFUSED: dict[str, tuple[list[str], str]] = {
    "a server to kill": (
        ["--task", "inference", "--kill", "parameter-server"],
        "--kill parameter-server: not with --task inference, which has none",
    ),
    "a model to train": (["--task", "text", "--model", "."], "--model: not with --task text"),
    "prompts for images": (["--task", "inference", "--prompts", __file__], "--prompts: not with --task inference"),
    "comparison": (["--task", "generate", "--compare"], "--compare: not with --task generate"),
    "rounds of nothing": (["--task", "generate", "--model", ".", "--rounds", "3"], "--rounds: not with --model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_of_other_tasks_are_refused(case: str) -> None:
    arguments, reason = REFUSED[case]
    done = CliRunner().invoke(main, ["demo", *arguments])
    assert done.exit_code == 2
    assert reason in done.output


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_in_the_run_directory_or_without_configuration_is_refused(tmp_path: Path, inside: bool) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (tmp_path / "run" / ".hypha-local").touch()
    if inside:
        (model / "config.json").write_text("{}")
    folder = tmp_path / ("run" if inside else "other")
    command = [sys.executable, "-c", "from hypha_local.cli import main; main()", "demo", "--task", "inference"]
    command += ["--model", str(model), "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert ("is replaced; name another --dir" if inside else "there is no config.json") in done.stderr
    assert model.exists()


def test_some_parts_are_shown() -> None:
    shown = io.StringIO()
    display = Display(Console(file=shown), rounds=0)
    for number in range(1, 37):
        display.event({"event": "part", "slice": number, "rows": 10, "committed": number, "slices": 36})
    lines = shown.getvalue().splitlines()
    assert len(lines) == PARTS_SHOWN
    assert lines[-1].endswith("part 36/36: 360 rows")


def test_of_a_failed_executor_the_reason_is_shown_without_its_last_lines() -> None:
    shown = io.StringIO()
    event = {"event": "attempt_failed", "worker": "12D3a", "slices": [4, 5], "reason": "killed\n  | INFO ready"}
    Display(Console(file=shown), rounds=0).event(event)
    assert shown.getvalue().strip().endswith("executor failed: 12D3a: killed; slices [4, 5] are assigned again")


def result(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "part-0.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "manifest.json").write_text(json.dumps({"slices": [{"file": "part-0.jsonl"}]}))
    return {
        "rows": len(rows), "errors": 1, "slices": 1, "tokens": 0, "rows_per_second": None, "rows_assigned": 9,
        "results_dir": str(folder), "workers": [{"rows": len(rows)}, {"rows": 0}],
    }  # fmt: skip


def test_a_row_that_could_not_be_classified_counts_as_wrong(tmp_path: Path) -> None:
    rows = [{"label": 1, "labels": 1}, {"label": 2, "labels": 1}, {"label": 3, "labels": 3}, {"error": {}, "labels": 1}]
    found = result(tmp_path / "results", rows)
    summary = summarize_inference(found, task="inference", wall_seconds=1.234, killed="worker", audit="proven")
    assert (summary.accuracy, summary.workers, summary.wall_seconds) == (0.5, 1, 1.23)
    text = summary.as_text()
    for line in ("accuracy           0.5000", "worker; 9 rows assigned in all", "audit              proven"):
        assert line in text
    assert json.loads(summary.as_json())["results_dir"] == str(tmp_path / "results")


def test_the_first_texts_are_shown(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "text": "line\n" * 50} for number in range(EXAMPLES + 2)]
    found = result(tmp_path / "results", rows) | {"tokens": 70, "rows_per_second": 12.34}
    summary = summarize_inference(found, task="generate", wall_seconds=1.0, killed=None, audit="proven")
    assert [prompt for prompt, _ in summary.examples] == [f"p{number}" for number in range(EXAMPLES)]
    text = summary.as_text()
    assert '"p0"\n  -> "line\\nline' in text
    assert "12.3 rows/s" in text
    assert "accuracy" not in text
    assert max(map(len, text.splitlines())) <= 120 + len(str(tmp_path))


def test_results_are_split_at_line_feeds_alone(tmp_path: Path) -> None:
    texts = ["a\u2028b", "\u2029", "c\u0085", "\x0b\x0c\x1c\x1d\x1e\r"]
    found = result(tmp_path / "results", [{"prompt": text, "text": text} for text in texts])
    summary = summarize_inference(found, task="generate", wall_seconds=1.0, killed=None, audit="proven")
    assert list(summary.examples) == [(text, text) for text in texts]


async def test_one_process_that_a_program_has_started_can_be_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'the-word'])\n"
        "print('up', flush=True); sys.exit(child.wait() + 20)"
    )
    async with local_processes(tmp_path) as processes:
        program = processes.start("program", [sys.executable, "-c", code])
        with anyio.fail_after(30):
            while "up" not in program.log.read_text():
                await anyio.sleep(0.01)
            assert not processes.kill_descendant("program", "another-word")
            assert processes.kill_descendant("program", "the-word")
            assert await processes.wait(program) == 11
