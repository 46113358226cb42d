"""Configuration of a daemon: precedence of sources, errors with position and remedy, masked secrets."""

from __future__ import annotations

import contextlib
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from hypha_net.bandwidth import BandwidthLimits
from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.loader import Loaded, load_config
from hypha_net.node.config.models import NodeConfig, Section, is_secret, mask_secrets
from hypha_net.node.config.toml_positions import read_toml
from hypha_net.node.lifecycle import endpoint_settings


class Resources(Section):
    cpu: float = Field(default=1.0, ge=0, description="Processor cores.")
    gpu: float = Field(default=0.0, ge=0, description="Video memory in GB.")


class Whole(Section):
    type: Literal["whole", "flexible"]


class Offer(Section):
    price: float = Field(default=100.0, description="Tokens per lease-hour.")
    strategy: Literal["whole", "flexible"] | Whole = Field(default="flexible", description="How resources are offered.")


class Executor(Section):
    name: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default={})


class Model(Section):
    path: Path | None = None
    token: str | None = None


class ExampleConfig(NodeConfig):
    work_dir: Path = Field(default=Path("work"), description="Folder of the jobs.")
    resources: Resources = Field(default=Resources(), description="What is offered.")
    offer: Offer = Offer()
    executors: list[Executor] = Field(default=[], description="What runs jobs.")
    models: tuple[Model, ...] = ()


NEEDED = """cert_pem = "a-cert.pem"
key_pem = "a-key.pem"
trust_pem = "a-trust.pem"
gateway_addresses = ["/ip4/203.0.113.50/tcp/4001"]
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def run(text: str = "", env: dict[str, str] | None = None, **flags: object) -> Loaded[ExampleConfig]:
        file = tmp_path / "node.toml"
        file.write_text(NEEDED + text)
        dots = {name.replace("__", "."): value for name, value in flags.items()}
        return load_config(ExampleConfig, file, env or {}, dots)

    return run


def refused(load: Any, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return [str(problem) for problem in caught.value.problems]


def test_configuration_from_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {
        "HYPHA_CERT_PEM": "c.pem",
        "HYPHA_KEY_PEM": "/k.pem",
        "HYPHA_TRUST_PEM": "t.pem",
        "HYPHA_GATEWAY_ADDRESSES": "/dns4/a.example/tcp/4001, /ip6/::1/tcp/4001",
        "HYPHA_EXCLUDE_CIDR": "[]",
        "HYPHA_EXECUTORS": '[{name = "x"}]',
        "HYPHA_RELAY_CIRCUIT": "false",
        "PATH": "/bin",
    }
    config = load_config(ExampleConfig, None, env, {}).config
    assert config.cert_pem == tmp_path / "c.pem"
    assert config.key_pem == Path("/k.pem")
    assert config.gateway_addresses == ["/dns4/a.example/tcp/4001", "/ip6/::1/tcp/4001"]
    assert config.exclude_cidr == []
    assert config.executors == [Executor(name="x")]
    assert config.relay_circuit is False


def test_relative_paths_are_resolved_against_their_file(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = load('work_dir = "../jobs"\n[[models]]\npath = "m"\n')
    assert loaded.config.work_dir == tmp_path / "../jobs"
    assert loaded.config.models[0].path == tmp_path / "m"
    assert load("", {"HYPHA_WORK_DIR": "jobs"}).config.work_dir == elsewhere / "jobs"
    assert load(work_dir="jobs").config.work_dir == elsewhere / "jobs"


def test_open_telemetry_variables_override_file_and_environment(load: Any) -> None:
    text = """
