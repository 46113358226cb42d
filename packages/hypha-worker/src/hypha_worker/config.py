"""The worker's configuration: every key, its checks, and the values that other modules are built from.

Called by `hypha_net.node.config`, which reads flags, environment and TOML; `service` builds the worker from it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from hypha_net.node.config.models import UNSUPPORTED_KEYS, NodeConfig, Section
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.leases import TEMPORARY_LEASE
from hypha_proto.offers import AggregateExecutor, ExecutorDescriptor, TrainExecutor
from hypha_proto.resources import Resources
from hypha_proto.tasks import TASK_EXECUTOR_PREFIX, task_executor
from hypha_proto.wire_schema import MAX_PRICE
from hypha_worker.bidding.evaluation import find_evaluation
from hypha_worker.bidding.policy import OfferPolicy, Strategy
from hypha_worker.executors.runtimes import RUNTIMES, ExecutorSettings, check_executor, find_runtime
from hypha_worker.leasing.capacity import Capabilities, Capacity, Device
from hypha_worker.leasing.terms import IDLE_LEASE, MAX_DRAIN, MAX_TEMPORARY_LEASE, LeaseTerms, Quota
from hypha_worker.logs.run_log import LOGS, LogFolder


def _peer(text: str) -> str:
    try:
        return str(PeerId.parse(text))
    except InvalidIdError as error:
        raise ValueError(str(error)) from None


def _preferred(text: str) -> str:
    """Check an entry of `OfferSection.prefer`: what begins like a peer id must be one."""
    return _peer(text) if text.startswith(_PEER_ID_START) else text


def _evaluation(name: str) -> str:
    find_evaluation(name)
    return name


def _runtime(name: str) -> str:
    find_runtime(name)
    return name


def _executor_name(name: str) -> str:
    if name.startswith(TASK_EXECUTOR_PREFIX):
        raise ValueError(
            f"names that begin with {TASK_EXECUTOR_PREFIX} are reserved for announcing executors that run tasks: "
            "choose another name"
        )
    return name


def _executor_class(name: str) -> str:
    if not _EXECUTOR_CLASS.fullmatch(name):
        raise ValueError("no class: use at most 32 lower-case letters, digits and hyphens, beginning with a letter")
    return name


LayerName = Literal["cgroup", "bubblewrap", "own-uid", "landlock", "supervisor", "rlimits"]
_PEER_ID_START: Final = "12D3Koo"
_EXECUTOR_CLASS: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, le=MAX_PRICE, allow_inf_nan=False)]
Limit = Annotated[int, Field(ge=1)] | None
PeerText = Annotated[str, AfterValidator(_peer)]
PreferredText = Annotated[str, Field(min_length=1), AfterValidator(_preferred)]
EvaluationName = Annotated[str, AfterValidator(_evaluation)]
RuntimeName = Annotated[str, AfterValidator(_runtime)]
ExecutorName = Annotated[str, Field(min_length=1), AfterValidator(_executor_name)]
ExecutorClassName = Annotated[str, AfterValidator(_executor_class)]


class DeviceSection(Section):
    """``[[resources.devices]]``."""

    index: int = Field(ge=0, description="Index of the GPU in the driver's order.")
    memory: Amount = Field(description="Its memory, GB.")


class DefaultResourcesSection(Section):
    """``[resources.default]``."""

    cpu: Amount = Field(default=0.0, description="Cores.")
    memory: Amount = Field(default=0.0, description="RAM, GB.")
    storage: Amount = Field(default=10.0, description="Disk, GB; it bounds the job even if resources.storage is 0.")
    gpu: Amount = Field(default=0.0, description="GPU memory, GB.")


class ResourcesSection(Section):
    """``[resources]``."""

    cpu: Amount = Field(default=0.0, description="Cores.")
    memory: Amount = Field(default=0.0, description="RAM, GB.")
    storage: Amount = Field(default=0.0, description="Disk, GB.")
    gpu: Amount = Field(
        default=0.0,
        description="GPU memory, GB. Without resources.devices the GPUs that NVML finds are leased if their memory "
        "sums up to it, within 10 %; otherwise one lease at a time gets all of it.",
    )
    devices: list[DeviceSection] = Field(
        default=[], description="One table per GPU. With them, a lease gets whole GPUs, and a job sees only its own."
    )
    default: DefaultResourcesSection = Field(
        default=DefaultResourcesSection(),
        description="What a job gets of a resource that it asked none of, or less if less is free.",
    )

    @model_validator(mode="after")
    def _fits_devices(self) -> ResourcesSection:
        indices = [device.index for device in self.devices]
        if len(set(indices)) < len(indices):
            raise ValueError("devices: an index is listed twice")
        memory = sum(device.memory for device in self.devices)
        if self.devices and self.gpu and abs(memory - self.gpu) > 0.01 * memory:
            raise ValueError(f"gpu is {self.gpu:g} GB and the devices have {memory:g} GB: leave gpu out or correct it")
        return self


class StrategySection(Section):
    """``[offer.strategy]``, the older form of the key."""

    type: Strategy = Field(description="flexible or whole.")


class OfferSection(Section):
    """``[offer]``."""

    price: Price = Field(default=100.0, description="Price of this worker, in tokens per lease-hour, at most 1e9.")
    floor: Price = Field(default=0.0, description="Bids below this get no offer.")
    strategy: Strategy | StrategySection = Field(
        default="flexible",
        description="flexible: offer what is requested, at the bid. whole: offer everything at once.",
    )
    evaluation: EvaluationName = Field(
        default="profit", description="Which request wins when several compete: profit, utilization or affinity."
    )
    schedulers: list[PeerText] = Field(
        default=[], description="Peer ids of the only schedulers that get offers; empty: all."
    )
    prefer: list[PreferredText] = Field(
        default=[],
        description="Peer ids of schedulers and names of executors whose requests are preferred, the most preferred "
        "first: before the price with affinity, between equal prices otherwise. Excludes nobody.",
    )
    max_offers: Limit = Field(default=None, description="Live offers to one scheduler at the same time.")
    max_leases: Limit = Field(default=None, description="Leases of one scheduler, live offers to it included.")
    max_jobs: Limit = Field(default=None, description="Running jobs of one scheduler.")
    idle_lease: float = Field(
        default=IDLE_LEASE, gt=0, allow_inf_nan=False, description="Seconds without a job after which a lease ends."
    )
    temporary_lease: float = Field(
        default=TEMPORARY_LEASE,
        ge=0.1,
        le=MAX_TEMPORARY_LEASE,
        allow_inf_nan=False,
        description="Seconds for which an offer is reserved, 0.1 to 2; two round trips to the scheduler are added, up "
        "to 2 s in all.",
    )

    def policy(self) -> OfferPolicy:
        """Return the owner's prices and preferences."""
        return OfferPolicy(
            price=self.price,
            floor=self.floor,
            strategy=self.strategy if isinstance(self.strategy, str) else self.strategy.type,
            evaluation=self.evaluation,
            schedulers=tuple(map(PeerId.parse, self.schedulers)),
            prefer=tuple(PeerId.parse(text) if text.startswith(_PEER_ID_START) else text for text in self.prefer),
            quota=self._quota(),
        )

    def lease_terms(self) -> LeaseTerms:
        """Return the owner's terms for leases."""
        return LeaseTerms(self.temporary_lease, self.idle_lease, self._quota())

    def _quota(self) -> Quota:
        return Quota(self.max_offers, self.max_leases, self.max_jobs)


