"""Options and checks of `hypha-data run` and `provide`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_data.cli import main
from hypha_data.config import DataConfig
from hypha_data.inspection import check_datasets


@pytest.mark.parametrize(("options", "verify"), [([], False), (["--verify"], True), (["--set", "verify=true"], True)])
def test_verify_is_an_option_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], verify: bool
) -> None:
    file = tmp_path / "data.toml"
    file.write_text(
        'cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/192.0.2.1/tcp/4001"]\n'
        'dataset_path = "digits"\n'
    )
    configured: list[DataConfig] = []

    def run_daemon(config: DataConfig, *_args: object, **_options: object) -> int:
        configured.append(config)
        return 0

    monkeypatch.setattr("hypha_net.node.lifecycle.run_daemon", run_daemon)
    done = CliRunner().invoke(main, ["run", "--config", str(file), *options])
    assert done.exit_code == 0, done.output
    assert [config.verify for config in configured] == [verify]


def test_provide_prints_digests_and_runs_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, model = tmp_path / "data.toml", tmp_path / "a model"
    file.write_text('cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/192.0.2.1/tcp/4001"]\n')
    model.write_bytes(b"weights")
    configured: list[DataConfig] = []

    def run_daemon(config: DataConfig, *_args: object, **_options: object) -> int:
        configured.append(config)
        return 0

    monkeypatch.setattr("hypha_net.node.lifecycle.run_daemon", run_daemon)
    done = CliRunner().invoke(main, ["provide", str(model), "--config", str(file)])
    assert done.exit_code == 0, done.output
    assert f"{hashlib.sha256(b'weights').hexdigest()}  {model}" in done.output
    assert [config.provide for config in configured] == [[model]]
    assert CliRunner().invoke(main, ["provide", "--config", str(file)]).exit_code == 2
    assert "no dataset" in CliRunner().invoke(main, ["run", "--config", str(file)]).output


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
