"""Validation of task definitions, which come from a scheduler and name files of this machine.

Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError
from hypha_proto.ids import NAME, find_path_fault
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.tasks import (
    MAX_ENTRIES,
    MAX_FILENAMES,
    MAX_SETTINGS,
    RESOURCES,
    OutputPath,
    TaskResource,
    TaskSpec,
)
from hypha_proto.texts import quote
from hypha_worker.errors import ExecutionError

_SOURCES: Final = ("result", "huggingface", "dataset", "peers", "file", "uri", "s3", "dht", "slices")


class DefinitionError(ExecutionError):
    """A definition cannot be used; the message names the field, its value and what is allowed."""


def check_start(spec: TaskSpec, executors: Iterable[ExecutorDescriptor]) -> dict[str, Any]:
    """Check what a task is started with; return its settings.

    Args:
        spec: what to run.
        executors: the executors that the task's lease was requested for.

    Raises:
        DefinitionError: a field cannot be used.
    """
    if ExecutorDescriptor.parse(spec.executor) not in executors:
        raise DefinitionError(f"executor {spec.executor!r} is none of those that the lease was requested for")
    if spec.timeout_ms == 0:
        raise DefinitionError("timeout_ms is 0: leave it out, or state at least 1")
    _check_resources(spec.resources)
    _check_outputs(spec.outputs)
    return _settings(spec.settings)


def _settings(text: str) -> dict[str, Any]:
    if len(text.encode(errors="replace")) > MAX_SETTINGS:
        raise DefinitionError(f"settings are over the limit of {MAX_SETTINGS} bytes: pass large values as a resource")
    try:
        settings = parse_json(text)
    except DecodeError as error:
        raise DefinitionError(f"settings: {error}") from None
    if not isinstance(settings, dict):
        raise DefinitionError(f"settings are {quote(text)}, not a JSON object")
    return settings


def _check_names(what: str, names: list[str]) -> None:
    if len(names) > MAX_ENTRIES:
        raise DefinitionError(f"{len(names)} {what}s are over the limit of {MAX_ENTRIES}")
    for name, count in Counter(names).items():
        if not re.fullmatch(NAME, name):
            raise DefinitionError(f"{what} {name!r} is no name: use 1 to 64 letters, digits and _.-")
        if count > 1:
            raise DefinitionError(f"{what} {name} is named {count} times")


def _check_resources(resources: tuple[TaskResource, ...]) -> None:
    _check_names("resource", [resource.name for resource in resources])
    for resource in resources:
        given = [source for source in _SOURCES if getattr(resource, source) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none that this worker knows"
            raise DefinitionError(
                f"resource {resource.name} needs exactly one source of {', '.join(_SOURCES)}; it has {found}"
            )
        if resource.peers is not None and not resource.peers.peers:
            raise DefinitionError(f"resource {resource.name}: peers is empty")
        if (source := resource.peers or resource.huggingface) is not None:
            _check_filenames(resource.name, source.filenames or ())


def _check_filenames(name: str, filenames: tuple[str, ...]) -> None:
    if len(filenames) > MAX_FILENAMES:
        raise DefinitionError(f"resource {name}: {len(filenames)} filenames are over the limit of {MAX_FILENAMES}")
    if (fault := find_path_fault(filenames)) is not None:
        raise DefinitionError(f"resource {name}: filenames have {fault}")


def _check_outputs(outputs: tuple[OutputPath, ...]) -> None:
    _check_names("output", [output.name for output in outputs])
    if (fault := find_path_fault([RESOURCES, *(output.path for output in outputs)])) is not None:
        raise DefinitionError(f"outputs have {fault}: give each a file or folder of its own")


def with_paths(settings: Any, paths: Mapping[str, str]) -> Any:
    """Return settings in which each text that equals a resource's name is replaced by its path."""
    if isinstance(settings, str):
        return paths.get(settings, settings)
    if isinstance(settings, list):
        return [with_paths(value, paths) for value in settings]
    if isinstance(settings, dict):
        return {key: with_paths(value, paths) for key, value in settings.items()}
    return settings
