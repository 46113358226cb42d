"""The worker's configuration: the documented example, both forms of keys, and errors that name the remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.loader import Loaded, load_config
from hypha_proto.ids import PeerId
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources
from hypha_worker.checks import check_worker
from hypha_worker.cli import main
from hypha_worker.config import WorkerConfig
from hypha_worker.hardware.detection import detect
from hypha_worker.leasing.terms import LeaseTerms, Quota

LEAST = """
cert_pem = "c.pem"
key_pem = "k.pem"
trust_pem = "t.pem"
gateway_addresses = ["/ip4/203.0.113.50/tcp/4001"]
work_dir = "work"
"""


def load(tmp_path: Path, text: str, **env: str) -> Loaded[WorkerConfig]:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    return load_config(WorkerConfig, file, env, {})


@pytest.mark.parametrize("name", ["inference", "train", "shell", "a", "map-reduce-2", "x" * 32])
def test_an_executor_is_announced_with_its_class_and_without(tmp_path: Path, name: str) -> None:
    text = f'{LEAST}[[executors]]\nclass = "{name}"\nname = "render"\ncmd = "y"'
    config = load(tmp_path, text).config
    [executor] = config.executors
    announced = {ExecutorDescriptor(name, "render"), ExecutorDescriptor("", "render")}
    assert set(executor.descriptors) == announced
    assert config.capabilities().executors == announced


@pytest.mark.parametrize("name", ["", "Shell", "1st", "-x", "a/b", "x" * 33, "x:y"])
def test_a_class_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    text = f'{LEAST}[[executors]]\nclass = "{name}"\nname = "render"\ncmd = "y"'
    with pytest.raises(ConfigError, match=r"executors\[0\]\.class.*beginning with a letter"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "section", ['[offer]\nstrategy = "whole"\nprice = 150.0\nfloor = 120.0', '[offer.strategy]\ntype = "whole"']
)
def test_both_forms_of_the_strategy_are_accepted(tmp_path: Path, section: str) -> None:
    assert load(tmp_path, LEAST + section).config.offer.is_whole


def test_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    policy = load(tmp_path, LEAST).config.offer
    assert (policy.price, policy.floor, policy.strategy, policy.evaluation) == (100.0, 0.0, "flexible", "profit")
    assert (policy.schedulers, policy.prefer, policy.quota) == ([], [], Quota())
    config = load(tmp_path, LEAST).config
    assert config.offer.lease_terms() == LeaseTerms(temporary_lease=0.5, idle_lease=60.0)
    assert config.capabilities().defaults == Resources(cpu=1.0, storage=10.0)


def test_terms_and_defaults_are_configurable(tmp_path: Path) -> None:
    text = f"""
[offer]
evaluation = "affinity"
prefer = ["{PEER}", "x"]
max_offers = 4
max_leases = 3
max_jobs = 2
idle_lease = 30
temporary_lease = 1.5

[resources]
cpu = 4

[resources.default]
cpu = 1
memory = 2
storage = 5
gpu = 8

