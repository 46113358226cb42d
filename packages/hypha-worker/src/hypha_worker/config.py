"""The worker's configuration: every key, its checks, and the values that other modules are built from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hypha_net.node.config.models import Network, NodeConfig, S3ServiceSection, Section
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import GIGABYTE, Resources
from hypha_worker.bidding.policy import PEER_ID_START, OfferSection
from hypha_worker.content_cache import ContentCache
from hypha_worker.executors.runtimes import ExecutorSection, command_not_found
from hypha_worker.leasing.capacity import Capabilities, Capacity, GpuCapacity
from hypha_worker.leasing.terms import MAX_DRAIN
from hypha_worker.logs.run_log import LOGS, LogFolder

LayerName = Literal["cgroup", "bubblewrap", "own-uid", "landlock", "supervisor", "rlimits"]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DeviceSection(Section):
    """``[[resources.devices]]``."""

    index: int = Field(ge=0, description="Index of the GPU in the driver's order.")
    memory: Amount = Field(description="Its memory, GB.")


class DefaultResourcesSection(Section):
    """``[resources.default]``."""

    cpu: Amount | None = Field(default=None, description="Cores; if unset, 1, and with offer.oversubscribe none.")
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


def not_installed(number: int, executor: ExecutorSection) -> str:
    """Return that the command of an executor, the table of this number, is not found."""
    return f"executors[{number}], {executor.kind}: its command {command_not_found(str(executor.cmd))}"


class ConnectorsSection(S3ServiceSection):
    """``[connectors]``: what jobs may access."""

    hosts: list[str] = Field(default=[], description="Hosts for http and https; * matches anything in a name.")
    networks: list[Network] = Field(
        default=[],
        description="Networks that are not public (private, link-local, loopback) and may be reached by http and https "
        "all the same, such as 10.1.0.0/16. A host that is itself a numeric address needs no entry here.",
    )
    repositories: list[str] = Field(default=["*"], description="Hugging Face repositories, such as my-org/*.")
    roots: list[Path] = Field(default=[], description="Folders whose files jobs may read by file: URLs.")
    buckets: list[str] = Field(default=[], description="S3 buckets, such as my-*.")

    @model_validator(mode="after")
    def _buckets_have_a_service(self) -> ConnectorsSection:
        if self.buckets and self.s3_endpoint is None and self.s3_region is None:
            raise ValueError("buckets are listed, and neither s3_region nor s3_endpoint is set: set one of them")
        return self


class CacheSection(Section):
    """``[cache]``."""

    path: Path | None = Field(
        default=None,
        description="Folder, of this worker alone, where slices, models and other resources are kept between jobs; if "
        "unset, nothing is kept.",
    )
    max_size: Amount | None = Field(
        default=None,
        description="GB, by default a tenth of resources.storage; the least recently used is removed.",
    )

    @model_validator(mode="after")
    def _has_a_folder(self) -> CacheSection:
        if self.path is None and self.max_size is not None:
            raise ValueError("max_size is set and path is not: set path, or neither for no cache")
        return self


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

    @field_validator("executors")
    @classmethod
    def _shows_nothing_that_jobs_change(cls, value: list[ExecutorSection]) -> list[ExecutorSection]:
        """Refuse `readable` in a folder where a job may put a link to what it must not see."""
        writable = [path for executor in value for path in executor.writable]
        for executor in value:
            for path in executor.readable:
                if folder := next((each for each in writable if path.resolve().is_relative_to(each.resolve())), None):
                    raise ValueError(
                        f"readable = {str(path)!r} of executor {executor.kind} lies in {folder}, where jobs write: "
                        "a link that one leaves there would be followed; name a path outside of writable folders"
                    )
        return value

    @model_validator(mode="after")
    def _cache_is_the_workers_own(self) -> WorkerConfig:
        """Refuse a cache that jobs could change, or that lies among their folders."""
        if self.cache.path is None:
            return self
        if not self.cache_size:
            raise ValueError(
                "cache.path: the cache has no room: set cache.max_size, or resources.storage, of which it gets a tenth"
            )
        cache = self.cache.path.resolve()
        writable = [path.resolve() for executor in self.executors for path in executor.writable]
        for folder in (self.work_dir.resolve(), *writable):
            if cache.is_relative_to(folder) or folder.is_relative_to(cache):
                raise ValueError(
                    f"cache.path {self.cache.path} and {folder}, where jobs write, lie within each other: name a "
                    "folder outside of work_dir and of what executors may write"
                )
        return self

    def capabilities(self) -> Capabilities:
        """Return what this worker can offer."""
        owned = self.resources
        devices = tuple(GpuCapacity(device.index, device.memory) for device in owned.devices)
        amounts = Resources(gpu=owned.gpu, cpu=owned.cpu, storage=owned.storage, memory=owned.memory)
        given, cores = owned.default, owned.default.cpu
        if cores is None:
            cores = 0.0 if self.offer.oversubscribe else 1.0
        defaults = Resources(gpu=given.gpu, cpu=cores, storage=given.storage, memory=given.memory)
        sharded: dict[ExecutorDescriptor, bool] = {}
        for entry in self.executors:
            for descriptor in entry.descriptors:
                sharded.setdefault(descriptor, entry.sharded)  # the first of a name runs its tasks
        spreading = frozenset(descriptor for descriptor, is_sharded in sharded.items() if is_sharded)
        return Capabilities(Capacity(amounts, devices), frozenset(sharded), defaults, spreading)

    def make_cache(self) -> ContentCache | None:
        """Return the cache, which is not open yet; None without one."""
        return None if self.cache.path is None else ContentCache(self.cache.path.absolute(), self.cache_size)

    @property
    def cache_size(self) -> int:
        """Bytes that the cache may have."""
        gigabytes = self.resources.storage / 10 if self.cache.max_size is None else self.cache.max_size
        return int(gigabytes * GIGABYTE)

    def private_paths(self) -> list[Path]:
        """Return the files and folders that no job may see."""
        cache = [] if self.cache.path is None else [self.cache.path]
        return [path.absolute() for path in (self.work_dir, self.key_pem, *cache)]

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
                found.append(not_installed(number, executor))
        names = {executor.name for executor in self.executors}
        for text in self.offer.prefer:
            if text not in names and not text.startswith(PEER_ID_START):
                found.append(f"offer.prefer: {text!r} is neither a peer id nor the name of one of the [[executors]]")
        return found
