"""Loader of a program's configuration: flags override ``OTEL_*``, then ``HYPHA_*``, TOML and defaults.

The sources are merged into a tree of plain values with the origin of each (`sources`), and pydantic validates it. One
`ConfigError` reports all problems of all sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import ValidationError

from hypha_net.node.config.errors import ConfigError, Problem, validation_problems
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.config.sources import (
    ConfigSources,
    read_document,
    read_environment,
    read_flags,
    read_open_telemetry,
)
from hypha_net.node.config.toml_positions import Document, Key, TomlError, read_toml

C = TypeVar("C", bound=NodeConfig)

DEFAULT: Final = "default"


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
    except TomlError as error:
        raise ConfigError([Problem(f"{file}:{error.line}", reason=f"is not TOML: {error}")]) from error
