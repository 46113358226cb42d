"""The option `--verify` of `hypha-data run`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_data.cli import main
from hypha_data.config import DataConfig


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

    monkeypatch.setattr("hypha_net.node.cli.run_daemon", run_daemon)
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

    monkeypatch.setattr("hypha_net.node.cli.run_daemon", run_daemon)
    done = CliRunner().invoke(main, ["provide", str(model), "--config", str(file)])
    assert done.exit_code == 0, done.output
    assert f"{hashlib.sha256(b'weights').hexdigest()}  {model}" in done.output
    assert [config.provide for config in configured] == [[model]]
    assert CliRunner().invoke(main, ["provide", "--config", str(file)]).exit_code == 2
    assert "no dataset" in CliRunner().invoke(main, ["run", "--config", str(file)]).output
