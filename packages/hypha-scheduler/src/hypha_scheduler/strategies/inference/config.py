"""Job table of ``type = "inference"``: model, data, what to compute, which columns to keep, and workers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from hypha_proto.datasets import JSONL, SAFETENSORS
from hypha_proto.prompt_template import columns_of
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.jobs.config import (
    MAX_SECONDS,
    MAX_WORKERS,
    Budget,
    DatasetTable,
    JobTable,
    ModelTable,
    PreprocessorTable,
    PriceTable,
    Requirements,
    Table,
    dataset_by_name,
    kinds,
    lacking_columns,
    lacking_inputs,
    preprocessor_task,
)
from hypha_scheduler.jobs.model_files import missing_files

CLASSIFY: Final = "classify"
GENERATE: Final = "generate"
MODELS: Final = {
    CLASSIFY: ("image-classification", "sequence-classification", "audio-classification", "video-classification",
               "torch"),
    GENERATE: ("causal-lm",),
}  # fmt: skip
"""Types of models that can do each task."""
RESULT_COLUMNS: Final = {
    CLASSIFY: {"label": "integer", "score": "number"},
    GENERATE: {"prompt": "text", "text": "text", "tokens": "integer", "finish": "text"},
}
"""What each task writes for a row, and of which kind."""
OPTIONAL_COLUMNS: Final = {CLASSIFY: {"scores": "list"}, GENERATE: dict[str, str]()}
"""What it writes when `results.columns` names it."""
ROW_COLUMNS: Final = {"slice": "integer", "row": "integer", "error": "object"}
"""What every row may have."""
EXECUTOR: Final = "inference/transformers"
"""Class and name of the default executor."""
RESOURCES: Final = ("model", "preprocessor", "slices")
"""Names of the resources of a task. A text among its settings that equals one stands for a path."""
_FORMAT_OF: Final = {GENERATE: JSONL}
"""Format of the dataset that a task needs, if it needs a certain one."""
_GENERATES: Final = ("prompt", "max_new_tokens", "temperature", "top_p", "stop", "chat_template")
_MAX_STOPS: Final = 16
_Column = Annotated[str, Field(min_length=1, max_length=255)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class InferenceTable(Table):
    """``[.inference]``: what to compute."""

    task: Literal["classify", "generate"] = Field(
        description="classify: the most likely class of each row; generate: text that continues a prompt."
    )
    prompt: str | None = Field(
        default=None,
        max_length=100_000,
        description="generate: the prompt, with columns of a row in braces, such as {question}; {{ and }} for braces.",
    )
    max_new_tokens: int = Field(default=128, ge=1, le=1_000_000, description="generate: most tokens of one row.")
    temperature: float = Field(
        default=0.0, ge=0, le=100, description="generate: temperature of sampling; 0 takes the most likely token."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="generate: share of probability that sampling chooses from."
    )
    stop: tuple[_Stop, ...] = Field(
        default=(), max_length=_MAX_STOPS, description="generate: texts that end a row; they are not part of it."
    )
    chat_template: bool = Field(
        default=True, description="generate: apply the tokenizer's chat template to the prompt, if it has one."
    )
    batch_size: int = Field(default=8, ge=1, le=1 << 20, description="Rows that an executor computes together.")
    seed: int = Field(
        default=0, ge=0, le=(1 << 63) - 1, description="Seed of sampling; with a row's slice and number it decides."
    )
    on_error: Literal["record", "fail"] = Field(
        default="record", description="A row that cannot be computed: record it with the reason, or fail the job."
    )
    max_error_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of error rows above which the job fails; 1 lets it finish always."
    )

    @field_validator("prompt")
    @classmethod
    def _is_a_template(cls, prompt: str | None) -> str | None:
        if prompt is not None and not columns_of(prompt):
            raise ValueError("it names no column, so every row would get the same answer; write one such as {question}")
        return prompt

    @field_validator("stop")
    @classmethod
    def _stops_at_no_resource(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if taken := [text for text in stop if text in RESOURCES]:
            raise ValueError(f"{', '.join(taken)}: names of a task's resources, which become paths; leave it out")
        return stop

    @model_validator(mode="after")
    def _fits_the_task(self) -> InferenceTable:
        if self.task == GENERATE and self.prompt is None:
            raise ValueError('prompt: task = "generate" needs one, with columns of a row in braces')
        plain = {key: field.default for key, field in type(self).model_fields.items()}
        if self.task != GENERATE and (extra := [key for key in _GENERATES if getattr(self, key) != plain[key]]):
            raise ValueError(f'{", ".join(extra)}: only for task = "generate"; leave them out')
        return self

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns that the prompt needs."""
        return () if self.prompt is None else columns_of(self.prompt)


