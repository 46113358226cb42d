"""Connections to the gateways, and the records that are published there."""
