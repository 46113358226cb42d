"""The chassis of every Hypha daemon: configuration, commands, life and death of the process, health.

A program brings a subclass of `config.NodeConfig` and one coroutine `serve(config, node)`; `cli.daemon_cli` makes its
commands of them. The way of a start: `cli` → `config_load` → `lifecycle` → the program's `serve`.
"""
