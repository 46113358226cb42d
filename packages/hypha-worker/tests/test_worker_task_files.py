"""Opening files beneath a folder, and a job's files: published, written, taken, given."""

from __future__ import annotations

import os
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest
from support.path_swaps import swapping

from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.connectors.local_files import copy_local_files
from hypha_worker.errors import BridgeError
from hypha_worker.openat import IrregularFileError, LinkInPathError
from hypha_worker.task_files import TaskEndedError, TaskFiles
from hypha_worker.task_storage import TaskStorage


@pytest.fixture
def files(tmp_path: Path) -> Iterator[TaskFiles]:
    made = TaskFiles(tmp_path / "hypha-1")
    made.create()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    yield made
    made.close()


def content(file: FileIO) -> bytes:
    with file:
        return file.read()


def told(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(BridgeError) as caught:
        call()
    return caught.value.status, caught.value.detail


def test_files_are_opened_beneath_the_folder_only(files: TaskFiles, tmp_path: Path) -> None:
    (files.work_dir / "a" / "b").mkdir(parents=True)
    (files.work_dir / "a" / "b" / "c").write_text("mine")
    (files.work_dir / "inner").symlink_to("a")
    (files.work_dir / "outer").symlink_to(tmp_path / "outside")
    (files.work_dir / "proc").symlink_to("/proc/self/root")
    assert content(files.open_file("a/b/c")) == b"mine"
    assert content(files.open_file("./a//b/./c")) == b"mine"
    for path in ("inner/b/c", "a/../inner/b/c", "outer/secret", "outer", "proc/etc/passwd"):
        status, detail = told(lambda path=path: files.open_file(path))  # type: ignore[misc]
        assert status == 400, path
        assert "a symbolic link" in detail or "cross-device" in detail
    for path, reason in (("a/none", "write the file first"), ("none/x", "write the file first"), ("a", "is a folder")):
        status, detail = told(lambda path=path: files.open_file(path))  # type: ignore[misc]
        assert (status, reason in detail) == (404, True), detail
    assert told(lambda: files.open_file("a/b/c/d"))[0] == 404
    with pytest.raises(LinkInPathError):
        files.open_regular(PurePosixPath("outer/secret"))


@pytest.mark.parametrize("path", ["../outside/secret", "d/../../outside/secret", "/etc/passwd"])
def test_paths_that_lead_up_are_refused_where_they_are_opened_too(files: TaskFiles, path: str) -> None:
    (files.work_dir / "d").mkdir()
    assert told(lambda: files.open_file(path))[0] == 400
    with pytest.raises(OSError, match="Invalid cross-device link"):
        files.open_regular(PurePosixPath(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.symlink_to("x"), "a symbolic link"),
        (lambda path: path.hardlink_to(path.parent.parent / "outside" / "secret"), "a file with 2 hard links"),
        (os.mkfifo, "a FIFO"),
        (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "a socket"),
    ],
    ids=["link", "hard link", "FIFO", "socket"],
)
def test_only_regular_files_are_opened_and_nothing_is_waited_for(
    files: TaskFiles, tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    make(files.work_dir / "x")
    assert told(lambda: files.open_file("x")) == (400, f"path: 'x' is {kind}: name a regular file of its own")
    with pytest.raises(IrregularFileError, match=f"is {kind}"):
        files.take(PurePosixPath("x"), tmp_path / "taken")


def nest(folder: Path, *names: str) -> None:
    """Make a folder in each other, and a file ``x`` in the last: the path may be longer than the system takes."""
    inner = os.open(folder, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=inner)
        outer, inner = inner, os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
    os.close(inner)


def test_a_path_longer_than_the_system_takes_is_opened_part_by_part(files: TaskFiles) -> None:
    parts = ["d" * 250] * 20
    nest(files.work_dir, *parts)
    assert sum(stat.S_ISREG(about.st_mode) for _, about in files.walk()) == 1
    assert content(files.open_regular(PurePosixPath(*parts, "x"))) == b""
    subprocess.run(["rm", "-rf", str(files.work_dir)], check=True)  # pytest cannot


def test_a_published_file_takes_its_place_and_no_link_is_followed(files: TaskFiles, tmp_path: Path) -> None:
    def publish(path: str) -> None:
        with files.staged() as staged:
            staged.write_text("new")
            files.publish(staged, PurePosixPath(path))

    (files.work_dir / "outer").symlink_to(tmp_path / "outside")
    (files.work_dir / "file").symlink_to(tmp_path / "outside" / "secret")
    publish("a/b/x")
    assert (files.work_dir / "a" / "b" / "x").read_text() == "new"
    assert stat.S_IMODE((files.work_dir / "a" / "b").stat().st_mode) == 0o700
    publish("file")  # the link itself is replaced
    assert not (files.work_dir / "file").is_symlink()
    for path, reason in (
        ("outer/x", "leads through a symbolic link"),
        ("outer/new/x", "leads through a symbolic link"),
        ("a", "is a folder, and a file is needed"),
        ("file/x", "is a file, and a folder is needed"),
    ):
        status, detail = told(lambda path=path: publish(path))  # type: ignore[misc]
        assert (status, reason in detail) == (400, True), detail
    assert (tmp_path / "outside" / "secret").read_text() == "secret"
    assert os.listdir(tmp_path / "outside") == ["secret"]
    assert os.listdir(files.staging) == []


def test_a_file_that_is_gone_when_it_is_published_is_an_error_of_the_path(files: TaskFiles, tmp_path: Path) -> None:
    """The system says the same of a folder that was removed after it was opened."""
    (files.work_dir / "a").mkdir()
    status, detail = told(lambda: files.publish(tmp_path / "none", PurePosixPath("a/x")))
    assert (status, detail) == (400, "path: 'a/x' cannot be used: No such file or directory")


def test_what_is_written_for_a_job_only_its_owner_reads(files: TaskFiles, tmp_path: Path) -> None:
    (files.work_dir / "link").symlink_to(tmp_path / "outside" / "secret")
    with pytest.raises(FileExistsError):
        files.write_file("link", b"{}")
    assert files.write_file("job.json", b"{}") == files.work_dir / "job.json"
    about = (files.work_dir / "job.json").lstat()
    assert (stat.S_IMODE(about.st_mode), stat.S_ISREG(about.st_mode), about.st_size) == (0o600, True, 2)
    assert (tmp_path / "outside" / "secret").read_text() == "secret"


def test_nothing_is_opened_after_the_end(files: TaskFiles) -> None:
    files.write_file("x", b"x")
    files.close()
    with pytest.raises(TaskEndedError):
        files.open_regular(PurePosixPath("x"))
    assert told(lambda: files.open_file("x")) == (503, "the job is ending")
    assert told(lambda: files.make_folder("y")) == (503, "the job is ending")


def test_a_swapped_folder_never_leads_out(files: TaskFiles, tmp_path: Path) -> None:
    """A folder and a link take each other's place while it is opened and walked a thousand times, in both ways."""
    (files.work_dir / "d").mkdir()
    (files.work_dir / "d" / "secret").write_text("mine")
    (files.work_dir / "d.other").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "other").write_text("other")
    found, walked = Counter[bytes](), set[str]()
    with swapping(files.work_dir, "d"):
        while found.total() < 1000 or (len(found) == 1 and found.total() < 100_000):
            try:
                found[content(files.open_file("d/secret"))] += 1
            except BridgeError:
                found[b"refused"] += 1
            walked.update(path.rpartition("/")[2] for path, _ in files.walk())
    assert set(found) == {b"mine", b"refused"}
    assert walked <= {"d", "d.other", "d.mine", "secret"}


