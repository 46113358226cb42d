"""Job configuration: ``[scheduler.job]``, a table of ``[[scheduler.jobs]]``, or the TOML given to the command `submit`.

Keys of planned features exist already; setting one to a value that is not implemented is refused with "not yet", never
ignored. `submit` turns a job into role requests and job specs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hypha_net.node.config.introspection import suggest_key
from hypha_net.node.config.models import Section
from hypha_proto.job_spec import PREPROCESSOR_TASKS, TASKS
from hypha_proto.resources import Resources
from hypha_proto.wire_schema import MAX_PRICE

ALIASES: Final = {"vision-classification": "image-classification"}
"""Names of model types in job files, and their wire names."""
_INPUTS: Final = {"causal-lm": ("input_ids", "attention_mask", "labels")}
_VISION_INPUTS: Final = ("pixel_values", "labels")
_TEXT_INPUTS: Final = ("input_ids", "attention_mask", "labels")
_DEFAULT_BATCH: Final = 64
_U32: Final = (1 << 32) - 1
_MAX_LEARNING_RATE: Final = 100.0
"""Far above what trains anything; a larger one is a slip, such as a wrong exponent."""
_MAX_NORM: Final = 1e9
_MAX_SECONDS: Final = 31 * 86400.0
_MAX_AMOUNT: Final = 1e9
"""GB, or cores."""
_MAX_TOKENS: Final = 1e15
_MAX_WORKERS: Final = 10_000
_Beta = Annotated[float, Field(ge=0, lt=1)]
_LearningRate = Annotated[float, Field(gt=0, le=_MAX_LEARNING_RATE)]
_Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS)]


class NotYetError(ValueError):
    """Key set to a value of a feature that is not implemented."""


def not_yet(what: str, remedy: str) -> NotYetError:
    """Build the error for a feature that is not implemented."""
    return NotYetError(f"{what} is not yet supported; {remedy}")


class Table(Section):
    """Base class of the scheduler's TOML tables."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class ArtifactTable(Table):
    """Files from a repository on a Hugging Face hub or from a local directory."""

    repository: str | None = Field(default=None, description="Hugging Face repository, such as owner/name.")
    path: Path | None = Field(default=None, description="Local directory, served to the workers by this scheduler.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the repository.")
    filenames: tuple[str, ...] = Field(default=(), description="Files to use; if empty, all that a model needs.")
    token: SecretStr | None = Field(default=None, description="Access token of the hub.")

    @model_validator(mode="after")
    def _one_source(self) -> ArtifactTable:
        if (self.repository is None) == (self.path is None):
            raise ValueError("set either repository or path")
        for name in self.filenames:
            if name.startswith("/") or ".." in name.split("/") or not name:
                raise ValueError(f"filenames: {name!r} is not a relative path inside the repository or directory")
        return self


class ModelTable(ArtifactTable):
    """``[.model]``."""

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
        vision = "image" in self.task or "segmentation" in self.task
        return _VISION_INPUTS if vision else _INPUTS.get(self.task, _TEXT_INPUTS)


class PreprocessorTable(ArtifactTable):
    """``[.preprocessor]``."""

    type: str = Field(default="auto", description=f"One of {', '.join(PREPROCESSOR_TASKS)}.")
    input_names: tuple[str, ...] = Field(
        default=(), description="Tensors of a slice that are inputs of the preprocessor."
    )

    @model_validator(mode="after")
    def _can_be_fetched(self) -> PreprocessorTable:
        if self.type not in PREPROCESSOR_TASKS:
            raise ValueError(f"type: {self.type!r} is not one of {', '.join(PREPROCESSOR_TASKS)}")
        if self.path is None and not self.filenames:
            raise ValueError('filenames: name the preprocessor\'s files, such as ["preprocessor_config.json"]')
        return self


class DatasetTable(Table):
    """``[.dataset]``."""

    dataset: str = Field(min_length=1, max_length=255, description="Name of the dataset, as data nodes announce it.")
    evaluation: str | None = Field(default=None, description="Name of the dataset for evaluation.")


def _dataset_by_name(value: Any) -> Any:
    return {"dataset": value} if isinstance(value, str) else value


