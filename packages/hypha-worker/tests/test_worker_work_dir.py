"""Folders of jobs are removed whole, and nothing outside of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hypha_worker.work_dir import remove_folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "keep").write_text("kept")
    return folder


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "job"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "a" / "b" / "link").symlink_to(outside)
    (folder / "a" / "b").chmod(0)
    remove_folder(folder)
    assert not folder.exists()
    assert (outside / "keep").read_text() == "kept"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    folder = tmp_path / "job"
    victim = folder.joinpath(*["deep"] * (depth - 1), "victim")
    victim.mkdir(parents=True)
    original: Any = os.open

    def swap_and_open(path: str, *arguments: Any, **more: Any) -> int:
        if path == "victim":
            parent = more["dir_fd"]
            os.rmdir(path, dir_fd=parent)
            os.symlink(outside, path, dir_fd=parent)
        descriptor: int = original(path, *arguments, **more)
        return descriptor

    monkeypatch.setattr(os, "open", swap_and_open)
    remove_folder(folder)
    assert (outside / "keep").read_text() == "kept"
    assert "cannot be removed completely" in caplog.text


def test_a_link_in_place_of_the_folder_is_left(tmp_path: Path, outside: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "job"
    folder.symlink_to(outside)
    remove_folder(folder)
    assert (outside / "keep").read_text() == "kept"
    assert "is a symbolic link" in caplog.text
