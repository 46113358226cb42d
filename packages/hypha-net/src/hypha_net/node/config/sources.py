"""Sources of a configuration: TOML, ``HYPHA_*``, ``OTEL_*`` and flags, each read into a `ConfigLayer` of plain values.

A source resolves what needs no other source: top-level keys written below a table header, unknown keys, relative paths,
and text that must become a list or a table. Pydantic checks types after `loader` has merged the layers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from hypha_net.node.config.errors import Problem
from hypha_net.node.config.introspection import (
    accepts,
    allows_any_key,
    annotation_at,
    dotted,
    fields_by_key,
    item_types,
    suggest_key,
    table_types,
    with_absolute_paths,
)
from hypha_net.node.config.models import NodeConfig, is_secret, read_pairs
from hypha_net.node.config.otlp import invalid_variables
from hypha_net.node.config.toml_positions import Document, Key
from hypha_proto.errors import DecodeError

PREFIX: Final = "HYPHA_"

_OPEN_TELEMETRY: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "telemetry_endpoint",
    "OTEL_EXPORTER_OTLP_HEADERS": "telemetry_headers",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "telemetry_protocol",
    "OTEL_TRACES_SAMPLER": "telemetry_sampler",
    "OTEL_RESOURCE_ATTRIBUTES": "telemetry_attributes",
}


@dataclass(slots=True)
class ConfigLayer:
    """Values of one source, with the origin of each."""

    where: Callable[[Key], str]
    """Describes the origin of the value at a key."""
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_toml_layer(model: type[NodeConfig], document: Document) -> ConfigLayer:
    """Read the values of a TOML document; top-level keys written below a table header are moved to the top."""
    hoisted: dict[str, Key] = {}

    def where(key: Key) -> str:
        return document.where((*hoisted[str(key[0])], *key[1:]) if key and key[0] in hoisted else key)

    layer = ConfigLayer(where)
    _TomlReader(model, document, layer, hoisted).read()
    layer.data = with_absolute_paths(layer.data, model, document.path.absolute().parent)
    _split_pairs(layer.data)
    return layer


@dataclass(slots=True)
class _TomlReader:
    """Walks a document and its model in parallel."""

    model: type[NodeConfig]
    document: Document
    layer: ConfigLayer
    hoisted: dict[str, Key]

    def read(self) -> None:
        lifted: dict[str, Any] = {}
        own = self._table(self.document.data, [self.model], (), lifted)
        self.layer.data = {**lifted, **own}

    def _table(self, data: dict[str, Any], models: list[type[BaseModel]], at: Key, lifted: dict[str, Any]) -> Any:
        known: dict[str, list[Any]] = {}
        for model in models:
            for name, info in fields_by_key(model).items():
                known.setdefault(name, []).append(info.annotation)
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if name in known:
                kept[name] = self._value(value, known[name], (*at, name), lifted)
            elif at and name in fields_by_key(self.model):
                self._hoist(name, value, at, lifted)
            else:
                remedy = suggest_key(name, self.model, list(known))
                self._problem((*at, name), f"is not a key{f' of [{dotted(at)}]' if at else ''}", remedy)
        return kept

    def _value(self, value: Any, annotations: list[Any], at: Key, lifted: dict[str, Any]) -> Any:
        if isinstance(value, dict) and not any(map(allows_any_key, annotations)):
            models = [table for annotation in annotations for table in table_types(annotation)]
            return self._table(value, models, at, lifted) if models else value
        if isinstance(value, list):
            inner = [item for annotation in annotations for item in item_types(annotation)]
            return (
                [self._value(part, inner, (*at, index), lifted) for index, part in enumerate(value)] if inner else value
            )
        return value

    def _hoist(self, name: str, value: Any, at: Key, lifted: dict[str, Any]) -> None:
        if name in self.document.data or name in lifted:
            other = self.document.where(self.hoisted.get(name, (name,)))
            self._problem((*at, name), f"is set here and at {other}", "keep one, above the first [table]")
            return
        self.hoisted[name] = (*at, name)
        lifted[name] = self._value(value, [fields_by_key(self.model)[name].annotation], (*at, name), lifted)
        self.layer.warnings.append(
            f"{self.document.where((*at, name))}: {name} stands under [{dotted(at, indices=False)}] and is taken as a "
            "top-level key; write it above the first [table]"
        )

    def _problem(self, key: Key, reason: str, remedy: str) -> None:
        self.layer.problems.append(Problem(self.document.where(key), dotted(key), reason=reason, remedy=remedy))


def read_environment(model: type[NodeConfig], env: Mapping[str, str]) -> ConfigLayer:
    """Read ``HYPHA_*``; two underscores enter a table. An unknown variable, perhaps another program's, is a warning."""
    names: dict[Key, str] = {}
    layer = ConfigLayer(lambda key: _origin(names, key))
    for name in sorted(env):
        if not name.startswith(PREFIX):
            continue
        key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if _has_key(model, key):
            names[key] = name
            _set(model, layer, key, env[name], name)
        else:
            layer.warnings.append(f"{name} is not a key of this program: {_suggest(model, key)}")
    return _finish(model, layer)


