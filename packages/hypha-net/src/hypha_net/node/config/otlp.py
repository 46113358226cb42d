"""OTLP targets of traces, metrics and logs, from the configuration and the standard variables of single signals.

Specification: https://opentelemetry.io/docs/specs/otel/protocol/exporter/. The loader has merged what all signals
share; a variable of one signal, such as `OTEL_EXPORTER_OTLP_LOGS_ENDPOINT`, overrides it. Imports no OpenTelemetry.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from hypha_net.node.config.models import WEB_URL_WANTED, NodeConfig, is_web_url, mask_secrets, read_pairs

Signal = Literal["traces", "metrics", "logs"]
SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics", "logs")
PROTOCOLS: Final = ("http/protobuf", "grpc")


@dataclass(frozen=True, slots=True)
class Target:
    """OTLP endpoint of one signal."""

    url: str
    """Without user and password; over HTTP with the full path."""
    protocol: str
    headers: Mapping[str, str]
    shown: str
    """The configured URL as it may be logged."""


def targets(config: NodeConfig, env: Mapping[str, str]) -> dict[Signal, Target]:
    """Return the targets of the signals that are exported.

    Args:
        env: the environment; `OTEL_SDK_DISABLED` turns off all, `OTEL_LOGS_EXPORTER=none` and the like one signal.
    """
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    made = {signal: _target(config, env, signal) for signal in SIGNALS}
    return {signal: target for signal, target in made.items() if target is not None}


def _target(config: NodeConfig, env: Mapping[str, str], signal: Signal) -> Target | None:
    own = _variable(env, signal, "ENDPOINT")
    given = own or config.telemetry_endpoint
    if given is None or env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
        return None
    protocol = _variable(env, signal, "PROTOCOL") or config.telemetry_protocol
    url, user = _without_user(given)
    if protocol != "grpc" and own is None:  # the shared URL is a base, a signal's own URL is complete
        url = f"{url.rstrip('/')}/v1/{signal}"
    text = _variable(env, signal, "HEADERS")
    headers = config.telemetry_headers if text is None else read_pairs(text, decode=True)
    return Target(url, protocol, {**user, **headers}, str(mask_secrets(given)))


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its user and password, and the header with them: gRPC takes them for the host."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    user, _, host = parts.netloc.rpartition("@")
    token = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"authorization": f"Basic {token}"}


def _variable(env: Mapping[str, str], signal: Signal, what: str) -> str | None:
    """Return the variable ``OTEL_EXPORTER_OTLP_<SIGNAL>_<what>``, or None if it is not set."""
    return env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", "").strip() or None


def invalid_variables(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, reason and remedy of each invalid per-signal variable, without its value, which may be secret."""
    for signal in SIGNALS:
        name = f"OTEL_EXPORTER_OTLP_{signal.upper()}_"
        endpoint, protocol = _variable(env, signal, "ENDPOINT"), _variable(env, signal, "PROTOCOL")
        if endpoint is not None and not is_web_url(endpoint):
            yield f"{name}ENDPOINT", WEB_URL_WANTED, "write the scheme too, as in http://collector:4318"
        if protocol is not None and protocol not in PROTOCOLS:
            yield f"{name}PROTOCOL", f"{protocol!r} is not a supported protocol", f"write {' or '.join(PROTOCOLS)}"
        try:
            read_pairs(_variable(env, signal, "HEADERS") or "")
        except ValueError:
            yield f"{name}HEADERS", "is not a list of key=value pairs", "write name=value,name2=value2"
