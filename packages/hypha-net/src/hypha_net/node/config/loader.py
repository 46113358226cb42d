"""Loader of a program's configuration: flags override ``OTEL_*``, then ``HYPHA_*``, TOML and defaults.

The sources are merged into a tree of plain values with the origin of each, and pydantic validates it. A source resolves
what needs no other source: top-level keys written below a table header, relative paths, and text that must become a
list or a table. One `ConfigError` reports all problems of all sources.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError

from hypha_net.node.config.errors import ConfigError, Problem, validation_problems
from hypha_net.node.config.introspection import (
    Key,
    accepts,
    allows_any_key,
    annotation_at,
    dotted,
    fields_by_key,
    item_types,
    leaves,
    suggest_key,
    table_types,
    with_absolute_paths,
)
from hypha_net.node.config.models import NodeConfig, is_secret, read_pairs
from hypha_net.node.config.otlp import invalid_variables
from hypha_net.node.config.toml_positions import Document, read_toml
from hypha_proto.errors import DecodeError

C = TypeVar("C", bound=NodeConfig)

DEFAULT: Final = "default"
PREFIX: Final = "HYPHA_"

_OPEN_TELEMETRY: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "telemetry_endpoint",
    "OTEL_EXPORTER_OTLP_HEADERS": "telemetry_headers",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "telemetry_protocol",
    "OTEL_TRACES_SAMPLER": "telemetry_sampler",
    "OTEL_RESOURCE_ATTRIBUTES": "telemetry_attributes",
}
_PAIRS: Final = ("telemetry_headers", "telemetry_attributes")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """Valid configuration, with the origin of its values."""

    config: C
    warnings: tuple[str, ...]
    """What was accepted but deserves attention, one sentence each, with file and line if known."""
    origins: Mapping[str, str]
    """Dotted key → origin of its value (``worker.toml:12``, ``HYPHA_WORK_DIR``); keys at their default are absent."""


def load_config(model: type[C], file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Loaded[C]:
    """Merge all sources and validate the result.

    Args:
        model: the program's configuration.
        file: its TOML file, if any. Relative paths in it are relative to its folder; all other relative paths to the
            working directory.
        env: the environment, from which ``HYPHA_*`` and ``OTEL_*`` are taken.
        flags: dotted keys and their values, as text from a command line or typed.

    Raises:
        ConfigError: the configuration is invalid; the error lists every problem.
    """
    document = _document(file)
    model = model.for_document(document.data)
    sources = ConfigSources(model)
    read_document(sources, document)
    read_environment(sources, env)
    read_open_telemetry(sources, env)
    read_flags(sources, flags)

    def where(key: Key) -> str | None:
        return sources.where(key) if key else str(file) if file else None

    try:
        config = model.model_validate(sources.data)
    except ValidationError as error:
        found = validation_problems(model, error, sources.data, where)
        raise ConfigError([*sources.problems, *found]) from None
    if sources.problems:
        raise ConfigError(sources.problems)
    return Loaded(config, (*sources.warnings, *config.config_warnings()), sources.origins())


def _document(file: Path | None) -> Document:
    if file is None:
        return Document({}, {}, Path())
    try:
        return read_toml(file.read_text(encoding="utf-8"), file)
    except OSError as error:
        raise ConfigError([Problem(str(file), reason=f"cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(file), reason=f"is not UTF-8 text: {error}")]) from error


@dataclass(slots=True)
class ConfigSources:
    """Values of the sources that were read so far; those of a later source override those of an earlier one."""

    model: type[NodeConfig]
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _origins: dict[Key, Callable[[Key], str]] = field(default_factory=dict)
    """What describes the origin of each value, given its key."""

    def add(self, values: Mapping[str, Any], where: Callable[[Key], str], folder: Path) -> None:
        """Add values; tables are merged.

        Args:
            values: nested as in TOML.
            where: describes the origin of the value at a key.
            folder: relative paths among the values are relative to it.
        """
        resolved = with_absolute_paths(values, self.model, folder)
        for key in _PAIRS:
            if isinstance(text := resolved.get(key), str):
                resolved[key] = _split_pairs(text)
        self._merge(self.data, resolved, where, ())

    def add_value(self, origin: str, key: Key, value: Any) -> None:
        """Add the value of one key; relative paths are relative to the working directory."""
        for part in reversed(key):
            value = {part: value}
        self.add(value, lambda _: origin, Path.cwd())

    def _merge(self, below: dict[str, Any], above: Mapping[str, Any], where: Callable[[Key], str], at: Key) -> None:
        for name, value in above.items():
            key = (*at, name)
            if isinstance(value, dict) and isinstance(below.get(name), dict):
                self._merge(below[name], value, where, key)
                continue
            self._origins = {known: origin for known, origin in self._origins.items() if known[: len(key)] != key}
            below[name] = value
            self._origins |= dict.fromkeys((part for part, _ in leaves(value, key)), where)

    def where(self, key: Key) -> str | None:
        """Return the origin of the value at `key`, or of one inside or around it; None if no source sets it."""
        for end in range(len(key), 0, -1):
            for known, where in self._origins.items():
                if known[:end] == key[:end]:
                    return where(key)
        return None

    def origins(self) -> dict[str, str]:
        """Return the origin of each value that a source sets, by its dotted key."""
        return {dotted(key): where(key) for key, where in self._origins.items()}


def _split_pairs(text: str, *, decode: bool = False) -> dict[str, str] | str:
    """Parse ``"k=v,k2=v2"`` into a table, so that sources merge by key; pydantic refuses malformed text."""
    with suppress(ValueError):
        return read_pairs(text, decode=decode)
    return text


def read_document(sources: ConfigSources, document: Document) -> None:
    """Read a TOML document; top-level keys written below a table header are moved to the top."""
    moved: dict[str, Key] = {}

    def where(key: Key) -> str:
        return document.where((*moved[str(key[0])], *key[1:]) if key and key[0] in moved else key)

    for table, key in list(_misplaced(sources.model, document.data)):
        name = str(key[-1])
        value = table.pop(name)
        if name in document.data:
            reason = f"is set here and at {where((name,))}"
            problem = Problem(
                document.where(key), dotted(key), reason=reason, remedy="keep one, above the first [table]"
            )
            sources.problems.append(problem)
            continue
        document.data[name], moved[name] = value, key
        sources.warnings.append(
            f"{document.where(key)}: {name} stands under [{dotted(key[:-1], indices=False)}] and is taken as a "
            "top-level key; write it above the first [table]"
        )
    sources.add(document.data, where, document.path.absolute().parent)


def _misplaced(model: type[NodeConfig], value: Any, at: Key = ()) -> Iterator[tuple[dict[str, Any], Key]]:
    """Yield each key that only the top level has and that is below a table header, and the table that it is in."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from _misplaced(model, part, (*at, index))
    kind = annotation_at(model, at)
    if not isinstance(value, dict) or not table_types(kind) or allows_any_key(kind):
        return
    for name, part in value.items():
        if at and name in fields_by_key(model) and annotation_at(model, (*at, name)) is None:
            yield value, (*at, name)
        else:
            yield from _misplaced(model, part, (*at, name))