_DESCRIPTORS: Final[Mapping[str, type[ExecutorDescriptor]]] = {"train": TrainExecutor, "aggregate": AggregateExecutor}


class ExecutorSection(Section):
    """``[[executors]]``."""

    job_class: ExecutorClassName = Field(
        alias="class",
        description="What it runs: train for training jobs (and tasks), aggregate for the parameter server, inference "
        "for batch inference; any other name, such as shell, for tasks of jobs that ask for it.",
    )
    name: ExecutorName = Field(description="Name by which schedulers ask for it, such as diloco-transformer.")
    runtime: RuntimeName = Field(
        default="process",
        description=" ".join(f"{name}: {entry.summary}." for name, entry in RUNTIMES.items()),
    )
    cmd: str | None = Field(default=None, description="The command of a process.")
    args: list[str] = Field(
        default=[], description="Its arguments; {SOCKET_PATH}, {WORK_DIR}, {JOB_JSON} and {JOB_FILE} are filled in."
    )
    env: dict[str, str] = Field(
        default={}, description="Environment variables of a process, in addition to those that it gets in any case."
    )
    network: bool = Field(
        default=True, description="Whether a process may use the network; it reaches its job bridge in any case."
    )
    readable: list[Path] = Field(
        default=[],
        description="Files and folders that a process may read, in addition to the system's, its program's and those "
        "that args and env name by absolute paths.",
    )
    writable: list[Path] = Field(
        default=[], description="Files and folders that a process may also change, such as ~/.cache/uv."
    )

    sharded: bool = Field(
        default=False,
        description="Whether it distributes one model over several GPUs, as with device_map or FSDP. Only then may a "
        "lease for it have the GPU memory that was requested on several GPUs.",
    )

    @model_validator(mode="after")
    def _fits_runtime(self) -> ExecutorSection:
        check_executor(self.runtime, self.job_class, self.settings)
        return self

    @property
    def settings(self) -> ExecutorSettings:
        """The keys that its runtime interprets."""
        return ExecutorSettings(
            self.cmd,
            tuple(self.args),
            self.env,
            self.network,
            tuple(path.expanduser().absolute() for path in self.readable),
            tuple(path.expanduser().absolute() for path in self.writable),
        )

    @property
    def is_installed(self) -> bool:
        """Whether its command, if it has one, is found on the path on which a process of it is sought."""
        return self.cmd is None or shutil.which(self.cmd, path=self.env.get("PATH")) is not None

    @property
    def kind(self) -> str:
        """Its class and name, by which tasks ask for it: ``shell/render``."""
        return f"{self.job_class}/{self.name}"

    @property
    def descriptor(self) -> ExecutorDescriptor | None:
        """The descriptor of the jobs that it runs, or None if it runs tasks only."""
        made = _DESCRIPTORS.get(self.job_class)
        return None if made is None else made(name=self.name)

    @property
    def task_descriptors(self) -> tuple[ExecutorDescriptor, ...]:
        """The descriptors by which it is requested for tasks: with its class and without; none if it runs none."""
        if not find_runtime(self.runtime).runs_tasks:
            return ()
        return task_executor(self.kind), task_executor(self.name)


