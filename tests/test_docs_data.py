"""Runs every command of the tutorial and of the pages on formats, in their order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.local_network import processes_of
from support.process_ready import accept_interrupts
from support.wheelhouse import ROOT, quiet_environment

pytestmark = pytest.mark.timeout(600)

DOCS = ROOT / "docs"
PREPARE = 2
"""Number of the tutorial's block that pages on tables replace, without the installation."""


def blocks(page: str, language: str = "bash") -> list[str]:
    """Return the blocks of a page in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


class Terminals:
    """Two terminals in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network: subprocess.Popen[str] | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment after the installation's last command, which activates the environment."""
        path = os.pathsep.join([str(self.folder / "hypha" / ".venv" / "bin"), os.environ["PATH"]])
        return quiet_environment(PATH=path, HF_HUB_OFFLINE="1")

    def run(self, block: str, timeout: float = 300) -> str:
        """Run a block; return its output. One with the network stays in the second terminal when that is healthy."""
        if "hypha-local up" in block:
            self._start(block)
            return ""
        done = subprocess.run(
            ["bash", "-ec", block],
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def _start(self, block: str) -> None:
        with (self.folder / "network.txt").open("w") as errors:
            self.network = subprocess.Popen(
                ["bash", "-ec", block],
                cwd=self.folder,
                env=self.variables(),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=accept_interrupts,
            )
        assert self.network.stdout is not None
        shown = [self.network.stdout.readline() for _ in range(3)]
        assert shown == blocks("tutorial.md", "text")[1].splitlines(keepends=True), errors_of(self.folder)

    def end(self) -> int | None:
        """Press Ctrl-C in the second terminal; return the exit code."""
        if self.network is None:
            return None
        if self.network.poll() is None:
            os.killpg(self.network.pid, signal.SIGINT)
        self.network.communicate(timeout=60)
        return self.network.returncode


def errors_of(folder: Path) -> str:
    return (folder / "network.txt").read_text()


@contextmanager
def terminals() -> Iterator[Terminals]:
    """Yield terminals in a folder whose path is short enough for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="hypha-docs-") as folder:
        made = Terminals(Path(folder))
        try:
            yield made
        finally:
            code = made.end()
        assert code == 130, errors_of(made.folder)
        assert processes_of(made.folder) == []


def link_environment(folder: Path) -> None:
    """Put this interpreter's environment where the installation of the tutorial has its own."""
    (folder / "hypha").mkdir()
    (folder / "hypha" / ".venv").symlink_to(sys.prefix)


def run_all(made: Terminals, commands: Sequence[str]) -> list[str]:
    return [made.run(block) for block in commands]


def check_tutorial(made: Terminals, shown: Sequence[str], page: str = "tutorial.md") -> None:
    """Check what the tutorial's commands printed, of which `page` gave the one that prepares."""
    prepared, _, submitted, evaluated, classified = shown[-5:]
    if page == "tutorial.md":
        assert prepared.startswith(blocks(page, "text")[0])
    assert "labels: 0 bad, 1 good" in prepared
    assert re.search(r"^round 4 of 4: loss 0\.\d+, ", submitted, re.MULTILINE)
    result = json.loads(evaluated.splitlines()[0])
    assert (result["samples"], result["labelled"]) == (200, 200)
    assert result["accuracy"] > 0.9  # a guess is right in half of them
    assert re.findall(r"'label': '(\w+)'", classified) == ["good", "bad"]
    assert len(list((made.folder / "hypha-network" / "runs").glob("*/model"))) == 1


def test_the_tutorial_is_the_first_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:\n")[1]
    assert navigation.splitlines()[0].endswith(" tutorial.md")
    assert "](tutorial.md)" in (DOCS / "index.md").read_text().split("\n\n")[1]


@pytest.mark.gate
@pytest.mark.processes
def test_the_tutorial_leads_to_an_evaluated_model() -> None:
    with terminals() as made:
        link_environment(made.folder)
        _, *commands = blocks("tutorial.md")
        check_tutorial(made, run_all(made, commands))


@pytest.mark.nightly
@pytest.mark.processes
def test_the_tutorial_begins_in_an_empty_folder() -> None:
    """Replaced: the address of the repository, by this clone."""
    with terminals() as made:
        install, *commands = blocks("tutorial.md")
        made.run(install.replace("https://github.com/hypha-space/hypha", f"{ROOT} hypha"), timeout=500)
        assert Path(made.run("type -P hypha-local").strip()).is_relative_to(made.folder)
        check_tutorial(made, run_all(made, commands))


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("page", ["jsonl", "parquet"])
def test_another_table_takes_the_place_of_a_csv_file(page: str) -> None:
    with terminals() as made:
        link_environment(made.folder)
        _, *commands = blocks("tutorial.md")
        assert "hypha-data prepare" in commands[PREPARE]
        commands[PREPARE] = blocks(f"data/{page}.md")[0]
        check_tutorial(made, run_all(made, commands), page)


@pytest.mark.nightly
@pytest.mark.processes
def test_a_language_model_learns_the_completions_of_json_lines() -> None:
    with terminals() as made:
        link_environment(made.folder)
        prepared, _, submitted = run_all(made, blocks("data/jsonl.md")[1:])
        assert prepared.startswith(blocks("data/jsonl.md", "text")[0])
        losses = [float(loss) for loss in re.findall(r"^round \d of 8: loss ([\d.]+),", submitted, re.MULTILINE)]
        assert len(losses) == 8
        [metrics] = (made.folder / "hypha-network" / "runs").glob("*/metrics.jsonl")
        events = map(json.loads, metrics.read_text().splitlines())
        [evaluated] = [event["value"] for event in events if event.get("name") == "evaluation_loss"]
        assert (
            max(losses[-1], evaluated) < 0.5 * losses[0]
        )  # the answer's first token is one of five, the second ends it


@pytest.mark.nightly
@pytest.mark.processes
def test_images_become_an_evaluated_model() -> None:
    with terminals() as made:
        link_environment(made.folder)
        _, prepared, _, _, trained = run_all(made, blocks("data/images.md"))
        assert prepared.startswith(blocks("data/images.md", "text")[0])
        [result] = map(json.loads, re.findall(r'^\{"accuracy.*\}$', trained, re.MULTILINE))
        assert (result["samples"], result["accuracy"] > 0.8) == (180, True)
        [config] = (made.folder / "hypha-network" / "runs").glob("*/model/config.json")
        assert json.loads(config.read_text())["id2label"]["9"] == "digit-9"


@pytest.mark.nightly
@pytest.mark.processes
def test_text_becomes_an_evaluated_model() -> None:
    with terminals() as made:
        link_environment(made.folder)
        *_, trained = run_all(made, blocks("data/text.md"))
        [result] = map(json.loads, re.findall(r'^\{"accuracy.*\}$', trained, re.MULTILINE))
        assert result["loss"] < 3.5  # 5.5 nats a byte is what a guess has


def test_pages_on_formats_have_no_other_commands() -> None:
    """Those of csv are the tutorial's, and the one that adds a head to a trained model."""
    prepare, head = blocks("data/csv.md")
    assert prepare in blocks("tutorial.md")
    assert head.startswith("hypha-accelerate-executor create-model --from DIR_OR_REPO ")
    assert sorted(path.name for path in (DOCS / "data").glob("*.md")) == [
        "csv.md", "images.md", "jsonl.md", "parquet.md", "prepare.md", "text.md"
    ]  # fmt: skip
    assert len(blocks("data/parquet.md")) == 1
