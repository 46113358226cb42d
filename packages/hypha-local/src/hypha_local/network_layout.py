"""Layout of a local network: its nodes and their addresses, the run directory, and the configuration files.

First step of a run; starts no process.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypha_local.demo_tasks import DIGITS, DemoTask
from hypha_local.errors import NoFreePortError, RunDirectoryError
from hypha_proto.record_file import EVENTS

MARKER: Final = ".hypha-local"
PARAMETER_SERVER: Final = "parameter-server"
SPARE: Final = "spare"
"""Name of a worker that is started during the job and can take any part in it."""
HELD_OUT: Final = "held-out"
"""Name of the dataset of held-out samples."""

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_IANA_EPHEMERAL: Final = (49152, 65535)
"""Ephemeral ports where the system does not state them (RFC 6335)."""
_FIRST_PORT: Final = 20_000
_MIN_PORTS: Final = 1000
_RESERVATIONS: Final[list[socket.socket]] = []


class Folders:
    """Paths in a run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.certificates = root / "certs"
        """Certificates and keys of all nodes."""
        self.configuration = root / "config"
        """One TOML file per node."""
        self.data = root / "data"
        """Source files and datasets."""
        self.test_set = root / "test.safetensors"
        """Held-out samples."""
        self.start_model = root / "start-model"
        """The model before training."""
        self.work = root / "work"
        """Work directories of the workers."""
        self.runs = root / "runs"
        """The scheduler's output directory."""
        self.logs = root / "logs"
        """One log file per process."""
        self.model = root / "model"
        """The trained model."""
        self.audit = self.logs / "audit.txt"
        """What ``hypha-scheduler audit`` says."""
        self.metrics = root / EVENTS
        """The scheduler's events as JSON lines."""

    def make(self) -> None:
        """Create the run directory, replacing that of an earlier run.

        Raises:
            RunDirectoryError: the directory is not empty and not a run directory.
        """
        if self.root.exists() and (not self.root.is_dir() or (any(self.root.iterdir()) and not self._is_ours())):
            raise RunDirectoryError(f"--dir {self.root}: not empty and not a run directory; name another folder")
        if self.root.exists():
            shutil.rmtree(self.root)
        self.make_parts()
        (self.root / MARKER).write_text("A run directory of hypha-local: replaced by the next run in it.\n")

    def make_parts(self) -> None:
        """Create what is missing of the folders in it."""
        for folder in (self.certificates, self.configuration, self.data, self.work, self.runs, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.certificates.chmod(0o700)
        self.work.chmod(0o750)

    def _is_ours(self) -> bool:
        return (self.root / MARKER).is_file()

    def tidy(self, *, keep_runs: bool = False) -> None:
        """Remove what is not needed after the run: keys, configuration, slices, work directories.

        Args:
            keep_runs: keep the scheduler's output directory, because it contains the results.
        """
        for folder in (self.certificates, self.configuration, self.data, self.work, self.start_model):
            shutil.rmtree(folder, ignore_errors=True)
        if not keep_runs:
            shutil.rmtree(self.runs, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of the network."""

    name: str
    """Unique name; also the name of its certificate, TOML file and log."""
    program: str
    """Console script: ``hypha-gateway``, ``hypha-worker``, …"""
    role: str
    port: int

    @property
    def address(self) -> str:
        """Multiaddress at which it listens."""
        return f"/ip4/127.0.0.1/tcp/{self.port}"


@dataclass(frozen=True, slots=True)
class DemoTraining:
    """Parameters of the demo's job."""

    workers: int = 3
    rounds: int = DIGITS.rounds
    seed: int = 0
    task: DemoTask = DIGITS
    evaluate_every: int = 0
    """Number of rounds between two evaluations on the dataset `HELD_OUT`; 0 for none."""
    delay: float = 0.0
    """Seconds that workers add to each batch."""

    @property
    def samples_a_round(self) -> int:
        """Samples of all workers per round."""
        return self.task.batch_size * self.task.steps * self.workers

    @property
    def steps_a_worker(self) -> int:
        """Average number of batches of a worker in the whole job."""
        return self.rounds * self.task.steps


def free_ports(count: int, among: Sequence[int] | None = None) -> list[int]:
    """Return `count` TCP ports that are free on the loopback interface, and reserve them until this process ends.

    The daemons listen seconds later. Until then no outgoing connection takes the ports, as they are outside the range
    of ephemeral ports, and on Linux no other call of this function returns them, in whichever process.

    Args:
        among: ports to choose from.

    Raises:
        NoFreePortError: there are fewer.
    """
    candidates = _usable_ports() if among is None else among
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            break
        if _reserve(port):
            found.append(port)
    if len(found) < count:
        raise NoFreePortError(
            f"only {len(found)} of {count} ports are free on 127.0.0.1; end programs that listen there"
        )
    return found


def _usable_ports() -> Sequence[int]:
    """Return the ports from `_FIRST_PORT` on that the system does not assign by itself; all if that leaves too few."""
    try:
        first, last = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        first, last = _IANA_EPHEMERAL
    usable = [port for port in range(_FIRST_PORT, 1 << 16) if not first <= port <= last]
    return usable if len(usable) >= _MIN_PORTS else range(_FIRST_PORT, 1 << 16)


def _reserve(port: int) -> bool:
    """Reserve a port if it is free and not reserved; the name of an abstract socket lasts as long as this process."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            reservation.bind(f"\0hypha-local-port-{port}")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return False
    _RESERVATIONS.append(reservation)
    return True


def plan_nodes(workers: int, *, parameter_server: bool = True, spare: bool = False) -> list[NodePlan]:
    """Return a gateway, a data node, workers, a parameter server and a scheduler, in the order of starting.

    Args:
        workers: number of workers, without the parameter server.
        parameter_server: whether there is one; only training needs it.
        spare: whether there is a worker that can take the place of another, or of the parameter server.
    """
    kinds = [("gateway", "hypha-gateway", "gateway"), ("data", "hypha-data", "data")]
    kinds += [(f"worker-{i}", "hypha-worker", "worker") for i in range(1, workers + 1)]
    kinds += [(PARAMETER_SERVER, "hypha-worker", "worker")] if parameter_server else []
    kinds += [(SPARE, "hypha-worker", "worker")] if spare else []
    kinds += [("scheduler", "hypha-scheduler", "scheduler")]
    ports = free_ports(len(kinds))
    return [NodePlan(name, program, role, port) for (name, program, role), port in zip(kinds, ports, strict=True)]


def write_configuration(folders: Folders, nodes: Iterable[NodePlan], training: DemoTraining, python: str) -> None:
    """Write the TOML file of every node of a network that trains to the run directory."""
    names = [training.task.name, *([HELD_OUT] if training.evaluate_every else [])]
    executor = training_executor(python, training.delay)

    def executors(node: NodePlan) -> str:
        return AGGREGATION if node.name == PARAMETER_SERVER else AGGREGATION * (node.name == SPARE) + executor

    datasets = {name: f"../data/{name}" for name in names}
    write_nodes(folders, nodes, datasets, executors, job_table(training, "../start-model"))


def write_nodes(
    folders: Folders,
    nodes: Iterable[NodePlan],
    datasets: Mapping[str, str],
    executors: Callable[[NodePlan], str],
    job: str = "",
    work: str = "../work",
) -> None:
    """Write the TOML file of every node.

    Args:
        folders: where they go.
        nodes: all nodes of the network.
        datasets: paths of the data node's datasets, by name.
        executors: returns TOML of a worker's executors.
        job: TOML of the scheduler's job, if it is to run one.
        work: folder of the workers' work directories.
    """
    nodes = list(nodes)
    settings = {
        "gateway": 'state_dir = "../work"\n',
        "data": "".join(f"\n[[datasets]]\nname = {toml(name)}\npath = {toml(datasets[name])}\n" for name in datasets),
        "scheduler": f'output_dir = "../runs"\n\n{job}',
    }
    for node in nodes:
        common: dict[str, str | list[str]] = {
            "cert_pem": f"../certs/{node.name}-cert.pem",
            "key_pem": f"../certs/{node.name}-key.pem",
            "trust_pem": f"../certs/{node.name}-trust.pem",
            "listen_addresses": [node.address],
            "gateway_addresses": [each.address for each in nodes if each.role == "gateway" and each is not node],
            "exclude_cidr": [],
        }
        own = worker_settings(node, work) + executors(node) if node.role == "worker" else settings.get(node.role, "")
        lines = ["# written by hypha-local at each start: changes are lost\n"]
        lines += [f"{key} = {toml(value)}\n" for key, value in common.items()]
        (folders.configuration / f"{node.name}.toml").write_text("".join(lines) + own, encoding="utf-8")


def worker_settings(node: NodePlan, work: str) -> str:
    """Return TOML of a worker's work directory, which is in `work`, and its resources."""
    return f"""work_dir = {toml(f"{work}/{node.name}")}
drain_timeout = 0  # all programs end together: nobody waits for the job

[resources]
cpu = 1
memory = 2
storage = 1
gpu = 0
"""


AGGREGATION: Final = """
[[executors]]
class = "aggregate"
name = "parameter-server"
runtime = "parameter-server"
"""


def training_executor(python: str, delay: float = 0.0) -> str:
    """Return TOML of the executor that trains with DiLoCo."""
    return process_executor("train", "diloco-transformer", python, "hypha.accelerate_executor.training", delay)


def process_executor(kind: str, name: str, python: str, module: str, delay: float = 0.0) -> str:
    """Return TOML of an executor of the class `kind` that runs a module of the Python interpreter `python`.

    Each of its batches takes `delay` seconds longer.
    """
    environment = f'env = {{ HYPHA_EXECUTOR_DELAY = "{delay:g}" }}\n' if delay else ""
    return f"""
[[executors]]
class = {toml(kind)}
name = {toml(name)}
runtime = "process"
cmd = {toml(python)}
args = [
    "-m", {toml(module)},
    "--socket", "{{SOCKET_PATH}}",
    "--work-dir", "{{WORK_DIR}}",
    "--job", "{{JOB_JSON}}",
]
{environment}"""


def job_table(training: DemoTraining, model: str) -> str:
    """Return TOML of the job, as the scheduler's configuration and a job file have it.

    Args:
        model: path of the start model, relative to the file.
    """
    task = training.task
    evaluation = f", evaluation = {toml(HELD_OUT)}" if training.evaluate_every else ""
    return f"""[scheduler.job]
type = "diloco"
seed = {training.seed}
dataset = {{ dataset = {toml(task.name)}{evaluation} }}
model = {{ path = {toml(model)}, type = {toml(task.type)} }}
inner_optimizer = {{ learning_rate = {task.learning_rate} }}
outer_optimizer = {{ learning_rate = {task.outer_learning_rate}, momentum = {task.outer_momentum} }}

[scheduler.job.rounds]
update_rounds = {training.rounds}
keep_updates = true
avg_samples_between_updates = {training.samples_a_round}
batch_size = {task.batch_size}
evaluate_every = {training.evaluate_every}

[scheduler.job.resources]
num_workers = {training.workers}
worker = {{ cpu = 1.0, kind = "diloco-transformer" }}
parameter_server = {{ cpu = 1.0, kind = "parameter-server" }}
worker_price = {{ bid = 100.0, max = 120.0 }}
parameter_server_price = {{ bid = 100.0, max = 120.0 }}
"""


def toml(value: str | list[str]) -> str:
    """Format a TOML string or array of strings; JSON escapes are valid TOML except for surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)
