"""Configuration of the scheduler daemon (TOML), on top of the settings that all nodes have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Optional, Union

from pydantic import ConfigDict, Field, ValidationInfo, WrapValidator, create_model

from hypha_net.node.config.models import Network, NodeConfig, S3ServiceSection
from hypha_scheduler.allocation.auction import AuctionTable
from hypha_scheduler.errors import JobRefusedError
from hypha_scheduler.jobs.config import MODEL_COMMAND, JobTable, Table
from hypha_scheduler.strategies.registry import DEFAULT_TYPE, built_in_types, load_strategy, parse_job


def _validate_job(value: Any, _handler: object, info: ValidationInfo) -> JobTable | None:
    """Validate the table of a job with the model of its type."""
    return None if value is None else parse_job(value, info.data.get("strategies"))


def _job_annotation(tables: Sequence[type[JobTable]]) -> Any:
    """Return the annotation of a job of one of several types; the table's `type` says which."""
    return Annotated[Union[tuple(tables)], WrapValidator(_validate_job)]  # noqa: UP007 - of a sequence


if TYPE_CHECKING:
    Job = JobTable
else:
    Job = _job_annotation([load_strategy(name).job_table for name in built_in_types()])


class ConnectorsTable(S3ServiceSection):
    """``[scheduler.connectors]``: what this scheduler itself fetches models and preprocessors with."""

    model_config = ConfigDict(frozen=True)

    networks: tuple[Network, ...] = Field(
        default=(),
        description="Networks that are not public (private, link-local, loopback) and may be reached by http and https "
        "all the same, such as 10.1.0.0/16.",
    )


class QueueTable(Table):
    """``[scheduler.queue]``: how many submitted jobs run and wait."""

    max_running: int | None = Field(
        default=None,
        ge=1,
        description="Jobs that run at a time; further submitted ones wait for their turn, in their order. If unset, "
        "every job seeks workers at once, and those that get them run.",
    )
    max_waiting: int = Field(
        default=100, ge=1, le=10_000, description="Submitted jobs that wait for their turn or for their first workers."
    )


class SchedulerTable(Table):
    """``[scheduler]``."""

    strategies: tuple[str, ...] | None = Field(
        default=None, description="Strategies that may be loaded; if unset, all that are installed."
    )
    model_command: tuple[str, ...] = Field(
        default=MODEL_COMMAND,
        min_length=1,
        description="Program, and its first arguments, that creates the start model of a job with model.config; it is "
        "looked for beside the scheduler's Python and on the search path.",
    )
    job: Job | None = Field(default=None, description="One job to run.")
    jobs: tuple[Job, ...] = Field(default=(), description="Several jobs, run one after the other.")
    connectors: ConnectorsTable = Field(
        default=ConnectorsTable(), description="What models and preprocessors of jobs are fetched with."
    )
    queue: QueueTable = Field(default=QueueTable(), description="How many submitted jobs run and wait.")
    auction: AuctionTable = Field(default=AuctionTable(), description="How offers of workers are chosen.")
    status_bridge: str | None = Field(
        default=None, description="The same as status_bridge at the top level, which it overrides."
    )
    output_dir: Path | None = Field(
        default=None, description="The same as output_dir at the top level, which it overrides."
    )


class SchedulerConfig(NodeConfig):
    """Complete configuration of a scheduler."""

    status_bridge: str | None = Field(
        default=None, description="host:port of a metrics bridge: JSON is posted to http://<status_bridge>/status."
    )
    output_dir: Path = Field(
        default=Path("runs"), description="Directory for results; a job writes to output_dir/<job id>."
    )
    scheduler: SchedulerTable = Field(default=SchedulerTable(), description="Jobs to run.")

    @property
    def jobs(self) -> tuple[JobTable, ...]:
        """All configured jobs, in the order in which they run."""
        first = () if self.scheduler.job is None else (self.scheduler.job,)
        return first + self.scheduler.jobs

    @property
    def bridge_address(self) -> str | None:
        """``host:port`` to which metrics are posted, if any."""
        return self.scheduler.status_bridge or self.status_bridge

    @property
    def runs_dir(self) -> Path:
        """Absolute path of the directory in which jobs leave their results."""
        return (self.scheduler.output_dir or self.output_dir).resolve()

    def config_warnings(self) -> list[str]:
        """See `NodeConfig.config_warnings`."""
        own = [f"scheduler.job.{line}" for line in (self.scheduler.job.warnings() if self.scheduler.job else ())]
        numbered = enumerate(self.scheduler.jobs)
        return [
            *super().config_warnings(),
            *own,
            *(f"scheduler.jobs[{number}].{line}" for number, job in numbered for line in job.warnings()),
        ]

    @classmethod
    def for_document(cls, data: dict[str, Any]) -> type[SchedulerConfig]:
        """Return the model that also knows the job tables of third parties' strategies that a file uses."""
        own = built_in_types()
        scheduler = data.get("scheduler")
        plain = scheduler if isinstance(scheduler, dict) else {}
        names = dict.fromkeys(name for name in _job_types(plain) if name not in own)
        tables = list(_tables(names, plain.get("strategies")))
        if not tables:
            return cls
        job = _job_annotation([*(load_strategy(name).job_table for name in own), *tables])
        fields = SchedulerTable.model_fields
        changed: dict[str, Any] = {
            "job": (Optional[job], fields["job"]),  # noqa: UP045 - a value, not an annotation
            "jobs": (GenericAlias(tuple, (job, ...)), fields["jobs"]),
        }
        table = create_model("SchedulerTable", __base__=SchedulerTable, **changed)
        return create_model("SchedulerConfig", __base__=cls, scheduler=(table, Field(default=table())))


def _job_types(scheduler: dict[str, Any]) -> Iterator[str]:
    """Yield the types that the jobs of a table name; malformed jobs are refused later."""
    jobs = scheduler.get("jobs")
    for job in (scheduler.get("job"), *(jobs if isinstance(jobs, list) else ())):
        name = job.get("type", DEFAULT_TYPE) if isinstance(job, dict) else None
        if isinstance(name, str):
            yield name


def _tables(names: Sequence[str] | dict[str, None], allowed: Any) -> Iterator[type[JobTable]]:
    """Yield the job tables of types that can be loaded; the validation of the job names the others."""
    listed = allowed if isinstance(allowed, list) else None
    for name in names:
        try:
            yield load_strategy(name, listed).job_table
        except JobRefusedError:
            continue
