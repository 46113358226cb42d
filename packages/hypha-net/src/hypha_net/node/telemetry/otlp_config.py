"""Where each signal (traces, metrics, logs) is exported, from the configuration and the standard variables. No SDK.

`config_load` has filled in what all signals share; a variable for one signal (`OTEL_EXPORTER_OTLP_LOGS_ENDPOINT`) wins
over that. `lifecycle` asks whether there is anything to export at all, `telemetry` then exports there.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from hypha_net.node.config.models import WEB_URL_WANTED, NodeConfig, is_web_url, mask_secrets

Signal = Literal["traces", "metrics", "logs"]
SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics", "logs")
PROTOCOLS: Final = ("http/protobuf", "grpc")


@dataclass(frozen=True, slots=True)
class Target:
    """Where one signal goes."""

    signal: Signal
    url: str
    """Without user and password; over HTTP the whole path."""
    protocol: str
    headers: Mapping[str, str]
    shown: str
    """What was configured, as it may be logged."""


def targets(config: NodeConfig, env: Mapping[str, str]) -> dict[Signal, Target]:
    """The signals that are exported.

    Args:
        env: the environment; `OTEL_SDK_DISABLED` turns all off, `OTEL_LOGS_EXPORTER=none` and its like one signal.
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
    url, user = without_user(given)
    if protocol != "grpc" and own is None:  # what all signals share is a base, what one has is the whole
        url = f"{url.rstrip('/')}/v1/{signal}"
    text = _variable(env, signal, "HEADERS")
    headers = config.telemetry_headers if text is None else dict(read_pairs(text))
    return Target(signal, url, protocol, {**user, **headers}, str(mask_secrets(given)))


def _variable(env: Mapping[str, str], signal: Signal, what: str) -> str | None:
    return env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", "").strip() or None


def read_pairs(text: str) -> Iterator[tuple[str, str]]:
    """The pairs of ``k=v,k2=v2``, with percent signs as the standard wants them.

    Raises:
        ValueError: a part is no pair.
    """
    for part in filter(None, map(str.strip, text.split(","))):
        name, sign, value = part.partition("=")
        if not sign or not name.strip():
            raise ValueError("is not a list of key=value pairs")
        yield unquote(name.strip()), unquote(value.strip())


def wrong_variables(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """What cannot be used of the variables for single signals: name, reason, remedy. Their values may be secret."""
    for signal in SIGNALS:
        name = f"OTEL_EXPORTER_OTLP_{signal.upper()}_"
        endpoint, protocol = _variable(env, signal, "ENDPOINT"), _variable(env, signal, "PROTOCOL")
        if endpoint is not None and not is_web_url(endpoint):
            yield f"{name}ENDPOINT", WEB_URL_WANTED, "write the scheme too, as in http://collector:4318"
        if protocol is not None and protocol not in PROTOCOLS:
            yield f"{name}PROTOCOL", f"{protocol[:40]!r} is no protocol of ours", f"write {' or '.join(PROTOCOLS)}"
        try:
            list(read_pairs(_variable(env, signal, "HEADERS") or ""))
        except ValueError as error:
            yield f"{name}HEADERS", str(error), "write name=value,name2=value2"


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its user and password, and the header that carries them: gRPC's would take them for a host."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    user, _, host = parts.netloc.rpartition("@")
    token = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"authorization": f"Basic {token}"}