class ConnectorsSection(Section):
    """``[connectors]``: what jobs may access."""

    hosts: list[str] = Field(default=[], description="Hosts for http and https; * matches anything in a name.")
    repositories: list[str] = Field(default=["*"], description="Hugging Face repositories, such as my-org/*.")
    roots: list[Path] = Field(default=[], description="Folders whose files jobs may read by file: URLs.")
    buckets: list[str] = Field(default=[], description="S3 buckets.")
    s3_endpoint: str | None = Field(default=None, description="URL of the S3 service.")
    s3_access_key: str | None = Field(default=None, description="Key id for S3.")
    s3_secret_key: str | None = Field(default=None, description="Secret key for S3.")


class CacheSection(Section):
    """``[cache]``."""

    path: Path | None = Field(default=None, description="Folder where slices and models are kept between jobs.")
    max_size: Amount | None = Field(default=None, description="Size of the cache, GB.")


class LogsSection(Section):
    """``[logs]``."""

    max_size: float = Field(
        default=10.0,
        ge=0.01,
        allow_inf_nan=False,
        description="Size of one log, the output of a job's or task's process, MB. Newer output replaces the older "
        "half of it.",
    )
    keep: int = Field(default=100, ge=0, description="Number of logs of ended jobs and tasks that are kept.")


_UNSUPPORTED_KEYS = {
    "connectors.buckets": "resources are not fetched from S3 yet",
    "connectors.s3_endpoint": "resources are not fetched from S3 yet",
    "connectors.s3_access_key": "resources are not fetched from S3 yet",
    "connectors.s3_secret_key": "resources are not fetched from S3 yet",
    "cache.path": "slices and models are not kept between jobs yet",
    "cache.max_size": "slices and models are not kept between jobs yet",
}


