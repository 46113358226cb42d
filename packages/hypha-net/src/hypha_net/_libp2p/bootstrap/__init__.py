"""Staying connected to the gateways and published in their directories."""