class ResultsTable(Table):
    """``[.results]``."""

    columns: tuple[_Column, ...] = Field(
        default=(),
        max_length=1000,
        description="Columns of a row that its result repeats; classify: also scores, the probability of each class.",
    )

    @field_validator("columns")
    @classmethod
    def _each_once(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: named twice; name each column once")
        if taken := [name for name in columns if name in RESOURCES]:
            raise ValueError(f"{', '.join(taken)}: names of a task's resources; rename the dataset's column")
        return columns


class InferenceResourcesTable(Table):
    """``[.resources]``: number, requirements and price of workers."""

    min_workers: int = Field(default=1, ge=1, le=MAX_WORKERS, description="Workers without which the job fails.")
    num_workers: int = Field(default=1, ge=1, le=MAX_WORKERS, description="Workers that the job begins with.")
    max_workers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="Workers to which the job grows once it has a first result; if unset, num_workers.",
    )
    allocation_timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] = Field(
        default=60.0, description="Seconds to find the first min_workers, up to 31 days."
    )
    worker: Requirements = Field(default=(), description="Requirements on a worker; kind names another executor.")
    worker_price: PriceTable = Field(default=PriceTable(), description="Price of a worker.")
    budget: Budget = None

    @model_validator(mode="after")
    def _ordered(self) -> InferenceResourcesTable:
        if self.min_workers > self.num_workers:
            raise ValueError(f"min_workers ({self.min_workers}) is more than num_workers ({self.num_workers})")
        if self.most_workers < self.num_workers:
            raise ValueError(f"max_workers ({self.max_workers}) is less than num_workers ({self.num_workers})")
        return self

    @property
    def most_workers(self) -> int:
        """`max_workers`, or else `num_workers`."""
        return self.num_workers if self.max_workers is None else self.max_workers


class InferenceJobConfig(JobTable):
    """``[scheduler.job]`` of ``type = "inference"``."""

    type: Literal["inference"] = Field(description="Strategy.")
    dataset: Annotated[DatasetTable, BeforeValidator(dataset_by_name)] = Field(description="Rows to compute.")
    model: ModelTable = Field(description="Model to apply.")
    preprocessor: PreprocessorTable | None = Field(
        default=None, description="Preprocessor of a row, or tokenizer where the model's files have none."
    )
    inference: InferenceTable = Field(description="What to compute.")
    results: ResultsTable = Field(
        default=ResultsTable(), validate_default=True, description="What the results contain."
    )
    resources: InferenceResourcesTable = Field(default=InferenceResourcesTable(), description="Workers and prices.")

    # validators of fields: each reports its error beside those of others

    @field_validator("dataset")
    @classmethod
    def _has_no_evaluation(cls, dataset: DatasetTable) -> DatasetTable:
        if dataset.evaluation is not None:
            raise ValueError("evaluation: an inference job computes one dataset; leave it out")
        return dataset

    @field_validator("inference")
    @classmethod
    def _suits_the_model(cls, inference: InferenceTable, info: ValidationInfo) -> InferenceTable:
        model = info.data.get("model")
        able = MODELS[inference.task]
        if isinstance(model, ModelTable) and model.task not in able:
            raise ValueError(
                f'task: "{inference.task}" cannot be done by a model of type "{model.type}"; it needs one of type '
                f"{' or '.join(able)}"
            )
        return inference

    @field_validator("results")
    @classmethod
    def _names_no_result(cls, results: ResultsTable, info: ValidationInfo) -> ResultsTable:
        inference = info.data.get("inference")
        if not isinstance(inference, InferenceTable):
            return results
        own = ROW_COLUMNS | RESULT_COLUMNS[inference.task]
        if clash := [name for name in results.columns if name in own]:
            raise ValueError(
                f"columns: {', '.join(clash)}: every result has a key of this name; leave it out, or rename the "
                "dataset's column"
            )
        return results

    @property
    def token_budget(self) -> float | None:
        """Tokens that the job's leases may cost in all."""
        return self.resources.budget

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Name of the dataset that is computed."""
        return self.dataset.announced

    def dataset_faults(self, dataset: DatasetView) -> list[str]:
        """Return why the job cannot compute the dataset, one line each with the remedy."""
        faults, name = [], dataset.name
        if any(samples is None for samples in dataset.samples):
            faults.append(
                f"dataset.dataset: {name!r} has no manifest, which says how many rows each slice has; let a data node "
                "of version 0.2 or later serve it"
            )
        form, needed = dataset.format or SAFETENSORS, _FORMAT_OF.get(self.inference.task)
        if needed is not None and form != needed:
            faults.append(
                f"dataset.dataset: {name!r} holds {form}, and {self.inference.task} needs rows of the format {needed}; "
                "prepare them with `hypha-data prepare ROWS.jsonl`"
            )
        if needed is None and self.executor == EXECUTOR:
            faults += lacking_inputs(self.model, self.preprocessor, dataset, labelled=False)
        faults += lacking_columns(dataset, "inference.prompt", self.inference.prompt_columns)
        return faults + lacking_columns(dataset, "results.columns", self._copied_columns)

    @property
    def _copied_columns(self) -> tuple[str, ...]:
        """Columns of the dataset that results repeat."""
        optional = OPTIONAL_COLUMNS[self.inference.task]
        return tuple(name for name in self.results.columns if name not in optional)

    @property
    def executor(self) -> str:
        """Class and name of the executor."""
        return kinds(self.resources.worker, EXECUTOR)[0]

    @property
    def preprocessor_task(self) -> str:
        """Wire name of the preprocessor."""
        return preprocessor_task(self.model, self.preprocessor)

    def sampling(self) -> dict[str, Any]:
        """Return `inference` as plain values: what, beside model and data, decides what a row's result is."""
        return self.inference.model_dump(mode="json", exclude={"max_error_share"})

    def span_attributes(self) -> dict[str, str]:
        """Return the name of the dataset."""
        return {"hypha.dataset": self.dataset.shown}

    def missing_files(self) -> list[str]:
        """Return what is wrong with the local directories of the model and the preprocessor, one line each."""
        return missing_files(self.model, self.preprocessor)

    @property
    def allocation_timeout(self) -> float:
        """Seconds to find the workers without which the job cannot begin."""
        return self.resources.allocation_timeout
