"""Archives of a model's files: what is unpacked, and what is refused."""

from __future__ import annotations

import io
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.small_disk import limited

from hypha_proto.file_archive import MAX_ARCHIVE_FILES, ArchiveError, is_archive, unpack_archive


def pack(path: Path, files: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda _info: None) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("prefix", ["", "./", "model/", "a/b/"])
def test_the_files_are_unpacked_below_their_common_folder(tmp_path: Path, prefix: str) -> None:
    files = {"config.json": b"{}", "part/weights.safetensors": bytes(3 << 20), "empty": b""}
    archive = pack(tmp_path / "model.tar", {prefix + name: content for name, content in files.items()})
    (tmp_path / "out").mkdir()
    assert is_archive(archive)
    assert unpack_archive(archive, tmp_path / "out") == sorted(files)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files


def test_files_packed_with_their_folder_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with tarfile.open(tmp_path / "model.tar", "w") as archive:
        archive.add(tmp_path / "model", "model")
    (tmp_path / "out").mkdir()
    assert unpack_archive(tmp_path / "model.tar", tmp_path / "out") == ["config.json"]


def test_a_file_that_is_not_written_whole_is_an_error(tmp_path: Path) -> None:
    archive = pack(tmp_path / "model.tar", {"weights.safetensors": bytes(1 << 20)})
    (tmp_path / "out").mkdir()
    with limited(resource.RLIMIT_FSIZE, 1 << 19), pytest.raises(OSError, match="File too large"):  # it stops midway
        unpack_archive(archive, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"{}", bytes(512), bytes(10240), b"x" * 20000])
def test_other_files_are_no_archives(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert not is_archive(tmp_path / "file")


def test_a_compressed_archive_is_none(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "model.tgz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("config.json"))
    assert not is_archive(tmp_path / "model.tgz")


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/../../b", "a\nb", "."])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    archive = pack(tmp_path / "model.tar", {"x": b"1", name: b"2"})
    (tmp_path / "out").mkdir()
    with pytest.raises(ArchiveError, match="is no relative path"):
        unpack_archive(archive, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, "/etc/passwd"

    archive = pack(tmp_path / "model.tar", {"config.json": b""}, change)
    (tmp_path / "out").mkdir()
    with pytest.raises(ArchiveError, match=r"'config\.json' is no plain file"):
        unpack_archive(archive, tmp_path / "out")


def test_a_name_that_comes_twice_and_too_many_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    twice = pack(tmp_path / "twice.tar", {"a": b"1", "./a": b"2"})
    with pytest.raises(ArchiveError, match="twice"):
        unpack_archive(twice, tmp_path / "out")
    many = pack(tmp_path / "many.tar", {str(number): b"" for number in range(MAX_ARCHIVE_FILES + 1)})
    with pytest.raises(ArchiveError, match="more than 1000"):
        unpack_archive(many, tmp_path / "out")


@pytest.mark.parametrize(("headers", "size"), [(1500, 1), (1, 20 << 30)], ids=["many long names", "a long name"])
def test_headers_of_any_length_are_refused(tmp_path: Path, headers: int, size: int) -> None:
    """Python reads the header of a long name into memory, and one that follows another by calling itself."""
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, size
    path = tmp_path / "a.tar"
    path.write_bytes((long_name.tobuf(tarfile.GNU_FORMAT) + b"x".ljust(tarfile.BLOCKSIZE, bytes(1))) * headers)
    assert not is_archive(path)
    with pytest.raises(ArchiveError, match="no tar archive, or is damaged"):
        unpack_archive(path, tmp_path)


@pytest.mark.parametrize("size", [700, 1024, 1500, 5000])
def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    archive = pack(tmp_path / "model.tar", {"a": b"1" * 100, "b": bytes(8000)})
    archive.write_bytes(archive.read_bytes()[:size])
    (tmp_path / "out").mkdir()
    with pytest.raises(ArchiveError, match=r"damaged|cut off"):
        unpack_archive(archive, tmp_path / "out")