def read_flags(model: type[NodeConfig], flags: Mapping[str, object]) -> ConfigLayer:
    """Read dotted keys from the command line."""
    layer = ConfigLayer(lambda key: f"--set {dotted(key)}")
    for name, value in flags.items():
        key = tuple(name.split("."))
        if _has_key(model, key):
            _set(model, layer, key, value, f"--set {name}")
        else:
            layer.problems.append(Problem(f"--set {name}", reason="is not a key", remedy=_suggest(model, key)))
    return _finish(model, layer)


def read_open_telemetry(env: Mapping[str, str]) -> ConfigLayer:
    """Read the standard ``OTEL_*`` variables that correspond to a key; an empty one counts as not set.

    See https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
    """
    names: dict[Key, str] = {}
    layer = ConfigLayer(lambda key: _origin(names, key))
    for name, key in _OPEN_TELEMETRY.items():
        if text := env.get(name, "").strip():
            layer.data[key] = text
            names[(key,)] = name
    if (ratio := env.get("OTEL_TRACES_SAMPLER_ARG", "").strip()) and "ratio" in env.get("OTEL_TRACES_SAMPLER", ""):
        layer.data["telemetry_sample_ratio"] = ratio
        names[("telemetry_sample_ratio",)] = "OTEL_TRACES_SAMPLER_ARG"
    _split_pairs(layer.data, decode=True)
    if service := env.get("OTEL_SERVICE_NAME", "").strip():
        if isinstance(layer.data.setdefault("telemetry_attributes", {}), dict):
            layer.data["telemetry_attributes"]["service.name"] = service
        names[("telemetry_attributes", "service.name")] = "OTEL_SERVICE_NAME"
    layer.problems += [Problem(name, reason=reason, remedy=remedy) for name, reason, remedy in invalid_variables(env)]
    return layer


def _origin(names: Mapping[Key, str], key: Key) -> str:
    return next((names[key[:end]] for end in range(len(key), 0, -1) if key[:end] in names), dotted(key))


def _has_key(model: type[NodeConfig], key: Key) -> bool:
    """Return whether the model has this key, or a table with arbitrary keys that contains it."""
    if annotation_at(model, key) is not None:
        return True
    return any(
        (found := annotation_at(model, key[:end])) is not None and allows_any_key(found) for end in range(1, len(key))
    )


def _suggest(model: type[NodeConfig], key: Key) -> str:
    holder = annotation_at(model, key[:-1])
    here = [name for table in table_types(holder) for name in fields_by_key(table)] or list(fields_by_key(model))
    return suggest_key(str(key[-1]), model, here)


def _set(model: type[NodeConfig], layer: ConfigLayer, key: Key, value: object, origin: str) -> None:
    try:
        parsed = _parse(value, annotation_at(model, key)) if isinstance(value, str) else value
    except ValueError as error:
        shown = "***" if is_secret(dotted(key)) else value
        layer.problems.append(Problem(origin, dotted(key), shown, f"cannot be read: {error}", "write JSON or TOML"))
        return
    table = layer.data
    for at, part in enumerate(key[:-1], 1):
        table = table.setdefault(str(part), {})
        if not isinstance(table, dict):
            reason = f"sets a part of {dotted(key[:at])}, which is set to another value"
            layer.problems.append(Problem(origin, reason=reason, remedy="keep one of the two"))
            return
    table[str(key[-1])] = parsed


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


def _finish(model: type[NodeConfig], layer: ConfigLayer) -> ConfigLayer:
    layer.data = with_absolute_paths(layer.data, model, Path.cwd())
    _split_pairs(layer.data)
    return layer


def _split_pairs(data: dict[str, Any], *, decode: bool = False) -> None:
    """Parse ``"k=v,k2=v2"`` into tables so that layers merge by key; leave malformed text for pydantic to refuse."""
    for key in ("telemetry_headers", "telemetry_attributes"):
        if isinstance(text := data.get(key), str):
            with suppress(ValueError):
                data[key] = read_pairs(text, decode=decode)
