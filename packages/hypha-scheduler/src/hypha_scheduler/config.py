"""Configuration of the scheduler daemon (TOML), on top of the settings that all nodes have."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from hypha_net.node.config.models import NodeConfig
from hypha_scheduler.job_config import JobConfig, Table, not_yet


class DashboardTable(Table):
    """``[dashboard]``."""

    listen: str | None = Field(
        default=None,
        description="host:port of the dashboard. Not supported yet: refused if set.",
    )

    @model_validator(mode="after")
    def _none_yet(self) -> DashboardTable:
        if self.listen is not None:
            raise not_yet("dashboard.listen", "leave it out and read metrics.jsonl in the job's directory")
        return self


class SchedulerTable(Table):
    """``[scheduler]``."""

    job: JobConfig | None = Field(default=None, description="One job to run.")
    jobs: tuple[JobConfig, ...] = Field(default=(), description="Several jobs, run one after the other.")
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
    dashboard: DashboardTable = Field(default=DashboardTable(), description="Dashboard.")
    scheduler: SchedulerTable = Field(default=SchedulerTable(), description="Jobs to run.")

    @property
    def jobs(self) -> tuple[JobConfig, ...]:
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
