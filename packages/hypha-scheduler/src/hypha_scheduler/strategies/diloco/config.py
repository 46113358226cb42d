"""Job table of ``type = "diloco"``: model, data, optimizers, rounds and workers of a DiLoCo job.

Keys of planned features exist already; setting one to a value that is not implemented is refused with "not yet", never
ignored. `specs` turns a job into role requests and job specs.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from hypha_proto.datasets import SAFETENSORS
from hypha_proto.prompt_template import columns_of
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.jobs.config import (
    MAX_SECONDS,
    MAX_U32,
    MAX_WORKERS,
    Budget,
    DatasetTable,
    InnerOptimizerTable,
    JobTable,
    LearningRate,
    PreprocessorTable,
    PriceTable,
    Requirements,
    StartModelTable,
    Table,
    dataset_by_name,
    kinds,
    lacking_columns,
    lacking_inputs,
    preprocessor_task,
)
from hypha_scheduler.jobs.model_files import missing_files

TRAIN_KIND: Final = "diloco-transformer"
_DEFAULT_BATCH: Final = 64
_MAX_GRACE: Final = 86400.0
_MAX_TEMPLATE: Final = 10_000
_CAUSAL_LM: Final = "causal-lm"
_Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class OuterOptimizerTable(Table):
    """``[.outer_optimizer]``: SGD with Nesterov momentum."""

    learning_rate: LearningRate = Field(default=0.7, description="Learning rate of the outer step, up to 100.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum of the outer step.")
    nesterov: bool = Field(default=True, description="Nesterov momentum; false for classical momentum.")


class RoundsTable(Table):
    """``[.rounds]``."""

    update_rounds: int = Field(default=100, ge=1, le=MAX_U32, description="Rounds, each with one outer step.")
    avg_samples_between_updates: int = Field(
        default=1200, ge=1, le=MAX_U32, description="Samples of all workers per round."
    )
    max_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_U32,
        description="Upper limit of the batch size, and so of the samples that any worker computes at once.",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_U32,
        description="Samples per step of a worker; if unset, automatic. A worker with too little memory computes them "
        "in parts.",
    )
    timeout: _Seconds | None = Field(
        default=None,
        description="Maximum seconds of training per round, up to 31 days; if unset, derived from measured throughput. "
        "The first round begins when the first worker begins its first batch.",
    )
    start_timeout: _Seconds | None = Field(
        default=None,
        description="Maximum seconds from starting a worker's executor to its first batch, up to 31 days; if unset, "
        "derived from the size of the model and from earlier starts.",
    )
    step_timeout: _Seconds | None = Field(
        default=None,
        description="Maximum seconds of an outer step, the transfer of all updates included, up to 31 days; if unset, "
        "derived from the size of the model and from earlier steps.",
    )
    merge_timeout: _Seconds | None = Field(
        default=None,
        description="Maximum seconds for the workers to receive and merge an outer update, up to 31 days; if unset, "
        "derived from the size of the model and from earlier merges.",
    )
    checkpoint_every: int = Field(
        default=1,
        ge=1,
        le=MAX_U32,
        description="Number of rounds between checkpoints: loadable models, of which the last and the best are kept.",
    )
    keep_updates: bool = Field(
        default=False,
        description="Keep the outer updates in updates/, from which audit and replay recompute the rounds.",
    )
    evaluate_every: int = Field(
        default=0, ge=0, le=MAX_U32, description="Number of rounds between evaluations of the model; 0 for none."
    )

    def batch_for(self, workers: int) -> int:
        """Return the configured batch size, or the largest power of two with four batches per worker and round."""
        if self.batch_size is not None:
            return min(self.batch_size, self.max_batch_size or self.batch_size)
        fitting = max(1, min(self.max_batch_size or _DEFAULT_BATCH, self.avg_samples_between_updates // (4 * workers)))
        return 1 << (fitting.bit_length() - 1)


class RowsTable(Table):
    """``[.rows]``: how JSON lines become text that a causal language model learns."""

    completion: str = Field(
        max_length=_MAX_TEMPLATE,
        description="Text that is learnt, with columns of a row in braces, such as {answer}; {{ and }} for braces.",
    )
    prompt: str | None = Field(
        default=None,
        max_length=_MAX_TEMPLATE,
        description="Text before it, which is not learnt itself, such as Question: {question}.",
    )
    chat_template: bool = Field(
        default=True, description="Apply the tokenizer's chat template to the prompt, if it has one."
    )

    @field_validator("completion", "prompt")
    @classmethod
    def _is_a_template(cls, text: str | None) -> str | None:
        if text is not None and not columns_of(text):
            raise ValueError("it names no column, so every row would be the same; write one such as {text}")
        return text

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a row must have."""
        return columns_of(f"{self.prompt or ''}{self.completion}")


