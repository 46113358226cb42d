"""Options and checks of `hypha-data run` and `provide`."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_data.cli import main
from hypha_data.config import DataConfig
from hypha_data.inspection import check_datasets

NODE = 'cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/192.0.2.1/tcp/4001"]\n'


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[DataConfig]:
    """Return the configurations with which a daemon would be run."""
    found: list[DataConfig] = []

    def run_daemon(config: DataConfig, *_args: object, **_options: object) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("hypha_net.node.lifecycle.run_daemon", run_daemon)
    return found


@pytest.mark.parametrize(("options", "verify"), [([], False), (["--verify"], True), (["--set", "verify=true"], True)])
def test_verify_is_an_option_of_run(
    tmp_path: Path, configured: list[DataConfig], options: list[str], verify: bool
) -> None:
    file = tmp_path / "data.toml"
    file.write_text(f'{NODE}dataset_path = "digits"\n')
    done = CliRunner().invoke(main, ["run", "--config", str(file), *options])
    assert done.exit_code == 0, done.output
    assert [config.verify for config in configured] == [verify]


def test_provide_prints_digests_and_runs_with_the_files(tmp_path: Path, configured: list[DataConfig]) -> None:
    file, model = tmp_path / "data.toml", tmp_path / "a model"
    file.write_text(NODE)
    model.write_bytes(b"weights")
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
    config = DataConfig(**tomllib.loads(NODE), dataset_path=folder, provide=[tmp_path / "absent"])
    dataset, provided = check_datasets(config)
    assert (dataset.state, provided.state) == ("FAILED", "FAILED")
    assert dataset.text.startswith(f"dataset_path {folder}: ")
    assert told in dataset.text
