"""OTLP targets of each signal (traces, metrics, logs), from the configuration and the standard variables. No SDK.

`config.loader` has merged what all signals share; the variables for one signal (`config.otlp_variables`) override it.
Called by `lifecycle`, to know whether anything is exported, and by `sdk`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit, urlunsplit

from hypha_net.node.config.models import NodeConfig, mask_secrets
from hypha_net.node.config.otlp_variables import SIGNALS, Signal, read_pairs, signal_variable


@dataclass(frozen=True, slots=True)
class Target:
    """OTLP endpoint of one signal."""

    signal: Signal
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
    own = signal_variable(env, signal, "ENDPOINT")
    given = own or config.telemetry_endpoint
    if given is None or env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
        return None
    protocol = signal_variable(env, signal, "PROTOCOL") or config.telemetry_protocol
    url, user = without_user(given)
    if protocol != "grpc" and own is None:  # the shared URL is a base, a signal's own URL is complete
        url = f"{url.rstrip('/')}/v1/{signal}"
    text = signal_variable(env, signal, "HEADERS")
    headers = config.telemetry_headers if text is None else dict(read_pairs(text))
    return Target(signal, url, protocol, {**user, **headers}, str(mask_secrets(given)))


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its user and password, and the header with them: gRPC takes them for the host."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    user, _, host = parts.netloc.rpartition("@")
    token = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"authorization": f"Basic {token}"}
