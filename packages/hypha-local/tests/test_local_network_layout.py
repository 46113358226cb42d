"""Layout of a local network: run directories, configuration files, and what `hypha-local up` refuses."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_local.cli import main
from hypha_local.demo_tasks import TASKS
from hypha_local.errors import DatasetUnusableError, NoFreePortError, RunDirectoryError
from hypha_local.foreground_network import MARKER, named_datasets
from hypha_local.network_layout import DemoTraining, Folders, free_ports, plan_nodes, write_configuration


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "run")
    made.make()
    return made


def test_only_run_directories_are_replaced(folders: Folders, tmp_path: Path) -> None:
    (folders.logs / "old.log").write_text("old")
    folders.make()
    assert not (folders.logs / "old.log").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("42")
    with pytest.raises(RunDirectoryError, match="precious"):
        Folders(precious).make()
    assert (precious / "thesis.tex").read_text() == "42"


def test_ports_are_outside_the_range_of_outgoing_connections() -> None:
    """Such a connection could take the port before the daemon listens."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, path.read_text().split()) if path.exists() else (49152, 65535)
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not [port for port in ports if first <= port <= last or port < 1024]


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved by abstract sockets, which Linux has")
def test_no_two_calls_return_the_same_port_also_in_different_processes() -> None:
    among = _consecutive_free_ports(12)
    code = "import sys, hypha_local.network_layout as n; print(*n.free_ports(4, eval(sys.argv[1])))\ninput()"
    command = [sys.executable, "-c", code, repr(among)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        theirs = [int(port) for child in (first.stdout, second.stdout) for port in child.readline().split()]
        ours = free_ports(4, among)
        assert sorted(theirs + ours) == among
        with pytest.raises(NoFreePortError, match="only 0 of 1 ports"):
            free_ports(1, among)
        first.communicate("\n", timeout=20)
        second.communicate("\n", timeout=20)
    assert set(free_ports(8, among)) == set(theirs), "ports of processes that have ended stay reserved"


def _consecutive_free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, no other process has reserved, and `free_ports` does not choose itself."""
    for start in range(18_000, 20_000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(start, start + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                stack.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0hypha-local-port-{port}")
            return list(range(start, start + count))
    raise AssertionError("no free ports")


def test_a_port_on_which_something_listens_is_not_chosen() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(NoFreePortError, match="only 0 of 1"):
            free_ports(1, [listener.getsockname()[1]])


def test_tidy_keeps_the_results(folders: Folders) -> None:
    folders.model.mkdir()
    folders.metrics.write_text("{}\n")
    folders.tidy()
    assert sorted(path.name for path in folders.root.iterdir()) == [".hypha-local", "logs", "metrics.jsonl", "model"]


def test_every_node_has_its_own_configuration(folders: Folders) -> None:
    nodes = plan_nodes(2)
    write_configuration(folders, nodes, DemoTraining(workers=2, rounds=7, seed=5), sys.executable)
    files = {path.stem: tomllib.loads(path.read_text()) for path in folders.configuration.iterdir()}
    assert set(files) == {"gateway", "data", "worker-1", "worker-2", "parameter-server", "scheduler"}
    assert len({tuple(file["listen_addresses"]) for file in files.values()}) == len(files)
    assert files["worker-1"]["gateway_addresses"] == files["gateway"]["listen_addresses"]
    job = files["scheduler"]["scheduler"]["job"]
    assert (job["seed"], job["rounds"]["update_rounds"], job["resources"]["num_workers"]) == (5, 7, 2)
    assert (job["dataset"], job["rounds"]["evaluate_every"]) == ({"dataset": "digits"}, 0)


def test_the_spare_worker_can_take_any_part(folders: Folders) -> None:
    nodes = plan_nodes(1, spare=True)
    write_configuration(folders, nodes, DemoTraining(workers=1), sys.executable)
    spare = tomllib.loads((folders.configuration / "spare.toml").read_text())
    assert sorted(each["class"] for each in spare["executors"]) == ["aggregate", "train"]
    assert nodes[-1].role == "scheduler"


def test_python_path_with_any_characters_is_configured(folders: Folders) -> None:
    python = "/home/\u017elu\u0165 \U0001f40d/bin/python"
    write_configuration(folders, plan_nodes(1), DemoTraining(workers=1), python)
    text = (folders.configuration / "worker-1.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["executors"][0]["cmd"] == python


def test_evaluating_demo_announces_the_held_out_dataset(folders: Folders) -> None:
    write_configuration(folders, plan_nodes(1), DemoTraining(workers=1, evaluate_every=2), sys.executable)
    data, scheduler = (
        tomllib.loads((folders.configuration / f"{name}.toml").read_text()) for name in ("data", "scheduler")
    )
    assert [each["name"] for each in data["datasets"]] == ["digits", "held-out"]
    job = scheduler["scheduler"]["job"]
    assert job["dataset"] == {"dataset": "digits", "evaluation": "held-out"}
    assert job["rounds"]["evaluate_every"] == 2


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_job_configuration_follows_the_task(folders: Folders, task: object) -> None:
    chosen = TASKS[task.name]  # type: ignore[attr-defined]
    training = DemoTraining(workers=2, rounds=7, task=chosen)
    write_configuration(folders, plan_nodes(2), training, sys.executable)
    job = tomllib.loads((folders.configuration / "scheduler.toml").read_text())["scheduler"]["job"]
    assert job["dataset"]["dataset"] == chosen.name
    assert job["model"]["type"] == chosen.type
    assert job["rounds"]["avg_samples_between_updates"] == 2 * chosen.batch_size * chosen.steps
    assert training.steps_a_worker == 7 * chosen.steps
    data = tomllib.loads((folders.configuration / "data.toml").read_text())["datasets"]
    assert [entry["name"] for entry in data] == [chosen.name]


def dataset(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return str(folder)


def test_datasets_are_named_by_their_folders_or_by_the_user(tmp_path: Path) -> None:
    first, second = dataset(tmp_path / "a" / "set"), dataset(tmp_path / "b" / "set")
    assert named_datasets([first, f"other={second}"]) == {"set": Path(first), "other": Path(second)}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["a/set", "b/set"], "--data b/set: the name 'set' is taken; write NAME=FOLDER"),
        (["=a/set"], "--data =a/set: the name '' is empty"),
        (["a"], "--data a: .*/a has no manifest.json; write one with hypha-data prepare"),
        (["missing"], "--data missing: .*/missing has no manifest.json"),
    ],
)
def test_what_is_no_dataset_is_refused(
    values: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(tmp_path / "a" / "set")
    dataset(tmp_path / "b" / "set")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetUnusableError, match=says):
        named_datasets(values)


def test_other_directories_are_left_as_they_are(tmp_path: Path) -> None:
    """Neither a folder with files of its owner nor a run directory of the demo becomes a network's directory."""
    precious, run = tmp_path / "precious", Folders(tmp_path / "run")
    precious.mkdir()
    (precious / "thesis.tex").write_text("42")
    run.make()
    for folder in (precious, run.root):
        before = sorted(folder.rglob("*"))
        answer = CliRunner().invoke(main, ["up", "--dir", str(folder)])
        assert answer.exit_code == 1
        assert re.search(r"--dir \S+: not empty and not a network's directory; name another folder", answer.output)
        assert sorted(folder.rglob("*")) == before
    assert not (precious / MARKER).exists()