class IsolationSection(Section):
    """``[isolation]``."""

    require: list[LayerName] = Field(
        default=[],
        description="Layers without which the worker does not start: cgroup, bubblewrap, own-uid, landlock, "
        "supervisor, rlimits. hypha-worker probe tells which work.",
    )
    disable: list[LayerName] = Field(
        default=[], description="Layers that are not used, for a machine on which one causes trouble."
    )

    @model_validator(mode="after")
    def _consistent(self) -> IsolationSection:
        if both := sorted(set(self.require) & set(self.disable)):
            raise ValueError(f"{both[0]} is both required and disabled: remove it from require or from disable")
        return self


class WorkerConfig(NodeConfig):
    """The keys of ``hypha-worker``."""

    unsupported_keys: ClassVar[Mapping[str, str]] = {**UNSUPPORTED_KEYS, **_UNSUPPORTED_KEYS}

    work_dir: Path = Field(description="Each job gets a private folder hypha-<uuid> in it. Should have mode 0750.")
    drain_timeout: float = Field(
        default=60.0,
        ge=0,
        le=MAX_DRAIN,
        allow_inf_nan=False,
        description="Seconds that running jobs have to end after SIGTERM or hypha-worker drain.",
    )
    resources: ResourcesSection = Field(default=ResourcesSection(), description="What this worker offers.")
    offer: OfferSection = Field(default=OfferSection(), description="Prices and preferences for offers.")
    executors: list[ExecutorSection] = Field(default=[], description="The executors that run jobs.")
    connectors: ConnectorsSection = Field(default=ConnectorsSection(), description="What jobs may access.")
    cache: CacheSection = Field(default=CacheSection(), description="What is kept between jobs.")
    isolation: IsolationSection = Field(
        default=IsolationSection(), description="The layers that keep jobs from the machine and from each other."
    )
    logs: LogsSection = Field(default=LogsSection(), description="The output of jobs, in work_dir/logs.")

    @field_validator("executors")
    @classmethod
    def _named_once(cls, value: list[ExecutorSection]) -> list[ExecutorSection]:
        kinds = [executor.kind for executor in value]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"executor {next(kind for kind in kinds if kinds.count(kind) > 1)} is listed twice")
        return value

    def capabilities(self) -> Capabilities:
        """Return what this worker can offer."""
        owned = self.resources
        amounts = Resources(gpu=owned.gpu, cpu=owned.cpu, storage=owned.storage, memory=owned.memory)
        given = owned.default
        defaults = Resources(gpu=given.gpu, cpu=given.cpu, storage=given.storage, memory=given.memory)
        sharded: dict[ExecutorDescriptor, bool] = {}
        for entry in self.executors:
            for descriptor in (entry.descriptor, *entry.task_descriptors):
                if descriptor is not None:
                    sharded.setdefault(descriptor, entry.sharded)  # the first of a name runs its tasks
        spreading = frozenset(descriptor for descriptor, is_sharded in sharded.items() if is_sharded)
        return Capabilities(Capacity(amounts, self.listed_devices()), frozenset(sharded), defaults, spreading)

    def listed_devices(self) -> tuple[Device, ...]:
        """Return the GPUs that the configuration lists."""
        return tuple(Device(device.index, device.memory) for device in self.resources.devices)

    def log_folder(self) -> LogFolder:
        """Return where the output of processes is stored."""
        return LogFolder(self.work_dir / LOGS, int(self.logs.max_size * 1e6), self.logs.keep)

    def config_warnings(self) -> list[str]:
        """See `NodeConfig.config_warnings`."""
        found = super().config_warnings()
        if not self.executors:
            found.append("no [[executors]] are configured: this worker will get no jobs")
        if self.resources == ResourcesSection(default=self.resources.default):
            found.append("[resources] offers nothing: this worker will get no jobs")
        for number, executor in enumerate(self.executors):
            if not executor.is_installed:
                found.append(
                    f"executors[{number}].cmd: {executor.cmd!r} is not found, and its jobs would fail: install it, or "
                    "write its absolute path"
                )
        names = {executor.name for executor in self.executors}
        for text in self.offer.prefer:
            if text not in names and not text.startswith(_PEER_ID_START):
                found.append(f"offer.prefer: {text!r} is neither a peer id nor the name of one of the [[executors]]")
        return found
