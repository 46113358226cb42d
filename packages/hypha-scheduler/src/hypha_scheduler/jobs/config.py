"""Job tables: what the tables of all strategies are built from.

A job is ``[scheduler.job]``, a table of ``[[scheduler.jobs]]``, or the TOML given to the command `submit`. Each
strategy has a model of its own for it, a subclass of `JobTable`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from hypha_net.connectors.s3_source import s3_uri
from hypha_net.node.config.introspection import suggest_name
from hypha_net.node.config.models import Section
from hypha_net.redaction import shown_url
from hypha_proto.datasets import MANIFEST
from hypha_proto.job_spec import PREPROCESSOR_INPUTS, PREPROCESSOR_TASKS, TASKS
from hypha_proto.resources import Resources
from hypha_proto.texts import shorten
from hypha_proto.wire_schema import MAX_PRICE
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.jobs.source_tables import Content, FileName, S3Table, Sha256, Url

ALIASES: Final = {"vision-classification": "image-classification"}
"""Names of model types in job files, and their wire names."""
_LABELS: Final = "labels"
VISION_INPUTS: Final = ("pixel_values", _LABELS)
_TEXT_INPUTS: Final = ("input_ids", "attention_mask", _LABELS)
_CAUSAL: Final = "causal-lm"
_CERTAIN: Final = (_CAUSAL, "masked-lm", "seq2-seq-lm", "sequence-classification", "token-classification",
                   "question-answering", "image-classification", "semantic-segmentation")  # fmt: skip
"""Types whose models take the first of `ModelTable.inputs`, and to train labels; others depend on the architecture."""
MAX_AMOUNT: Final = 1e9
"""GB, or cores."""
MAX_SECONDS: Final = 31 * 86400.0
"""Of a timeout or pause in a job."""
MAX_WORKERS: Final = 10_000
"""Of one job."""
_MAX_LEARNING_RATE: Final = 100.0
"""Far above what trains anything; a larger one is a slip, such as a wrong exponent."""
_MAX_NORM: Final = 1e9
MAX_U32: Final = (1 << 32) - 1
_MAX_SEED: Final = (1 << 63) - 1
_Beta = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=_MAX_LEARNING_RATE)]


ALLOCATION_TIMEOUT: Final = 60.0
"""Default of `JobTable.allocation_timeout`."""


MODEL_COMMAND: Final = ("hypha-accelerate-executor", "create-model")
"""Default of ``scheduler.model_command``."""


_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


_MAX_TOKENS: Final = 1e15


Budget = Annotated[
    float | None,
    Field(
        gt=0,
        le=_MAX_TOKENS,
        description="Maximum tokens that the job's leases may cost in all. The job is cancelled before they cost more, "
        "while 15 s of all of them are left.",
    ),
]
"""Annotation of a job's budget."""


class Table(Section):
    """Base class of the scheduler's TOML tables."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class JobTable(Table):
    """Base class of the job tables of strategies. A subclass restricts `type` to the names that it is registered by."""

    type: str = Field(description="Strategy.")
    name: str | None = Field(
        default=None,
        pattern=_NAME,
        description="Name by which commands find the job, besides its id: up to 63 letters, digits, dots, hyphens and "
        "underscores, of which the first is a letter or digit.",
    )

    def span_attributes(self) -> dict[str, str]:
        """Return what the span of the job says about it."""
        return {}

    def missing_files(self) -> list[str]:
        """Return what is wrong with the local files that the job names, one line each."""
        return []

    def warnings(self) -> list[str]:
        """Return what the job's owner should know before it runs, one line each: which secrets its workers get."""
        tables = {name: getattr(self, name) for name in type(self).model_fields}
        return [
            token_warning(name)
            for name, table in tables.items()
            if isinstance(table, ArtifactTable) and table.repository and table.token and table.serve is False
        ]

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Datasets that data nodes must announce before the job can run."""
        return ()

    def dataset_faults(self, dataset: DatasetView) -> list[str]:
        """Return why the job cannot use one of its datasets, one line each with the remedy."""
        return []

    @property
    def planned_steps(self) -> int | None:
        """Number of steps, such as rounds of training, after which the job ends; None if it is not known."""
        return None

    @property
    def allocation_timeout(self) -> float:
        """Seconds to find the workers without which the job cannot begin."""
        return ALLOCATION_TIMEOUT

    @property
    def token_budget(self) -> float | None:
        """Tokens that the job's leases may cost in all; None for no limit."""
        return None

    @property
    def orphan_grace_seconds(self) -> float:
        """Seconds for which tasks run on when this scheduler is gone; 0 if they end with their leases.

        If it is started again within this time, it takes the job up with these tasks (`Operator.on_tasks_adopted`).
        """
        return 0.0


