"""Common base of every Hypha daemon: configuration, commands, process lifecycle, health and telemetry.

A program supplies a subclass of `config.models.NodeConfig` and one coroutine `serve(config, node)`; `cli.Program`
builds its commands from them. Start-up runs through `cli` → `config.loader` → `lifecycle` → the program's `serve`.
"""