def read_environment(sources: ConfigSources, env: Mapping[str, str]) -> None:
    """Read ``HYPHA_*``; two underscores enter a table. An unknown variable, perhaps another program's, is a warning."""
    names = sorted(name for name in env if name.startswith(PREFIX))
    given = ((name, tuple(name.removeprefix(PREFIX).lower().split("__")), env[name]) for name in names)
    for name, remedy in _read_each(sources, given).items():
        sources.warnings.append(f"{name} is not a key of this program: {remedy}")


def read_flags(sources: ConfigSources, flags: Mapping[str, object]) -> None:
    """Read dotted keys from the command line."""
    given = ((f"--set {name}", tuple(name.split(".")), value) for name, value in flags.items())
    for flag, remedy in _read_each(sources, given).items():
        sources.problems.append(Problem(flag, reason="is not a key", remedy=remedy))


def read_open_telemetry(sources: ConfigSources, env: Mapping[str, str]) -> None:
    """Read the standard ``OTEL_*`` variables that correspond to a key; an empty one counts as not set.

    See https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
    """
    given = {name: text for name, value in env.items() if (text := value.strip())}
    for name, key in _OPEN_TELEMETRY.items():
        if name in given:
            value = _split_pairs(given[name], decode=True) if key in _PAIRS else given[name]
            sources.add_value(name, (key,), value)
    if "OTEL_TRACES_SAMPLER_ARG" in given and "ratio" in given.get("OTEL_TRACES_SAMPLER", ""):
        sources.add_value("OTEL_TRACES_SAMPLER_ARG", ("telemetry_sample_ratio",), given["OTEL_TRACES_SAMPLER_ARG"])
    if "OTEL_SERVICE_NAME" in given and isinstance(sources.data.get("telemetry_attributes", {}), dict):
        service = given["OTEL_SERVICE_NAME"]
        sources.add_value("OTEL_SERVICE_NAME", ("telemetry_attributes", "service.name"), service)
    sources.problems += [Problem(name, reason=reason, remedy=remedy) for name, reason, remedy in invalid_variables(env)]