def token_warning(table: str) -> str:
    """Return the warning about a hub token of a table that workers get."""
    return (
        f"{table}.token is handed to every worker that this job leases, also to those of other owners, since any "
        f"worker that this network's certificates admit may make the best offer: leave {table}.serve out, so that "
        "this scheduler serves the files, or use a token that reads this repository only"
    )


SERVE: Final = (
    "By default it does if token is set, or if this machine has a token of the hub (HF_TOKEN, hf auth login) and the "
    "repository cannot be read without one."
)
"""Description of the default of `ArtifactTable.serve`."""


class SourceTable(Table):
    """Files of a directory here or that workers share, or packed into one file elsewhere."""

    sources: ClassVar[tuple[str, ...]] = ("path", "file", "s3", "uri", "dht")
    """Keys of which exactly one is set."""
    path: Path | None = Field(default=None, description="Local directory, served to the workers by this scheduler.")
    file: Path | None = Field(
        default=None,
        description="Directory of a file system that this scheduler and the workers share, under the same path and a "
        "root that the workers' owners allow.",
    )
    s3: S3Table | None = Field(
        default=None, description="Object of an S3 bucket: a tar archive of the files, not compressed."
    )
    uri: Url | None = Field(
        default=None,
        description="URL of such an archive: https://, http://, file:///, s3://bucket/key or sha256:<64 hex digits>.",
    )
    dht: Sha256 | None = Field(
        default=None, description="SHA-256 of such an archive, which hypha-data provide announces."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(getattr(self, key) is not None for key in self.sources) != 1:
            raise ValueError(f"set one of {', '.join(self.sources)}")
        if self.file is not None and (not self.file.is_absolute() or ".." in self.file.parts):
            raise ValueError(f"file: {str(self.file)!r} is not an absolute path without ..: write it as workers see it")
        return self

    @property
    def source(self) -> str:
        """Key of `sources` that is set."""
        return next(key for key in self.sources if getattr(self, key) is not None)

    @property
    def remote_uri(self) -> str | None:
        """URI of the file that `s3`, `uri` or `dht` names."""
        if self.s3 is not None:
            return s3_uri(self.s3.bucket, self.s3.key)
        return self.uri if self.dht is None else f"sha256:{self.dht}"

    @property
    def directory(self) -> Path | None:
        """Directory of the files at this scheduler, if they are there."""
        return self.file if self.path is None else self.path


class RepositoryTable(SourceTable):
    """Files of a repository on a hub, or as of `SourceTable`."""

    content: ClassVar[Content] = "files"
    """What the files are."""
    sources = ("repository", *SourceTable.sources)
    repository: str | None = Field(default=None, description="Hugging Face repository, such as owner/name.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the repository.")
    token: SecretStr | None = Field(
        default=None, description="Access token of the hub. Workers get it with serve = false only."
    )


class ArtifactTable(RepositoryTable):
    """Files that workers fetch, or that this scheduler serves to them."""

    filenames: tuple[FileName, ...] = Field(
        default=(),
        description="Files to use; if empty, all that belong to the model or preprocessor. If set, those of file are "
        "served by this scheduler.",
    )
    serve: bool | None = Field(
        default=None,
        description="Whether this scheduler downloads the files of repository and serves them to the workers, which "
        f"then need no access to the hub and get no token, or those of file, s3, uri or dht. {SERVE} The files of path "
        "are always served.",
    )

    @model_validator(mode="after")
    def _has_use_for_names(self) -> Self:
        if self.remote_uri is not None and self.filenames:
            raise ValueError(f"filenames: the files are those of the archive that {self.source} names: leave it out")
        return self


def _default_inputs(task: str) -> tuple[str, ...]:
    return VISION_INPUTS if "image" in task or "segmentation" in task else _TEXT_INPUTS


class ModelTable(ArtifactTable):
    """``[.model]``."""

    content = "model"
    type: str = Field(description="vision-classification, causal-lm, torch, or a wire name such as masked-lm.")
    input_names: tuple[str, ...] = Field(
        default=(),
        description="Tensors of a slice that are inputs of the model, in order; if empty, those of the type.",
    )

    @model_validator(mode="after")
    def _known_type(self) -> ModelTable:
        if self.type not in ALIASES and self.type not in TASKS:
            raise ValueError(f"type: {self.type!r} is not a model type; known: {', '.join((*ALIASES, *TASKS))}")
        if self.type == "torch" and not self.input_names:
            raise ValueError('input_names: type = "torch" needs them: the tensors of a slice that your class takes')
        return self

    @property
    def task(self) -> str:
        """Wire name of the type."""
        return ALIASES.get(self.type, self.type)

    @property
    def inputs(self) -> tuple[str, ...]:
        """`input_names`, or the default inputs of the type."""
        if self.input_names:
            return self.input_names
        return _default_inputs(self.task)


class StartModelTable(ModelTable):
    """``[.model]`` of a job that trains; its directory may be a checkpoint of another job."""

    sources = (*ModelTable.sources, "config")
    config: Path | None = Field(
        default=None,
        description="config.json of a model, or a directory with it and the tokenizer's files: the job starts from "
        "random weights, which scheduler.model_command creates.",
    )
    seed: int | None = Field(
        default=None, ge=0, le=_MAX_SEED, description="Seed of the weights with config; if unset, that of the job."
    )

    @model_validator(mode="after")
    def _seed_has_a_use(self) -> StartModelTable:
        if self.seed is not None and self.config is None:
            raise ValueError("seed: it decides the weights of a model from config, which is not set")
        return self


class PreprocessorTable(ArtifactTable):
    """``[.preprocessor]``."""

    content = "preprocessor"
    type: str = Field(default="auto", description=f"One of {', '.join(PREPROCESSOR_TASKS)}.")
    input_names: tuple[str, ...] = Field(
        default=(), description="Tensors of a slice that are inputs of the preprocessor."
    )

    @model_validator(mode="after")
    def _can_be_fetched(self) -> PreprocessorTable:
        if self.type not in PREPROCESSOR_TASKS:
            raise ValueError(f"type: {self.type!r} is not one of {', '.join(PREPROCESSOR_TASKS)}")
        if self.repository is not None and not self.filenames:
            raise ValueError('filenames: name the preprocessor\'s files, such as ["preprocessor_config.json"]')
        return self


def preprocessor_task(model: ModelTable, preprocessor: PreprocessorTable | None) -> str:
    """Return the wire name of a preprocessor; derived from the model's inputs unless type or input names are set."""
    if preprocessor is None or preprocessor.type != "auto" or preprocessor.input_names:
        return preprocessor.type if preprocessor else "auto"
    return "image" if model.inputs[:1] == VISION_INPUTS[:1] else "tokenizer"


def lacking_columns(dataset: DatasetView, key: str, names: Sequence[str], remedy: str = "") -> list[str]:
    """Return a line for each column that `key` of a job names and a dataset lacks; none if it does not state any."""
    columns = names if dataset.columns is None else dataset.columns
    has = shorten(", ".join(columns), 400) or "none"
    return [
        f"{key}: dataset {dataset.name!r} has no column {name!r}; it has {has}{remedy}"
        for name in names
        if name not in columns
    ]


def lacking_inputs(
    model: ModelTable, preprocessor: PreprocessorTable | None, dataset: DatasetView, *, labelled: bool
) -> list[str]:
    """Return a line for each tensor without which an executor certainly cannot compute a sample of a dataset."""
    return [
        line
        for table, names in _needed_inputs(model, preprocessor, labelled=labelled)
        for line in lacking_columns(
            dataset, f"{table}.input_names", names, "; set it to columns of the dataset, or use another dataset"
        )
    ]


def _needed_inputs(
    model: ModelTable, preprocessor: PreprocessorTable | None, *, labelled: bool
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield tables with `input_names`, and the tensors that must be there by it."""
    named = model.input_names if model.input_names != _default_inputs(model.task) else ()
    taken: Sequence[str] = ()
    if preprocessor is not None:
        taken = preprocessor.input_names or PREPROCESSOR_INPUTS[preprocessor_task(model, preprocessor)]
        yield "preprocessor", taken
    elif model.task == "torch":
        yield "model", named[:1]  # further arguments of the class may have defaults
    elif named:
        yield "model", [name for name in named if labelled or name != _LABELS]
    elif model.task in _CERTAIN:
        yield "model", model.inputs[:1]
    # a preprocessor of several columns may make labels, too, and a causal model takes its tokens for them
    if labelled and not named and len(taken) < 2 and model.task in _CERTAIN and model.task != _CAUSAL:
        yield "model", (_LABELS,)


class DatasetTable(RepositoryTable):
    """``[.dataset]``: the name of a dataset of data nodes, or where the folder is that hypha-data prepare wrote.

    This scheduler fetches such a folder and serves its slices.
    """

    content = "dataset"
    sources = ("dataset", *RepositoryTable.sources)
    repository: str | None = Field(
        default=None,
        description="Hugging Face dataset repository, such as owner/name, whose root is what hypha-data prepare wrote.",
    )
    token: SecretStr | None = Field(default=None, description="Access token of the hub, which workers do not get.")
    dataset: str | None = Field(
        default=None, min_length=1, max_length=255, description="Name of the dataset, as data nodes announce it."
    )
    file: Path | None = Field(
        default=None, description="Directory of a shared file system, which this scheduler reads and serves too."
    )
    evaluation: str | None = Field(
        default=None, description="Name of the dataset for evaluation, as data nodes announce it."
    )

    @model_validator(mode="after")
    def _needs_no_signature(self) -> Self:
        if self.s3 is not None and self.s3.presigned:
            raise ValueError("s3.presigned: workers get the slices from this scheduler: leave it out")
        return self

    def name_in(self, job_id: uuid.UUID) -> str:
        """Return the name by which workers of a job ask for the dataset."""
        return self.dataset or f"{job_id}/dataset"

    @property
    def announced(self) -> tuple[str, ...]:
        """Datasets that data nodes must announce."""
        return tuple(dict.fromkeys(name for name in (self.dataset, self.evaluation) if name is not None))

    @property
    def shown(self) -> str:
        """Name, or where the dataset is, without secrets."""
        return self.dataset or self.repository or shown_url(self.remote_uri or str(self.directory))

    def missing_files(self) -> list[str]:
        """Return what is wrong with the local directory, one line at most."""
        if self.directory is None or (self.directory / MANIFEST).is_file():
            return []
        fault = f"{self.directory} holds no {MANIFEST} at the scheduler; hypha-data prepare writes one"
        return [f"dataset.{self.source}: {fault}"]


def dataset_by_name(value: Any) -> Any:
    """Accept the name of a dataset for its table."""
    return {"dataset": value} if isinstance(value, str) else value


class InnerOptimizerTable(Table):
    """``[.inner_optimizer]``: AdamW."""

    learning_rate: LearningRate = Field(description="Learning rate, up to 100.")
    betas: tuple[_Beta, _Beta] | None = Field(default=None, description="AdamW's betas.")
    epsilon: float | None = Field(default=None, gt=0, le=1, description="AdamW's epsilon, up to 1.")
    weight_decay: float | None = Field(default=None, ge=0, le=100, description="AdamW's weight decay, up to 100.")
    max_grad_norm: float | None = Field(
        default=None, gt=0, le=_MAX_NORM, description="Gradients are clipped to this norm, up to 1e9."
    )
    schedule: Literal["cosine-with-warmup", "linear-with-warmup", "wsd"] | None = Field(
        default=None,
        description="Learning-rate schedule: cosine-with-warmup, linear-with-warmup or wsd; if unset, a constant rate.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, le=MAX_U32, description="Steps of a worker during which the rate rises from zero."
    )
    total_steps: int | None = Field(
        default=None,
        gt=0,
        le=MAX_U32,
        description="Steps of a worker in the whole job; if unset, the average that follows from its rounds.",
    )
    decay_steps: int | None = Field(
        default=None, gt=0, le=MAX_U32, description="wsd: steps at the end during which the rate falls."
    )


class Requirement(Table):
    """Requirement on a worker: the minimum amount of a resource, or the name of an executor."""

    type: Literal["GPU", "CPU", "Memory", "Storage"] | None = Field(
        default=None, description="Resource: GPU, CPU, Memory or Storage."
    )
    min: float | None = Field(
        default=None,
        ge=0,
        le=MAX_AMOUNT,
        description="Minimum amount: GB for GPU, Memory and Storage, cores for CPU.",
    )
    kind: str | None = Field(default=None, min_length=1, description="Name of a required executor.")

    @model_validator(mode="after")
    def _says_something(self) -> Requirement:
        if (self.type is None) != (self.min is None):
            raise ValueError("type and min go together")
        if self.type is None and self.kind is None:
            raise ValueError("set type and min, or kind")
        return self


def _requirements(value: Any) -> Any:
    """Accept ``{gpu=, cpu=, memory=, storage=, kind=}`` for a list of requirements."""
    if not isinstance(value, dict):
        return value
    if "type" in value or "min" in value:
        return [value]
    names = {"gpu": "GPU", "cpu": "CPU", "memory": "Memory", "storage": "Storage"}
    known = [*names, "kind"]
    for key in value:
        if key not in known:
            raise ValueError(f"{str(key)!r} is not a key here; {suggest_name(str(key), Requirement, known)}")
    found = [{"type": names[key], "min": amount} for key, amount in value.items() if key in names]
    return found + [{"kind": value[key]} for key in value if key == "kind"]


Requirements = Annotated[tuple[Requirement, ...], BeforeValidator(_requirements)]


class PriceTable(Table):
    """Price of a worker in tokens per lease-hour."""

    bid: float = Field(default=100.0, ge=0, le=MAX_PRICE, description="Price that is published in requests, up to 1e9.")
    max: float = Field(
        default=100.0, ge=0, le=MAX_PRICE, description="Maximum price, up to 1e9; never sent. Offers above are refused."
    )

    @model_validator(mode="before")
    @classmethod
    def _max_is_at_least_the_bid(cls, value: Any) -> Any:
        if isinstance(value, dict) and "bid" in value and "max" not in value:
            return {**value, "max": max(100.0, value["bid"]) if isinstance(value["bid"], int | float) else 100.0}
        return value

    @model_validator(mode="after")
    def _ordered(self) -> PriceTable:
        if self.max < self.bid:
            raise ValueError(f"max ({self.max:g}) is less than bid ({self.bid:g}): raise max, or lower the bid")
        return self


def amounts(requirements: tuple[Requirement, ...]) -> Resources:
    """Return the required resources; of several amounts for one resource the largest counts."""
    found: dict[str, float] = {}
    for requirement in requirements:
        if requirement.type is not None and requirement.min is not None:
            key = requirement.type.lower()
            found[key] = max(found.get(key, 0.0), requirement.min)
    return Resources(**found)


def kinds(requirements: tuple[Requirement, ...], default: str) -> tuple[str, ...]:
    """Return the names of the required executors, or the default one if none is required."""
    return tuple(requirement.kind for requirement in requirements if requirement.kind is not None) or (default,)