telemetry_endpoint = "http://file:4318"
telemetry_attributes = "service.name=file,region=west"
telemetry_headers = "Authorization=Basic abc=="
"""
    assert load(text).config.telemetry_headers == {"Authorization": "Basic abc=="}
    env = {
        "HYPHA_TELEMETRY_ENDPOINT": "http://hypha:4318",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20xyz",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "",
        "OTEL_SERVICE_NAME": "worker-01",
        "OTEL_RESOURCE_ATTRIBUTES": "stage=prod",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    loaded = load(text, env)
    config = loaded.config
    assert config.telemetry_endpoint == "http://otel:4318"
    assert config.telemetry_headers == {"Authorization": "Basic xyz"}
    assert config.telemetry_attributes == {"service.name": "worker-01", "region": "west", "stage": "prod"}
    assert config.telemetry_sampler == "traceidratio"
    assert config.telemetry_sample_ratio == 0.25
    assert loaded.origins["telemetry_endpoint"] == "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert loaded.warnings == ()


def test_top_level_key_below_a_table_is_accepted_with_a_warning(load: Any, tmp_path: Path) -> None:
    text = """[resources]
cpu = 32
work_dir = "w"

[[executors]]
name = "a"
[[executors]]
name = "b"
telemetry_endpoint = "http://otel-collector:4318"
telemetry_protocol = "http/protobuf"
"""
    loaded = load(text)
    assert loaded.config.work_dir == tmp_path / "w"
    assert loaded.config.telemetry_endpoint == "http://otel-collector:4318"
    assert loaded.config.executors == [Executor(name="a"), Executor(name="b")]
    warnings = [warning for warning in loaded.warnings if "top-level" in warning]
    assert [warning.split(": ")[0].rsplit(":")[-1] for warning in warnings] == ["7", "13", "14"]
    assert "work_dir stands under [resources]" in warnings[0]
    assert loaded.origins["work_dir"].endswith("node.toml:7")
    twice = refused(load, 'work_dir = "v"\n' + text)
    assert "is set here and at" in twice[0]
    assert ":8: resources.work_dir" in twice[0]


def test_all_problems_are_reported_with_line_value_and_remedy(load: Any) -> None:
    text = """exclude_cidr = ["10.0.0.1/8"]