class ResourcesTable(Table):
    """``[.resources]``: number, requirements and prices of workers."""

    num_workers: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="Training workers with which the job starts at once. Lost ones are replaced all job long.",
    )
    min_workers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="Workers with which the job starts after 2 s, and without which it pauses. If unset, it starts "
        "with num_workers and goes on with one.",
    )
    max_workers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="Number of workers to which a job that has started grows; if unset, num_workers.",
    )
    allocation_timeout: _Seconds = Field(
        default=60.0,
        description="Seconds for which the job waits for the workers that it needs and a parameter server, at its "
        "start or when it pauses, until it fails; up to 31 days.",
    )
    worker: Requirements = Field(default=(), description="Requirements on a training worker.")
    parameter_server: Requirements = Field(default=(), description="Requirements on the parameter server.")
    worker_price: PriceTable = Field(default=PriceTable(), description="Price of a training worker.")
    parameter_server_price: PriceTable = Field(default=PriceTable(), description="Price of the parameter server.")
    budget: Budget = None

    @model_validator(mode="after")
    def _ordered(self) -> ResourcesTable:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"min_workers ({self.min_workers}) is more than num_workers ({self.num_workers})")
        if self.max_workers is not None and self.max_workers < self.num_workers:
            raise ValueError(f"max_workers ({self.max_workers}) is less than num_workers ({self.num_workers})")
        return self

    @property
    def first_workers(self) -> int:
        """Number of workers with which the job starts: `min_workers`, or else `num_workers`."""
        return self.min_workers or self.num_workers

    @property
    def least_workers(self) -> int:
        """Number of workers without which the running job pauses: `min_workers`, or else 1."""
        return self.min_workers or 1

    @property
    def most_workers(self) -> int:
        """Number of workers to which the job grows: `max_workers`, or else `num_workers`."""
        return self.max_workers or self.num_workers


class DilocoJobConfig(JobTable):
    """``[scheduler.job]`` of ``type = "diloco"``."""

    type: Literal["diloco"] = Field(default="diloco", description="Strategy.")
    seed: int = Field(
        default=0, ge=0, le=(1 << 63) - 1, description="Seed of the order of slices and samples, and of dropout."
    )
    dataset: Annotated[DatasetTable, BeforeValidator(dataset_by_name)] = Field(description="Training data.")
    model: StartModelTable = Field(description="Model to train.")
    preprocessor: PreprocessorTable | None = Field(default=None, description="Preprocessor applied to each batch.")
    rows: RowsTable | None = Field(
        default=None, description="How rows of JSON lines become text, by the tokenizer that preprocessor names."
    )
    inner_optimizer: InnerOptimizerTable = Field(description="Inner optimizer of the workers, AdamW.")
    outer_optimizer: OuterOptimizerTable = Field(default=OuterOptimizerTable(), description="Outer optimizer.")
    rounds: RoundsTable = Field(
        default=RoundsTable(), validate_default=True, description="Number and length of rounds."
    )
    resources: ResourcesTable = Field(default=ResourcesTable(), description="Workers and prices.")
    orphan_grace: float = Field(
        default=60.0,
        ge=0,
        le=_MAX_GRACE,
        description="Seconds for which workers train on without the scheduler, up to a day; each worker's "
        "offer.orphan_grace may allow less. A scheduler that is started again within this time takes the job up. With "
        "0 the training ends with the leases.",
    )

    # validators of fields: they report their errors beside those of other fields

    @field_validator("rows")
    @classmethod
    def _have_a_tokenizer(cls, rows: RowsTable | None, info: ValidationInfo) -> RowsTable | None:
        if rows is None:
            return None
        model = info.data.get("model")
        if isinstance(model, StartModelTable) and model.type != _CAUSAL_LM:
            raise ValueError(f"rows: are for a model of type {_CAUSAL_LM!r}, and model.type is {model.type!r}")
        if info.data.get("preprocessor", rows) is None:
            raise ValueError("rows: name the folder or repository of the model's tokenizer in preprocessor")
        return rows

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
    def start_model(self) -> StartModelTable:
        """Return the table of the model, with the seed of its weights if it is to be created."""
        if self.model.config is None or self.model.seed is not None:
            return self.model
        return self.model.model_copy(update={"seed": self.seed})

    @property
    def preprocessor_task(self) -> str:
        """Wire name of the preprocessor."""
        return preprocessor_task(self.model, self.preprocessor)

    def span_attributes(self) -> dict[str, str]:
        """Return the name of the training data."""
        return {"hypha.dataset": self.dataset.shown}

    def missing_files(self) -> list[str]:
        """Return what is wrong with the local directories of model, preprocessor and dataset, one line each."""
        return missing_files(self.model, self.preprocessor) + self.dataset.missing_files()

    @property
    def token_budget(self) -> float | None:
        """Tokens that the job's leases may cost in all."""
        return self.resources.budget

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Names of the training and the evaluation data."""
        return self.dataset.announced

    def dataset_faults(self, dataset: DatasetView) -> list[str]:
        """Return why executors cannot train on a dataset, or evaluate with it, one line each with the remedy."""
        is_rows = dataset.format not in (None, SAFETENSORS)
        what = f"dataset {dataset.name!r} holds {f'rows of the format {dataset.format}' if is_rows else 'tensors'}"
        if is_rows and self.rows is None:
            return [
                f"{what}: say with rows.completion which text of a row is learnt, such as {{text}}, or make tensors of "
                "a column with `hypha-data prepare --text COLUMN`"
            ]
        if not is_rows and self.rows is not None:
            return [f"{what}, and rows reads JSON lines: leave rows out, or name another dataset"]
        if self.rows is not None:
            return lacking_columns(dataset, "rows", self.rows.columns)
        if kinds(self.resources.worker, TRAIN_KIND) != (TRAIN_KIND,):
            return []  # another executor may read other columns
        return lacking_inputs(self.model, self.preprocessor, dataset, labelled=True)

    @property
    def planned_steps(self) -> int | None:
        """Number of rounds."""
        return self.rounds.update_rounds

    @property
    def allocation_timeout(self) -> float:
        """Seconds for which the job waits for the workers without which it does not go on."""
        return self.resources.allocation_timeout

    @property
    def orphan_grace_seconds(self) -> float:
        """Seconds for which the executors train on when this scheduler is gone."""
        return self.orphan_grace
