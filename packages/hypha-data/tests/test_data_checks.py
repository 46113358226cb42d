"""Checks of a data node's folders and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_data.checks import check_datasets
from hypha_data.config import DataConfig


@pytest.mark.parametrize(
    ("made", "told"), [(False, "there is no such folder"), (True, "holds no *.safetensors")], ids=["missing", "empty"]
)
def test_a_folder_without_slices_fails(tmp_path: Path, made: bool, told: str) -> None:
    folder = tmp_path / "dataset"
    if made:
        folder.mkdir()
    config = DataConfig(
        cert_pem=Path("c"),
        key_pem=Path("k"),
        trust_pem=Path("t"),
        gateway_addresses=["/ip4/127.0.0.1/tcp/1"],
        dataset_path=folder,
        provide=[tmp_path / "absent"],
    )
    dataset, provided = check_datasets(config)
    assert (dataset.state, provided.state) == ("FAILED", "FAILED")
    assert dataset.text.startswith(f"dataset_path {folder}: ")
    assert told in dataset.text