[[executors]]
class = "train"
name = "x"
cmd = "sh"
"""
    loaded = load(tmp_path, LEAST + text)
    quota = Quota(max_offers=4, max_leases=3, max_jobs=2)
    assert (loaded.config.offer.prefer, loaded.config.offer.quota) == ([PEER, "x"], quota)
    assert loaded.config.offer.lease_terms() == LeaseTerms(1.5, 30.0, quota)
    assert loaded.config.capabilities().defaults == Resources(cpu=1.0, memory=2.0, storage=5.0, gpu=8.0)
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("", 1.0),
        ("[offer]\noversubscribe = true\n", 0.0),
        ("[resources.default]\ncpu = 0\n", 0.0),
        ("[resources.default]\ncpu = 2\n[offer]\noversubscribe = true\n", 2.0),
    ],
)
def test_a_lease_without_cores_has_one_unless_the_owner_oversubscribes(tmp_path: Path, text: str, cores: float) -> None:
    capabilities = load(tmp_path, LEAST + "[resources]\ncpu = 2\n" + text).config.capabilities()
    free = capabilities.capacity
    leases = 0
    while leases < 3 and not capabilities.exhausted_defaults(Resources(), free.resources):
        allocation = free.fit(capabilities.with_defaults(Resources(), free.available()))
        assert allocation is not None
        assert allocation.resources.cpu == cores
        free, leases = free.without([allocation]), leases + 1
    assert leases == (3 if cores == 0.0 else 2.0 / cores)


def test_a_preferred_name_that_no_executor_has_is_a_warning(tmp_path: Path) -> None:
    text = '[resources]\ncpu = 1\n[offer]\nprefer = ["y"]\n[[executors]]\nclass = "train"\nname = "x"\ncmd = "sh"\n'
    [warning] = load(tmp_path, LEAST + text).warnings
    assert warning == "offer.prefer: 'y' is neither a peer id nor the name of one of the [[executors]]"


PEER = str(PeerId.from_public_key(bytes(32)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[executors]]\nclass = "train"\nname = "x"\n', "cmd is missing: a process needs a command"),
        ('[[executors]]\nclass = "inference"\nname = "x"\n', "cmd is missing: a process needs a command"),
        (
            '[[executors]]\nclass = "train"\nname = "x"\ncmd = "a"\nreadable = ["/cache/models"]\n'
            '[[executors]]\nclass = "train"\nname = "y"\ncmd = "a"\nwritable = ["/cache"]\n',
            "readable = '/cache/models' of executor train/x lies in /cache, where jobs write",
        ),
        ('[[executors]]\nclass = "train"\nname = "x"\nruntime = "parameter-server"\n', 'set runtime = "process"'),
        (
            '[[executors]]\nclass = "inference"\nname = "x"\nruntime = "parameter-server"\n',
            'of class "inference": set runtime = "process"',
        ),
        (
            '[[executors]]\nclass = "aggregate"\nname = "x"\ncmd = "uv"\n',
            'runtime = "process" cannot run what is of class "aggregate": set runtime = "parameter-server"',
        ),
        (
            '[[executors]]\nclass = "train"\nname = "x"\nruntime = "prozess"\ncmd = "a"\n',
            "no such runtime; there are parameter-server, process",
        ),
        (
            '[[executors]]\nclass = "aggregate"\nname = "x"\nruntime = "parameter-server"\ncmd = "uv"\n',
            "cmd, args and check",
        ),
        (
            '[[executors]]\nclass = "aggregate"\nname = "x"\nruntime = "parameter-server"\nenv = { OMP = "1" }\n',
            "env (OMP) does not belong to the parameter server",
        ),
        ('[[executors]]\nclass = "train"\nname = "x"\ncmd = "a"\n' * 2, "train/x is listed twice"),
        ("[resources]\ncpu = -1\n", "resources.cpu"),
        ("[resources]\ncpus = 1\n", "did you mean cpu"),
        ("[resources]\ngpu = 80\n[[resources.devices]]\nindex = 0\nmemory = 24\n", "80 GB"),
        ('[offer]\nstrategy = "half"\n', "flexible"),
        ('[offer]\nschedulers = ["me"]\n', "peer id 'me'"),
        ('[offer]\nprefer = ["12D3KooWx"]\n', "offer.prefer"),
        ('[offer]\nevaluation = "greed"\n', "'affinity', 'profit' or 'utilization'"),
        ("[offer]\nprice = 1e300\n", "offer.price"),
        ("[offer]\nfloor = 1000000001.0\n", "offer.floor"),
        ("[offer]\nprice = inf\n", "offer.price"),
        ("[offer]\nmax_leases = 0\n", "offer.max_leases"),
        ("[offer]\nidle_lease = 0\n", "offer.idle_lease"),
        ("[offer]\ntemporary_lease = 2.5\n", "offer.temporary_lease"),
        ("[resources.default]\nstorage = -1\n", "resources.default.storage"),
        ('[isolation]\nrequire = ["bwrap"]\n', "'cgroup', 'bubblewrap'"),
        ('[isolation]\nrequire = ["cgroup"]\ndisable = ["cgroup"]\n', "cgroup is both required and disabled"),
        ('[cache]\npath = "/x"\n', "set cache.max_size, or resources.storage"),
        ("[cache]\nmax_size = 1\n", "max_size is set and path is not"),
        ('[cache]\npath = "/"\nmax_size = 1\n', "lie within each other"),
        ('[connectors]\nnetworks = ["10.0.0.0/33"]\n', "connectors.networks"),
        ('[connectors]\nbuckets = ["b"]\n', "set one of them"),
        ('[connectors]\ns3_access_key = "k"\n', "belong together"),
        ('[connectors]\ns3_endpoint = "https://user:pass@s3.test"\n', "without user, query and fragment"),
    ],
)
def test_errors_name_the_key_and_the_remedy(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, LEAST + text)
    assert told in str(caught.value)
    assert "worker.toml:" in str(caught.value)


@pytest.mark.parametrize(("text", "size"), [("", 25 * 10**8), ("max_size = 3.0\n", 3 * 10**9)])
def test_a_cache_is_a_tenth_of_the_disk_by_default(tmp_path: Path, text: str, size: int) -> None:
    cache = load(tmp_path, f'{LEAST}[resources]\nstorage = 25\n[cache]\npath = "cache"\n{text}').config.make_cache()
    assert cache is not None
    assert cache.max_size == size
    assert load(tmp_path, LEAST).config.make_cache() is None


def test_a_worker_that_can_get_no_jobs_warns(tmp_path: Path) -> None:
    warnings = load(tmp_path, LEAST).warnings
    assert any("[[executors]]" in warning for warning in warnings)
    assert any("[resources]" in warning for warning in warnings)
    good = f'[resources]\ncpu = 1\n[offer]\nschedulers = ["{PEER}"]\n'
    good += '[[executors]]\nclass = "train"\nname = "x"\ncmd = "sh"'
    assert not load(tmp_path, LEAST + good).warnings


def test_a_command_that_is_not_installed_is_a_warning(tmp_path: Path) -> None:
    text = LEAST + '[resources]\ncpu = 1\n[[executors]]\nclass = "train"\nname = "x"\ncmd = "no-such-program"\n'
    [warning] = load(tmp_path, text).warnings
    assert warning == (
        "executors[0], train/x: its command 'no-such-program' is not found: install it, or write its absolute path in "
        "cmd"
    )
    program = tmp_path / "bin" / "no-such-program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert not load(tmp_path, text + f'env = {{ PATH = "{program.parent}" }}\n').warnings


def test_checks_fail_for_a_missing_executor_and_a_missing_gpu(tmp_path: Path) -> None:
    text = LEAST + "[[resources.devices]]\nindex = 977\nmemory = 24\n"
    text += '[[executors]]\nclass = "train"\nname = "x"\ncmd = "no-such-program"\n'
    found = list(check_worker(load(tmp_path, text).config, live=False))
    told = [check.text for check in found if check.state == "FAILED"]
    assert any(line.startswith("resources.devices") for line in told), told
    assert any(line.startswith("executors[0], train/x: its command 'no-such-program' is not found") for line in told), (
        told
    )


@pytest.mark.parametrize(
    ("module", "state", "told"),
    [("json", "ok", "and its check passes"), ("no_such_module", "FAILED", "No module named 'no_such_module'")],
)
def test_the_check_of_an_executor_is_run(tmp_path: Path, module: str, state: str, told: str) -> None:
    text = LEAST.replace('"work"', f'"{tmp_path}/work"')
    text += f'[[executors]]\nclass = "train"\nname = "x"\ncmd = "{sys.executable}"\n'
    text += f'check = ["{sys.executable}", "-c", "import {module}"]\n'
    *_, found = check_worker(load(tmp_path, text).config, live=True)
    assert (found.state, told in found.text) == (state, True), found


def run(*args: str) -> Any:
    return CliRunner().invoke(main, list(args))


def test_init_writes_the_detected_resources_and_run_accepts_them(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    answer = run("init", "--out", str(file), "--lan")
    assert answer.exit_code == 0, answer.output
    config = load_config(WorkerConfig, file, {}, {}).config
    found = detect(tmp_path)
    assert config.resources.cpu == found["cpu"] >= 1
    assert config.resources.memory == pytest.approx(found["memory"], abs=0.2)
    assert {entry.name for entry in config.executors} == {"diloco-transformer", "parameter-server"}
    assert run("config", "show", "--config", str(file)).exit_code == 0
    assert run("schema").exit_code == 0


def test_check_warns_of_more_storage_than_the_disk_has(tmp_path: Path) -> None:
    def warnings(storage: float) -> list[str]:
        text = LEAST.replace('"work"', f'"{tmp_path}/made/later"') + f"[resources]\nstorage = {storage}\n"
        checks = check_worker(load(tmp_path, text).config, live=False)
        return [check.text for check in checks if check.state == "warning" and "resources.storage" in check.text]

    assert warnings(0.001) == []
    [told] = warnings(1e9)
    assert told.startswith("resources.storage = 1e+09: ")
    assert told.endswith("/made/later are free; offer less, or free some")
