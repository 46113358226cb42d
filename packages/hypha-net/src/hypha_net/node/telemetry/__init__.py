"""OpenTelemetry set-up and export of a daemon (https://opentelemetry.io/docs/specs/otel/).

`otlp_config` decides without the SDK what is exported where; `sdk`, `exporters` and `log_exporter` import the SDK, and
are imported only when a collector is configured.
"""
