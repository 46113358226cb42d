"""Bootstrap, relay and DHT anchor of a Hypha network.

`config` says what a gateway can be told, `service` what it does, `cli` makes the command `hypha-gateway` of both.
"""
