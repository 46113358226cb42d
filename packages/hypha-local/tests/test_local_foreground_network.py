"""What `hypha-local up` refuses before it starts a program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_local.cli import main
from hypha_local.errors import DatasetUnusableError
from hypha_local.foreground_network import MARKER, named_datasets
from hypha_local.network_layout import Folders


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