def test_a_deep_tree_is_walked_level_by_level(files: TaskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each level was opened from the top: a job with 30,000 levels kept a thread busy for a minute."""
    nest(files.work_dir, *["folder"] * 1000)
    opened: list[Any] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *how, **at: opened.append(path) or real(path, *how, **at))
    paths = [path for path, _ in files.walk()]
    assert len(opened) < 2010  # into each level and back
    assert not [path for path in opened if "folder/folder" in os.fspath(path)]
    assert len(paths) == 1001
    assert paths[-1] == "folder/" * 1000 + "x"
    subprocess.run(["rm", "-rf", str(files.work_dir)], check=True)


@pytest.mark.parametrize("replaced", ["file", "folder", "FIFO"])
def test_a_shared_file_that_is_replaced_after_its_check_is_refused(tmp_path: Path, replaced: str) -> None:
    """Of a shared file system, whose files another program may change."""
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "x").write_text("shared")
    (root / "a" / "again").hardlink_to(root / "a" / "x")  # the owner may have stored it once
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("secret")
    access = AccessPolicy(roots=(root,))
    path = access.resolve_path(str(root / "a" / "x"))
    assert content(access.open_file(path)) == b"shared"
    if replaced == "folder":
        (root / "a").rename(root / "b")
        (root / "a").symlink_to(tmp_path / "outside")
    else:
        (root / "a" / "x").unlink()
        if replaced == "FIFO":
            os.mkfifo(root / "a" / "x")
        else:
            (root / "a" / "x").symlink_to(tmp_path / "outside" / "x")
    status, detail = told(lambda: access.open_file(path))
    assert (status, "was replaced while it was opened" in detail) == (400, True), detail


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_a_shared_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str, hashed: bool) -> None:
    root = tmp_path / "root"
    root.mkdir()
    source = root / "x"
    source.write_bytes(b"a" * 5000)
    os.utime(source, (1, 1))
    source.with_name("y").write_bytes(b"b" * 5000)
    (tmp_path / "job").mkdir()

    class Storage(TaskStorage):
        """Changes the file when space for the first block is reserved, after it was opened."""

        def reserve(self, path: Path, size: int) -> None:
            super().reserve(path, size)
            if source.stat().st_mtime == 1 and path.exists():
                with source.open("r+b") as file:
                    file.truncate({"longer": 6000, "shorter": 4000, "other": 5000}[change])
                    file.write(b"c")

    async def copy(name: str) -> None:
        storage, access = Storage(tmp_path / "job", 10_000), AccessPolicy(roots=(root,))
        if hashed:
            await Downloads(access, storage).from_uri((root / name).as_uri(), PurePosixPath())
        else:
            await copy_local_files(str(root / name), PurePosixPath(name), access, storage)

    with pytest.raises(BridgeError, match=r"/root/x' changed while it was read \(5000 bytes before") as caught:
        anyio.run(copy, "x", backend="trio")
    assert caught.value.status == 502
    assert not list((tmp_path / "job").iterdir())
    anyio.run(copy, "y", backend="trio")
    assert (tmp_path / "job" / "y").read_bytes() == b"b" * 5000
