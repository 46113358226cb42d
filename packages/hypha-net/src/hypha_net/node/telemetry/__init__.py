"""OpenTelemetry set-up and export for daemons."""
