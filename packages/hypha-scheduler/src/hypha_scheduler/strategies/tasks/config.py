"""Job table of ``type = "tasks"``: the user's task objects. `graph` turns them into what is run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from hypha_proto.codec import check_depth
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import MAX_PATH, NAME, PeerId, find_path_fault, is_inside
from hypha_proto.resources import Resources
from hypha_proto.tasks import MAX_ENTRIES, MAX_FILENAMES, MAX_FRAME, MAX_SETTINGS, RESOURCES
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.jobs.config import (
    MAX_AMOUNT,
    MAX_SECONDS,
    SERVE,
    Budget,
    JobTable,
    PriceTable,
    Table,
    token_warning,
)
from hypha_scheduler.jobs.source_tables import MAX_TEXT, FileName, S3Table, Sha256, Url
from hypha_scheduler.strategies.tasks.definition_faults import find_faults

MAX_INSTANCES: Final = 10_000
"""Largest number of instances of all tasks of a job."""
_MAX_TASK: Final = MAX_FRAME // 2
"""Bytes of a task, so that its definition fits into a frame."""
_U64: Final = (1 << 64) - 1
_DRIVER: Final = re.compile(rf"{NAME}(/{NAME})?")
_SOURCES: Final = ("result", "dataset", "huggingface", "peers", "file", "uri", "s3", "dht")

_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
_Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT)]


def _wrap(key: str) -> BeforeValidator:
    """Accept plain text for a table whose only necessary key is `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise ValueError("is not a name: 1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit")
    return text


def _not_empty(items: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Check a list; pydantic's own check also counts items that are invalid."""
    if items is not None and not items:
        raise ValueError("is empty; list at least one")
    return items


Name = Annotated[str, AfterValidator(_name)]
_NotEmpty: Final = AfterValidator(_not_empty)


def _relative_path(text: str) -> str:
    """Check the path of an output.

    Raises:
        ValueError: it is not a path inside the work directory, or one that a worker refuses.
    """
    path = PurePosixPath(text)
    if not is_inside(text) or "\\" in text or not text.isprintable():
        raise ValueError("is not inside the work directory; name a relative path without .. such as out/model")
    if path.parts[0] == RESOURCES:
        raise ValueError(f"is in the folder of the inputs, {RESOURCES}; name another folder")
    if len(text.encode()) > MAX_PATH:
        raise ValueError(f"is longer than {MAX_PATH} bytes; name a shorter path")
    return path.as_posix()


def _absolute_path(text: str) -> str:
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts or not text.isprintable():
        raise ValueError("is not an absolute path without ..; write it as workers see it, such as /mnt/share/data.csv")
    return path.as_posix()


def _peer(text: str) -> str:
    try:
        return str(PeerId.parse(text))
    except InvalidIdError as error:
        raise ValueError(f"{error}; write a peer id such as 12D3KooW…") from None


class ResultTable(Table):
    """``[.resources.result]``."""

    task: Name = Field(description="Task that makes the output.")
    output: Name = Field(description="Name of the output.")


class DatasetSourceTable(Table):
    """``[.resources.dataset]``."""

    name: str = Field(min_length=1, max_length=255, description="Name of the dataset, as data nodes announce it.")
    slices: Annotated[tuple[Annotated[int, Field(ge=0, le=_U64)], ...] | None, _NotEmpty] = Field(
        default=None, max_length=10_000, description="Indices of the slices; if unset, all."
    )


class HuggingFaceTable(Table):
    """``[.resources.huggingface]``."""

    repository: _Text = Field(description="Repository, such as owner/name.")
    filenames: Annotated[tuple[Annotated[FileName, Field(max_length=MAX_PATH)], ...], _NotEmpty] = Field(
        max_length=MAX_FILENAMES, description="Files of the repository."
    )
    revision: _Text | None = Field(default=None, description="Branch, tag or commit.")
    token: SecretStr | None = Field(
        default=None, description="Access token of the hub. Workers get it with serve = false only."
    )
    serve: bool | None = Field(
        default=None,
        description="Whether the scheduler downloads the files and serves them to the workers, which then need no "
        f"access to the hub and get no token. {SERVE}",
    )


class PeersTable(Table):
    """``[.resources.peers]``."""

    peers: Annotated[tuple[Annotated[str, AfterValidator(_peer)], ...], _NotEmpty] = Field(
        max_length=100, description="Peer ids of those that serve the file."
    )
    dataset: str = Field(min_length=1, max_length=255, description="Name under which they serve it.")
    index: int = Field(default=0, ge=0, le=_U64, description="Index of the file.")
    filenames: tuple[FileName, ...] | None = Field(
        default=None,
        max_length=MAX_FILENAMES,
        description="Names of the files at index, index + 1, …; the input is then a folder of them.",
    )


class FileTable(Table):
    """``[.resources.file]``."""

    path: Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_absolute_path)] = Field(
        description="Absolute path at the worker, under a root that its owner allows."
    )


class UriTable(Table):
    """``[.resources.uri]``."""

    value: Url = Field(description="URL.")


class DhtTable(Table):
    """``[.resources.dht]``."""

    sha256: Sha256 = Field(description="SHA-256 of the file, 64 hex digits; hypha-data provide announces it.")


class ResourceTable(Table):
    """``[[.resources]]``: an input of a task, a name and one source."""

    name: Name = Field(description="Name; a setting of this value becomes the path of the input.")
    result: ResultTable | None = Field(default=None, description="An output of another task.")
    dataset: Annotated[DatasetSourceTable, _wrap("name")] | None = Field(
        default=None, description="A dataset of data nodes, or its name."
    )
    huggingface: HuggingFaceTable | None = Field(default=None, description="Files of a repository on a hub.")
    peers: PeersTable | None = Field(default=None, description="A file that peers serve.")
    file: Annotated[FileTable, _wrap("path")] | None = Field(
        default=None, description="A file or folder of a file system that workers share, or its path."
    )
    uri: Annotated[UriTable, _wrap("value")] | None = Field(default=None, description="A file at a URL, or the URL.")
    s3: S3Table | None = Field(default=None, description="An object in an S3 bucket.")
    dht: Annotated[DhtTable, _wrap("sha256")] | None = Field(
        default=None, description="A file by its SHA-256, which data nodes provide, or the digest."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = [key for key in _SOURCES if value.get(key) is not None]
        if len(found) != 1:
            said = f"has {len(found)} sources, {' and '.join(found)}" if found else "has no source"
            raise ValueError(f"{said}; set exactly one of {', '.join(_SOURCES)}")
        return value


class NeedsTable(Table):
    """``[.needs]``: what a worker must have free."""

    gpu: _Amount = Field(default=0.0, description="GPU memory, GB.")
    cpu: _Amount = Field(default=0.0, description="Cores.")
    memory: _Amount = Field(default=0.0, description="RAM, GB.")
    storage: _Amount = Field(default=0.0, description="Disk for inputs and outputs, GB.")

    def resources(self) -> Resources:
        """Return them as they are requested."""
        return Resources(gpu=self.gpu, cpu=self.cpu, memory=self.memory, storage=self.storage)


def _check_driver(driver: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check that there is one driver, with a valid name and settings that can be sent."""
    if len(driver) != 1:
        named = ", ".join(sorted(driver)) or "none"
        raise ValueError(f"must name one executor, not {len(driver)} ({named}); for several write a task for each")
    [(name, settings)] = driver.items()
    if not _DRIVER.fullmatch(name):
        raise ValueError(f"{name!r} is not an executor; write its name, or class/name such as shell/bash")
    _check_settings(name, settings)
    return driver


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    try:
        check_depth(settings)
        text = json.dumps(settings, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"{name}: a setting is not JSON: {error}; write it as text") from None
    except RecursionError:
        raise ValueError(f"{name}: settings are nested too deeply; flatten them") from None
    except ValueError as error:
        raise ValueError(f"{name}: the settings cannot be sent: {error}") from None
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SETTINGS:
        raise ValueError(f"{name}: settings of {len(text)} bytes are over {MAX_SETTINGS}; pass a file as a resource")
    try:
        json.dumps(settings, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: a setting has half of a surrogate pair; write Unicode text") from None


class TaskTable(Table):
    """``[[.tasks]]``."""

    name: Name = Field(description="Name, unique in the job.")
    driver: Annotated[dict[str, dict[str, Any]], AfterValidator(_check_driver)] = Field(
        description="One executor, its name or class/name, with its settings."
    )
    resources: tuple[ResourceTable, ...] = Field(default=(), max_length=MAX_ENTRIES, description="Inputs.")
    outputs: dict[Name, Annotated[str, AfterValidator(_relative_path)]] = Field(
        default={}, max_length=MAX_ENTRIES, description="Outputs: name, and file or folder in the work directory."
    )
    needs: NeedsTable = Field(default=NeedsTable(), description="What a worker must have free.")
    count: int = Field(default=1, ge=1, le=MAX_INSTANCES, description="Number of instances of the task.")
    retries: int = Field(default=2, ge=0, le=100, description="Attempts after the first one that has failed.")
    timeout: float | None = Field(
        default=None, gt=0, le=MAX_SECONDS, description="Seconds after which an attempt has failed; if unset, none."
    )
    fetch_timeout: float = Field(
        default=3600.0,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds from the start of an attempt until its inputs are there and its executor has started; "
        "then the attempt has failed.",
    )
    keep: tuple[Name, ...] | None = Field(
        default=None, description="Outputs to bring to the scheduler; if unset, those that no other task uses."
    )

    @field_validator("resources")
    @classmethod
    def _distinct(cls, resources: tuple[ResourceTable, ...]) -> tuple[ResourceTable, ...]:
        counts = Counter(resource.name for resource in resources)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"several resources are named {twice[0]!r}; give each a name of its own")
        return resources

    @field_validator("outputs")
    @classmethod
    def _disjoint(cls, outputs: dict[str, str]) -> dict[str, str]:
        if (fault := find_path_fault(outputs.values())) is not None:
            raise ValueError(f"has {fault}; give each a file or folder of its own")
        return outputs

    @field_validator("keep")
    @classmethod
    def _are_outputs(cls, keep: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        outputs = info.data.get("outputs")
        if keep is None or outputs is None:  # which has an error of its own
            return keep
        if unknown := [name for name in keep if name not in outputs]:
            raise ValueError(f"{unknown[0]!r} is not an output of this task; its outputs: {', '.join(outputs) or '-'}")
        return tuple(dict.fromkeys(keep))

    @model_validator(mode="after")
    def _can_be_sent(self) -> TaskTable:
        size = len(self.model_dump_json(exclude={"retries", "keep", "needs"}))
        if size > _MAX_TASK:
            raise ValueError(f"is {size} bytes long, over the limit of {_MAX_TASK}; pass what is long as a file")
        return self

    @property
    def executor(self) -> str:
        """Executor, as the user names it."""
        return next(iter(self.driver))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the executor."""
        return self.driver[self.executor]


def _validate_tasks(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate all tasks, and what they say of each other, so that every fault is reported at once."""
    lines: list[InitErrorDetails] = []
    tasks: Any = ()
    try:
        tasks = handler(value)
    except ValidationError as error:
        lines += [
            InitErrorDetails(type=_kind(each["type"], each["msg"]), loc=each["loc"], input=each["input"])
            for each in error.errors(include_url=False)
        ]
    lines += find_faults(value, MAX_INSTANCES)
    if lines:
        raise ValidationError.from_exception_data("tasks", lines)
    return tasks


def _kind(kind: Any, message: Any) -> PydanticCustomError:
    return PydanticCustomError(kind, message)  # pydantic wants literal strings, to keep types and messages few


class TasksJob(JobTable):
    """``[scheduler.job]`` of ``type = "tasks"``."""

    type: Literal["tasks"] = Field(description="Strategy.")
    name: str | None = Field(default=None, min_length=1, max_length=255, description="Name of the job, for people.")
    tasks: Annotated[tuple[TaskTable, ...], _NotEmpty, WrapValidator(_validate_tasks)] = Field(
        max_length=MAX_INSTANCES, description="Tasks."
    )
    workers: int = Field(default=4, ge=1, le=MAX_INSTANCES, description="Largest number of leases at a time.")
    transfer: Literal["pull", "push"] = Field(
        default="pull", description="Whether workers pull results from those that have them, or these push them."
    )
    worker_price: PriceTable = Field(default=PriceTable(), description="Price of a worker.")
    budget: Budget = None

    def warnings(self) -> list[str]:
        """Return a line for each resource whose token the workers get; see `JobTable.warnings`."""
        return [
            token_warning(f"tasks[{number}].resources[{place}].huggingface")
            for number, task in enumerate(self.tasks)
            for place, resource in enumerate(task.resources)
            if (hub := resource.huggingface) is not None and hub.token is not None and hub.serve is False
        ]

    @property
    def token_budget(self) -> float | None:
        """Tokens that the job's leases may cost in all."""
        return self.budget

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Names of the datasets whose slices tasks use."""
        return tuple(dict.fromkeys(source.name for source in self._dataset_sources()))

    def _dataset_sources(self) -> Iterator[DatasetSourceTable]:
        found = (resource.dataset for task in self.tasks for resource in task.resources)
        return (source for source in found if source is not None)

    def dataset_faults(self, dataset: DatasetView) -> list[str]:
        """Return whether a task uses a slice that a dataset does not have."""
        sources = (source for source in self._dataset_sources() if source.name == dataset.name)
        last = max((number for source in sources for number in source.slices or ()), default=-1)
        count = len(dataset.samples)
        if last < count:
            return []
        text = f"dataset {dataset.name!r} has {count} slices, numbered from 0, and a task uses slice {last}"
        return [f"{text}; correct slices"]

    def span_attributes(self) -> dict[str, str]:
        """Return the name of the job."""
        return {"hypha.job.name": self.name} if self.name else {}
