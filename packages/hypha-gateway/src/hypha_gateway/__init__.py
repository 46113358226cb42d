"""Gateway of a Hypha network: bootstrap node, relay and DHT server.

`config` is its configuration, `service` what it runs, `cli` the command `hypha-gateway`.
"""