wrok_dir = "x"
price = 3
[resources]
gpu = "many"
gpus = 1
[offer]
strategy = "hole"
[[executors]]
nam = "x"
"""
    problems = refused(load, text, {"HYPHA_RESOURCES__CPU": "-1"}, limits__max_connections="0", limts="1")
    expected = [
        ":6: wrok_dir: is not a key", "did you mean work_dir?",
        ":7: price: is not a key", "did you mean offer.price?",
        ":10: resources.gpus: is not a key of [resources]", "did you mean gpu?",
        ":14: executors[0].nam: is not a key of [executors[0]]", "did you mean name?",
        "--set limts: is not a key", "did you mean limits?",
        ":5: exclude_cidr[0] = '10.0.0.1/8': 10.0.0.1/8 has host bits set",
        ":9: resources.gpu = 'many': input should be a valid number", "Video memory in GB.",
        "HYPHA_RESOURCES__CPU: resources.cpu = '-1': input should be greater than or equal to 0",
        ":12: offer.strategy = 'hole': input should be 'whole' or 'flexible'",
        ":13: executors[0].name: is missing",
        "--set limits.max_connections: limits.max_connections = '0': input should be greater",
    ]  # fmt: skip
    whole = "\n".join(problems)
    for part in expected:
        assert part in whole, f"{part!r} is not in\n{whole}"
    assert len(problems) == 11


def test_missing_key_is_reported_with_both_ways_to_set_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ExampleConfig, None, {}, {})
    text = str(caught.value)
    for key in ("cert_pem", "key_pem", "trust_pem"):
        assert f"{key}: is missing" in text
        assert f"set {key} in the file, or HYPHA_{key.upper()}" in text
    assert "gateway_addresses: names no gateway" in text


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("203.0.113.5:4001", "not a multiaddr"),
        ("/ip4/203.0.113/tcp/4001", "is not an ip4 address"),
        ("/ip4/203.0.113.5/udp/4001/quic-v1", "transport 'udp' is not supported"),
        ("/ip4/203.0.113.5/tcp/70000", "is not a TCP port"),
        ("/ip4/203.0.113.5/tcp/4001/p2p/QmWrong", "peer id"),
        ("/onion3/abc/tcp/1", "starts with 'onion3'"),
    ],
)
def test_addresses_are_validated_with_their_position(load: Any, address: str, says: str) -> None:
    problems = refused(load, f'external_addresses = ["/ip4/203.0.113.5/tcp/1", "{address}"]')
    assert "node.toml:5: external_addresses[1]" in problems[0]
    assert says in problems[0]


def test_rate_below_the_minimum_is_refused(load: Any) -> None:
    problems = refused(load, "[limits]\nupload_rate = 1000\n")
    assert len(problems) == 1
    assert ":6: limits.upload_rate = 1000: input should be greater than or equal to 16384" in problems[0]
    config = load("[limits]\nupload_rate = 16384\npeer_download_rate = 1000000\n").config
    rates = endpoint_settings(config, "worker").rates
    assert rates == BandwidthLimits(upload=16384, peer_download=1_000_000)


@pytest.mark.parametrize(
    "url", ["collector:4318", "http://[::1", "http://", "https://:4318", "http://host:x", "http://h:99999"]
)
def test_invalid_collector_address_is_refused(load: Any, url: str) -> None:
    (problem,) = refused(load, f'telemetry_endpoint = "{url}"')
    assert f"node.toml:5: telemetry_endpoint = {url!r}: must be a URL" in problem
    (problem,) = refused(load, env={"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": url})
    assert problem.startswith("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT: must be a URL")


def test_malformed_and_missing_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("a = 1\nb = = 2\n")
    with pytest.raises(ConfigError, match=r"broken.toml:2: is not TOML"):
        load_config(ExampleConfig, file, {}, {})
    file.write_text("cert_pem = " + "[" * 50_000)
    with pytest.raises(ConfigError, match=r"broken.toml:1: is not TOML: values are nested too deeply"):
        load_config(ExampleConfig, file, {}, {})
    for nested in ("a = " + "[" * 70 + "]" * 70, "telemetry_headers." + "a." * 2000 + "a = 1", "[" + "a." * 500 + "a]"):
        file.write_text(nested)
        with pytest.raises(ConfigError, match=r"broken.toml:1: is not TOML: values are nested too deeply"):
            load_config(ExampleConfig, file, {}, {})
    with pytest.raises(ConfigError, match=r"absent.toml: cannot be read: No such file"):
        load_config(ExampleConfig, tmp_path / "absent.toml", {}, {})


def test_secrets_are_masked_in_errors(load: Any) -> None:
    problems = refused(load, 'telemetry_headers = "hunter2"\n[[models]]\ntoken = ["hunter2"]\n')
    assert len(problems) == 2
    assert "hunter2" not in "\n".join(problems)
    data = {"telemetry_headers": {"a": "b"}, "models": [{"token": "x", "tokenizer": "y"}, {"token": None}]}
    assert mask_secrets(data) == {
        "telemetry_headers": "***",
        "models": [{"token": "***", "tokenizer": "y"}, {"token": None}],
    }
    assert mask_secrets({"telemetry_headers": {}}) == {"telemetry_headers": {}}
    assert is_secret("connectors.s3.secret_access_key")
    assert not is_secret("scheduler.job.inference.max_new_tokens")


def test_unknown_variable_is_a_warning(load: Any) -> None:
    loaded = load("", {"HYPHA_RESOURCES__GPUS": "1"})
    assert loaded.warnings == ("HYPHA_RESOURCES__GPUS is not a key of this program: did you mean gpu?",)


def test_a_part_of_a_value_that_is_not_a_table_is_refused(load: Any) -> None:
    problems = refused(load, env={"HYPHA_LIMITS": "x", "HYPHA_LIMITS__MAX_CONNECTIONS": "1"})
    assert str(problems[0]).startswith("HYPHA_LIMITS__MAX_CONNECTIONS: sets a part of limits, which is set to another")
    problems = refused(load, env={"HYPHA_TELEMETRY_HEADERS": '{"a": "x"}', "HYPHA_TELEMETRY_HEADERS__A__B": "1"})
    assert str(problems[0]).startswith("HYPHA_TELEMETRY_HEADERS__A__B: sets a part of telemetry_headers.a, which is")


@pytest.mark.parametrize("value", ["[" * 100_000, "[" * 900 + "]" * 900, "{a = " * 5000, "{a = " * 70 + "1" + "}" * 70])
def test_nested_variables_and_flags_are_refused(load: Any, value: str) -> None:
    (problem,) = refused(load, env={"HYPHA_MODELS": value})
    assert problem.startswith("HYPHA_MODELS: models = ")
    assert "nested" in problem
    (problem,) = refused(load, models=value)
    assert "nested" in problem


@given(st.text("[]{}=:,.'\"a1 \n") | st.text())
def test_any_variable_is_read_or_refused(value: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(ExampleConfig, None, {"HYPHA_MODELS": value, "HYPHA_TELEMETRY_HEADERS": value}, {})


@given(st.text("[]{}=:,.'\"a1 \n") | st.text())
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("toml") / "node.toml"
    file.write_text(text, encoding="utf-8")
    with contextlib.suppress(ConfigError):
        load_config(ExampleConfig, file, {}, {})


_layer = st.one_of(st.none(), st.integers(1, 9999))


@given(_layer, _layer, _layer)
def test_source_with_highest_precedence_wins(toml: int | None, env: int | None, flag: int | None) -> None:
    needed = {f"{kind}_pem": "x" for kind in ("cert", "key", "trust")}
    flags: dict[str, object] = {**needed, "gateway_addresses": "/ip4/127.0.0.1/tcp/1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "f.toml"
        file.write_text("" if toml is None else f"[limits]\nmax_connections = {toml}\n")
        environment = {} if env is None else {"HYPHA_LIMITS__MAX_CONNECTIONS": str(env)}
        flags |= {} if flag is None else {"limits.max_connections": flag}
        loaded = load_config(ExampleConfig, file, environment, flags)
    said = [value for value in (flag, env, toml) if value is not None]
    assert loaded.config.limits.max_connections == (said[0] if said else 1024)
    assert ("limits.max_connections" in loaded.origins) is bool(said)


_names = st.from_regex(r"[a-z]{1,4}", fullmatch=True)
_text = st.text(st.sampled_from("ab[]{}#'=.,\\ \"\n"), max_size=8)


def _written(text: str) -> str:
    if "'" not in text and "\n" not in text:
        return f"'{text}'"
    body = "".join({'"': '\\"', "\\": "\\\\"}.get(letter, letter) for letter in text)
    return f'"""\n{body}"""'


@given(
    st.lists(st.tuples(_names, st.lists(st.tuples(_names, _text), max_size=3, unique_by=lambda p: p[0])), max_size=4)
)
def test_reported_line_of_a_key_is_where_it_was_written(tables: list[tuple[str, list[tuple[str, str]]]]) -> None:
    """Strings, comments and brackets around a key do not affect its line."""
    lines: list[str] = []
    expected: dict[tuple[str | int, ...], int] = {}
    counts: dict[str, int] = {}
    for table, pairs in tables:
        lines += ["# [x]", f"[[{table}]] # ]"]
        index = counts[table] = counts.get(table, -1) + 1
        for key, text in pairs:
            expected[(table, index, key)] = len(lines) + 1
            lines += f"{key} = [ {_written(text)}, # ]\n {{ z = {_written(text)} }}]".split("\n")
    document = read_toml("\n".join(lines), Path("f"))
    assert document.data == tomllib.loads("\n".join(lines))
    assert {key: document.lines[key] for key in expected} == expected
