"""Leases, and the capacity that they reserve."""
