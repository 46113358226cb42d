"""Configuration of a data node (TOML)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from hypha_net.node.config.models import NodeConfig, Section
from hypha_proto.dataset_listing import MAX_NAME


class DatasetConfig(Section):
    """One ``[[datasets]]`` table."""

    name: str = Field(min_length=1, max_length=MAX_NAME, description="Name under which the dataset is announced.")
    path: Path = Field(description="Folder with the dataset's slices, safetensors or JSONL.")


class DataConfig(NodeConfig):
    """Configuration of a data node."""

    dataset_path: Path | None = Field(
        default=None, description="Folder of one dataset, announced under the folder's name."
    )
    datasets: list[DatasetConfig] = Field(default=[], description="Datasets with names of their own.")
    provide: list[Path] = Field(
        default=[], max_length=1000, description="Single files that are announced and served by their SHA-256."
    )
    verify: bool = Field(
        default=False,
        description="Read all slices at the start and check their digests, not only those that have changed since they "
        "were last read. The option `--verify` of `run` sets it.",
    )

    @model_validator(mode="after")
    def _has_datasets(self) -> DataConfig:
        names = [dataset.name for dataset in self.datasets]
        if self.dataset_path is not None:
            name = self.dataset_path.name
            if name in ("", "..") or len(name) > MAX_NAME:
                raise ValueError(f"dataset_path {self.dataset_path} gives no name: add [[datasets]] with name and path")
            names.append(name)
        if not names and not self.provide:
            raise ValueError("no dataset: set dataset_path, add [[datasets]] with name and path, or provide files")
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"dataset names must differ, these occur twice: {', '.join(sorted(twice))}")
        return self

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of the datasets, by name."""
        named = {dataset.name: dataset.path for dataset in self.datasets}
        return named if self.dataset_path is None else {self.dataset_path.name: self.dataset_path, **named}


class ListConfig(DataConfig):
    """Configuration of a data node as the command ``list`` reads it: it needs no dataset."""

    @model_validator(mode="after")
    def _has_datasets(self) -> ListConfig:
        return self
