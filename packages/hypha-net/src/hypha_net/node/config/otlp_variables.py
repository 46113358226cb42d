"""Standard OTLP variables for single signals, such as `OTEL_EXPORTER_OTLP_LOGS_ENDPOINT`.

Specification: https://opentelemetry.io/docs/specs/otel/protocol/exporter/. Called by `sources`, which reports invalid
ones, and by `telemetry.otlp_config`, which uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal
from urllib.parse import unquote

from hypha_net.node.config.models import WEB_URL_WANTED, is_web_url

Signal = Literal["traces", "metrics", "logs"]
SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics", "logs")
PROTOCOLS: Final = ("http/protobuf", "grpc")


def signal_variable(env: Mapping[str, str], signal: Signal, what: str) -> str | None:
    """Return the OTLP variable ``OTEL_EXPORTER_OTLP_<SIGNAL>_<what>``, or None if it is not set."""
    return env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", "").strip() or None


def read_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Parse ``k=v,k2=v2`` with percent-encoding, as the specification requires.

    Raises:
        ValueError: a part is not a pair.
    """
    for part in filter(None, map(str.strip, text.split(","))):
        name, sign, value = part.partition("=")
        if not sign or not name.strip():
            raise ValueError("is not a list of key=value pairs")
        yield unquote(name.strip()), unquote(value.strip())


def invalid_variables(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, reason and remedy of each invalid per-signal variable, without its value, which may be secret."""
    for signal in SIGNALS:
        name = f"OTEL_EXPORTER_OTLP_{signal.upper()}_"
        endpoint, protocol = signal_variable(env, signal, "ENDPOINT"), signal_variable(env, signal, "PROTOCOL")
        if endpoint is not None and not is_web_url(endpoint):
            yield f"{name}ENDPOINT", WEB_URL_WANTED, "write the scheme too, as in http://collector:4318"
        if protocol is not None and protocol not in PROTOCOLS:
            yield f"{name}PROTOCOL", f"{protocol[:40]!r} is not a supported protocol", f"write {' or '.join(PROTOCOLS)}"
        try:
            list(read_pairs(signal_variable(env, signal, "HEADERS") or ""))
        except ValueError as error:
            yield f"{name}HEADERS", str(error), "write name=value,name2=value2"