def _has_key(model: type[NodeConfig], key: Key) -> bool:
    """Return whether the model has this key, or a table with arbitrary keys that contains it."""
    if annotation_at(model, key) is not None:
        return True
    return any(allows_any_key(annotation_at(model, key[:end])) for end in range(1, len(key)))


def _read_each(sources: ConfigSources, given: Iterable[tuple[str, Key, object]]) -> dict[str, str]:
    """Add values of single keys, each with its origin, as text or typed; return a remedy for each unknown key."""
    read: dict[Key, Any] = {}
    """What this source has set so far, without tables that have keys."""
    unknown: dict[str, str] = {}
    for origin, key, value in given:
        if not _has_key(sources.model, key):
            unknown[origin] = suggest_key(sources.model, key)
            continue
        try:
            parsed = _parse(value, annotation_at(sources.model, key)) if isinstance(value, str) else value
        except ValueError as error:
            shown = "***" if is_secret(dotted(key)) else value
            problem = Problem(origin, dotted(key), shown, f"cannot be read: {error}", "write JSON or TOML")
            sources.problems.append(problem)
            continue
        around = [key[:end] for end in range(1, len(key)) if not isinstance(read.get(key[:end], {}), dict)]
        if around:
            reason = f"sets a part of {dotted(around[0])}, which is set to another value"
            sources.problems.append(Problem(origin, reason=reason, remedy="keep one of the two"))
            continue
        read |= dict(leaves(parsed, key))
        sources.add_value(origin, key, parsed)
    return unknown


def _parse(text: str, annotation: Any) -> Any:
    """Parse text into a list or table where the annotation expects one; leave other text for pydantic to convert."""
    structured = bool(item_types(annotation) or table_types(annotation) or allows_any_key(annotation))
    if structured and text.lstrip().startswith(("[", "{")):
        return _parse_structured(text)
    if item_types(annotation) and not accepts(annotation, str):
        return [part.strip() for part in text.split(",") if part.strip()]
    if text == "" and accepts(annotation, type(None)):
        return None
    return text


def _parse_structured(text: str) -> Any:
    """Parse JSON, else TOML; raise `ValueError` if it is neither, or nested too deeply."""
    from hypha_proto.codec import check_depth, parse_json  # imports CBOR and message libraries

    with suppress(DecodeError):
        return parse_json(text)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    check_depth(value)
    return value
