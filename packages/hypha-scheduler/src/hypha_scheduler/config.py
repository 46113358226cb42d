"""Configuration of the scheduler daemon (TOML), on top of the settings that all nodes have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from hypha_net.node.config.models import NodeConfig
from hypha_proto.offers import MAX_OFFER_LIFE
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig, Table, not_yet

Weight = Annotated[float, Field(ge=0, le=1e6)]


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


class AuctionTable(Table):
    """``[scheduler.auction]``: how offers of workers are chosen; the weights value one unit of each resource."""

    decision_window: float = Field(
        default=0.25,
        ge=0,
        le=MAX_OFFER_LIFE,
        description="Seconds from the first acceptable offer until the best are chosen, or less if offers end before.",
    )
    gpu: Weight = Field(default=25.0, description="Weight of a GB of GPU memory.")
    cpu: Weight = Field(default=1.0, description="Weight of a core.")
    memory: Weight = Field(default=0.1, description="Weight of a GB of memory.")
    storage: Weight = Field(default=0.01, description="Weight of a GB of storage.")


class SchedulerTable(Table):
    """``[scheduler]``."""

    job: DilocoJobConfig | None = Field(default=None, description="One job to run.")
    jobs: tuple[DilocoJobConfig, ...] = Field(default=(), description="Several jobs, run one after the other.")
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
    dashboard: DashboardTable = Field(default=DashboardTable(), description="Dashboard.")
    scheduler: SchedulerTable = Field(default=SchedulerTable(), description="Jobs to run.")

    @property
    def jobs(self) -> tuple[DilocoJobConfig, ...]:
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
