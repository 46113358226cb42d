"""Loader of a program's configuration: flags override ``OTEL_*``, then ``HYPHA_*``, TOML and defaults.

Each source becomes a tree of plain values with the origin of each (`sources`); the trees are merged and pydantic
validates the result. One `ConfigError` reports all problems of all sources.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError

from hypha_net.node.config.errors import ConfigError, Problem, validation_problems
from hypha_net.node.config.introspection import dotted, leaves
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.config.sources import (
    ConfigLayer,
    read_environment,
    read_flags,
    read_open_telemetry,
    read_toml_layer,
)
from hypha_net.node.config.toml_positions import Document, Key, TomlError, read_toml

_log = logging.getLogger(__name__)

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
    layers = [
        read_toml_layer(model, document),
        read_environment(model, env),
        read_open_telemetry(env),
        read_flags(model, flags),
    ]
    merged = _Merged()
    for layer in layers:
        merged.add(layer)
    problems = [problem for layer in layers for problem in layer.problems]
    config: C | None = None
    try:
        config = model.model_validate(merged.data)
    except ValidationError as error:
        whole = str(file) if file else None
        problems += validation_problems(model, error, merged.data, lambda key: merged.where(key) if key else whole)
    if problems or config is None:
        raise ConfigError(problems)
    warnings = [warning for layer in layers for warning in layer.warnings]
    return Loaded(
        config, (*warnings, *config.config_warnings()), {dotted(key): at for key, at in merged.origins.items()}
    )


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


@dataclass(slots=True)
class _Merged:
    """Merge of the layers, added in order of increasing precedence."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def add(self, layer: ConfigLayer) -> None:
        self._put(self.data, layer.data, layer, ())

    def _put(self, below: dict[str, Any], above: Mapping[str, Any], layer: ConfigLayer, at: Key) -> None:
        for name, value in above.items():
            key = (*at, name)
            if isinstance(value, dict) and isinstance(below.get(name), dict):
                self._put(below[name], value, layer, key)
                continue
            self.origins = {known: origin for known, origin in self.origins.items() if known[: len(key)] != key}
            below[name] = deepcopy(value)
            self.origins |= {part: layer.where(part) for part, _ in leaves(value, key)}

    def where(self, key: Key) -> str | None:
        """Return the origin of the value at `key`, or of one inside or around it; None if no layer sets it."""
        for end in range(len(key), 0, -1):
            for known, origin in self.origins.items():
                if known[:end] == key[:end]:
                    return origin
        return None