class InnerOptimizerTable(Table):
    """``[.inner_optimizer]``: AdamW."""

    learning_rate: _LearningRate = Field(description="Learning rate, up to 100.")
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
        default=0, ge=0, le=_U32, description="Steps of a worker during which the rate rises from zero."
    )
    total_steps: int | None = Field(
        default=None,
        gt=0,
        le=_U32,
        description="Steps of a worker in the whole job; if unset, the average that follows from its rounds.",
    )
    decay_steps: int | None = Field(
        default=None, gt=0, le=_U32, description="wsd: steps at the end during which the rate falls."
    )


class OuterOptimizerTable(Table):
    """``[.outer_optimizer]``: SGD with Nesterov momentum."""

    learning_rate: _LearningRate = Field(default=0.7, description="Learning rate of the outer step, up to 100.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum of the outer step.")
    nesterov: bool = Field(default=True, description="Nesterov momentum; false for classical momentum.")


class RoundsTable(Table):
    """``[.rounds]``."""

    update_rounds: int = Field(default=100, ge=1, le=_U32, description="Rounds, each with one outer step.")
    avg_samples_between_updates: int = Field(
        default=1200, ge=1, le=_U32, description="Samples of all workers per round."
    )
    max_batch_size: int | None = Field(
        default=None, ge=1, le=_U32, description="Upper limit of the automatic batch size."
    )
    batch_size: int | None = Field(default=None, ge=1, le=_U32, description="Samples per batch; if unset, automatic.")
    timeout: _Seconds | None = Field(
        default=None,
        description="Maximum seconds of training per round, up to 31 days; if unset, derived from measured throughput. "
        "The first round begins when the first worker begins its first batch.",
    )
    checkpoint_every: int = Field(
        default=1,
        ge=1,
        le=_U32,
        description="Number of rounds after which the scheduler's copy of the model is updated.",
    )
    evaluate_every: int = Field(
        default=0, ge=0, le=_U32, description="Number of rounds between evaluations of the model; 0 for none."
    )

    def batch_for(self, workers: int) -> int:
        """Return the configured batch size, or the largest power of two with four batches per worker and round."""
        if self.batch_size is not None:
            return min(self.batch_size, self.max_batch_size or self.batch_size)
        fitting = max(1, min(self.max_batch_size or _DEFAULT_BATCH, self.avg_samples_between_updates // (4 * workers)))
        return 1 << (fitting.bit_length() - 1)


class SyncTable(Table):
    """``[.sync]``: how updates are synchronized."""

    codec: str = Field(
        default="fp32", description="Encoding of the numbers in updates: fp32. Others are not supported yet."
    )
    fragments: int = Field(
        default=1,
        ge=1,
        le=_U32,
        description="Number of parts of the model that are synchronized in turn. More than 1 is not supported yet.",
    )
    overlap: int = Field(
        default=0,
        ge=0,
        le=_U32,
        description="Steps that training continues during synchronization. Values other than 0 are not supported yet.",
    )
    alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Mixing of local and global parameters with overlap; therefore without effect yet.",
    )
    aggregation: str = Field(default="mean", description="Aggregation of updates: mean. Others are not supported yet.")

    @model_validator(mode="after")
    def _only_implemented(self) -> SyncTable:
        plain = SyncTable.model_construct()
        for key in ("codec", "fragments", "overlap", "aggregation"):
            if (value := getattr(self, key)) != (default := getattr(plain, key)):
                raise not_yet(f"sync.{key} = {value!r}", f"set it to {default!r}")
        return self


class Requirement(Table):
    """Requirement on a worker: the minimum amount of a resource, or the name of an executor."""

    type: Literal["GPU", "CPU", "Memory", "Storage"] | None = Field(default=None, description="Resource.")
    min: float | None = Field(
        default=None,
        ge=0,
        le=_MAX_AMOUNT,
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
            raise ValueError(f"{str(key)[:80]!r} is not a key here; {suggest_key(str(key), Requirement, known)}")
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


class ResourcesTable(Table):
    """``[.resources]``: number, requirements and prices of workers."""

    num_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS, description="Training workers.")
    min_workers: int | None = Field(
        default=None, ge=1, le=_MAX_WORKERS, description="Workers without which the job fails; if unset, num_workers."
    )
    max_workers: int | None = Field(
        default=None,
        ge=1,
        le=_MAX_WORKERS,
        description="Maximum number of workers. More than num_workers is not supported yet.",
    )
    allocation_timeout: _Seconds = Field(default=60.0, description="Seconds to find all workers, up to 31 days.")
    worker: Requirements = Field(default=(), description="Requirements on a training worker.")
    parameter_server: Requirements = Field(default=(), description="Requirements on the parameter server.")
    worker_price: PriceTable = Field(default=PriceTable(), description="Price of a training worker.")
    parameter_server_price: PriceTable = Field(default=PriceTable(), description="Price of the parameter server.")
    budget: float | None = Field(
        default=None,
        gt=0,
        le=_MAX_TOKENS,
        description="Maximum tokens that the job may spend. Not supported yet: refused if set.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ResourcesTable:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"min_workers ({self.min_workers}) is more than num_workers ({self.num_workers})")
        if self.max_workers is not None and self.max_workers < self.num_workers:
            raise ValueError(f"max_workers ({self.max_workers}) is less than num_workers ({self.num_workers})")
        if self.max_workers is not None and self.max_workers > self.num_workers:
            raise not_yet("resources.max_workers above num_workers", "leave it out, or set it to num_workers")
        if self.budget is not None:
            raise not_yet("resources.budget", "leave it out; prices are bounded by max")
        return self

    @property
    def least_workers(self) -> int:
        """Number of workers without which the job fails: `min_workers`, or else `num_workers`."""
        return self.min_workers or self.num_workers


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


class JobConfig(Table):
    """One job."""

    type: Literal["diloco", "inference"] = Field(
        default="diloco", description="Strategy: diloco. inference is not supported yet."
    )
    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1, description="Seed of the order of slices and samples.")
    dataset: Annotated[DatasetTable, BeforeValidator(_dataset_by_name)] = Field(description="Training data.")
    model: ModelTable = Field(description="Model to train.")
    preprocessor: PreprocessorTable | None = Field(default=None, description="Preprocessor applied to each batch.")
    inner_optimizer: InnerOptimizerTable = Field(description="Inner optimizer of the workers, AdamW.")
    outer_optimizer: OuterOptimizerTable = Field(default=OuterOptimizerTable(), description="Outer optimizer.")
    rounds: RoundsTable = Field(
        default=RoundsTable(), validate_default=True, description="Number and length of rounds."
    )
    sync: SyncTable = Field(default=SyncTable(), description="Synchronization of updates.")
    resources: ResourcesTable = Field(default=ResourcesTable(), description="Workers and prices.")

    # validators of single fields: they report their error beside those of other fields

    @field_validator("type")
    @classmethod
    def _only_implemented(cls, value: str) -> str:
        if value != "diloco":
            raise not_yet(f'type = "{value}"', 'set it to "diloco"')
        return value

    @field_validator("rounds")
    @classmethod
    def _evaluates_on_a_dataset(cls, rounds: RoundsTable, info: ValidationInfo) -> RoundsTable:
        dataset = info.data.get("dataset")
        if not isinstance(dataset, DatasetTable):
            return rounds  # has an error of its own
        if rounds.evaluate_every and dataset.evaluation is None:
            raise ValueError("rounds.evaluate_every: name the dataset to evaluate on in dataset.evaluation")
        if dataset.evaluation is not None and not rounds.evaluate_every:
            raise ValueError(
                "dataset.evaluation: set rounds.evaluate_every to the number of rounds between evaluations"
            )
        return rounds

    @property
    def preprocessor_task(self) -> str:
        """Wire name of the preprocessor; derived from the model's inputs unless type or input names are set."""
        chosen = self.preprocessor
        if chosen is None or chosen.type != "auto" or chosen.input_names:
            return chosen.type if chosen else "auto"
        return "image" if self.model.inputs[:1] == _VISION_INPUTS[:1] else "tokenizer"
