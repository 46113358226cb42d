"""Datasets prepared, measured and served: every sample exactly once, and only announced content."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from hypha_data.announcer import keep_announced
from hypha_data.catalog import MANIFEST, open_catalog, open_dataset
from hypha_data.config import DataConfig
from hypha_data.errors import DatasetError
from hypha_data.prepare import prepare_dataset
from hypha_data.slice_resolver import slice_resolver
from hypha_net import dataset_directory, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.codec import from_json
from hypha_proto.datasets import Manifest
from hypha_proto.transfer import PullRequest


def source(folder: Path, samples: int = 23) -> Path:
    path = folder / "all.safetensors"
    images = np.arange(samples * 6, dtype=np.float32).reshape(samples, 2, 3)
    save_file({"pixel_values": images, "labels": np.arange(samples, dtype=np.int64)}, path)
    return path


@given(samples=st.integers(1, 40), slices=st.integers(1, 12), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_slices_contain_every_sample_once(
    tmp_path_factory: pytest.TempPathFactory, samples: int, slices: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    path = source(folder, samples)
    if slices > samples:
        with pytest.raises(DatasetError, match=f"holds {samples} samples"):
            prepare_dataset(path, folder / "out", name="d", slices=slices, seed=seed)
        return
    manifest = prepare_dataset(path, folder / "out", name="d", slices=slices, seed=seed)
    parts = [load_file(folder / "out" / entry.file) for entry in manifest.slices]
    labels = np.concatenate([part["labels"] for part in parts])
    assert sorted(labels) == list(range(samples))
    lengths = [entry.samples for entry in manifest.slices]
    assert [len(part["labels"]) for part in parts] == lengths
    assert max(lengths) - min(lengths) <= 1
    rows = np.concatenate([part["pixel_values"] for part in parts])
    np.testing.assert_array_equal(rows[:, 0, 0], labels * 6.0)  # the rows of all tensors keep the same order


def test_slices_are_determined_by_the_seed(tmp_path: Path) -> None:
    path = source(tmp_path)
    digests = [
        [s.digest for s in prepare_dataset(path, tmp_path / str(i), name="d", slices=4, seed=seed).slices]
        for i, seed in enumerate((5, 5, 6))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_slices_are_not_replaced_without_force(tmp_path: Path) -> None:
    path = source(tmp_path)
    prepare_dataset(path, tmp_path / "out", name="d", slices=5, seed=0)
    with pytest.raises(DatasetError, match="--force"):
        prepare_dataset(path, tmp_path / "out", name="d", slices=2, seed=0)
    prepare_dataset(path, tmp_path / "out", name="d", slices=2, seed=0, force=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("force", [False, True])
def test_source_is_not_removed_as_an_old_slice(tmp_path: Path, force: bool) -> None:
    path = source(tmp_path)
    before = path.read_bytes()
    with pytest.raises(DatasetError, match="choose another folder"):
        prepare_dataset(path, tmp_path / "." / "x" / "..", name="d", slices=2, seed=0, force=force)
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", ["/", "data/..", "x" * 256])
def test_dataset_folder_must_have_a_name(path: str) -> None:
    with pytest.raises(ValidationError, match=r"gives no name: add \[\[datasets\]\]"):
        DataConfig(
            cert_pem="c",
            key_pem="k",
            trust_pem="t",
            gateway_addresses=["/ip4/192.0.2.1/tcp/4001"],
            dataset_path=path,
        )


def test_manifest_is_used_only_while_it_is_newest(tmp_path: Path) -> None:
    prepare_dataset(source(tmp_path), tmp_path / "out", name="d", slices=3, seed=0)
    before = open_dataset("d", tmp_path / "out")
    slice_path = tmp_path / "out" / before.manifest.slices[0].file
    content = bytearray(slice_path.read_bytes())
    content[-1] ^= 1
    slice_path.write_bytes(content)  # same size, different content
    later = (tmp_path / "out" / MANIFEST).stat().st_mtime_ns + 1_000_000_000
    os.utime(slice_path, ns=(later, later))
    after = open_dataset("d", tmp_path / "out")
    assert after.manifest.slices[0].digest != before.manifest.slices[0].digest
    assert after.digest != before.digest


def test_invalid_datasets_are_refused_with_the_file_name(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no \*\.safetensors"):
        open_dataset("d", tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"rubbish")
    with pytest.raises(DatasetError, match=r"bad\.safetensors"):
        open_dataset("d", tmp_path)
    save_file({"a": np.zeros(3), "b": np.zeros(4)}, tmp_path / "bad.safetensors")
    with pytest.raises(DatasetError, match="first dimension"):
        open_dataset("d", tmp_path)


def test_service_announces_and_serves_datasets(tmp_path: Path) -> None:
    prepare_dataset(source(tmp_path), tmp_path / "digits", name="digits", slices=3, seed=0)
    datasets = open_catalog({"digits": tmp_path / "digits"})
    (tmp_path / "state").mkdir()

    async def case(node: MemoryEndpoint, worker: MemoryEndpoint) -> None:
        transfer.serve_pulls(node, slice_resolver(datasets, tmp_path / "state"))
        announced = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_announced, node, datasets.values(), announced.set)
            await announced.wait()
            [found] = await dataset_directory.find_dataset(worker, "digits")
            assert (found.provider, found.record.num_slices) == (node.peer_id, 3)
            await _pull_all(worker, found, tmp_path)
            tasks.cancel_scope.cancel()

    _run(case)


async def _pull_all(worker: MemoryEndpoint, found: dataset_directory.FoundDataset, folder: Path) -> None:
    target = folder / "manifest"
    request = PullRequest(dataset="digits", index=0, name="manifest")
    await transfer.pull(worker, found.provider, request, target, digest=found.record.manifest)
    manifest: Manifest = from_json(Manifest, target.read_bytes())
    for index, entry in enumerate(manifest.slices):
        pulled = await transfer.pull(
            worker, found.provider, PullRequest(dataset="digits", index=index), folder / "slice", digest=entry.digest
        )
        assert pulled.size == entry.size
        assert len(load_file(folder / "slice")["labels"]) == entry.samples
    for wrong in (
        PullRequest(dataset="digits", index=3),
        PullRequest(dataset="other", index=0),
        PullRequest(dataset="digits", index=0, name="../../etc/passwd"),
    ):
        with pytest.raises(TransferRefusedError):
            await transfer.pull(worker, found.provider, wrong, folder / "none")


def test_changed_slice_is_not_served(tmp_path: Path) -> None:
    prepare_dataset(source(tmp_path), tmp_path / "digits", name="digits", slices=3, seed=0)
    datasets = open_catalog({"digits": tmp_path / "digits"})
    (tmp_path / "state").mkdir()
    (tmp_path / "digits" / "slice-00001.safetensors").write_bytes(b"cut")

    async def case(node: MemoryEndpoint, worker: MemoryEndpoint) -> None:
        transfer.serve_pulls(node, slice_resolver(datasets, tmp_path / "state"))
        with pytest.raises(TransferRefusedError, match="not what was announced"):
            await transfer.pull(worker, node.peer_id, PullRequest(dataset="digits", index=1), tmp_path / "none")

    _run(case)


def _run(case: Callable[[MemoryEndpoint, MemoryEndpoint], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        with anyio.fail_after(20):
            async with network.endpoint("data") as node, network.endpoint("worker") as worker:
                await case(node, worker)

    anyio.run(main, backend="trio")
