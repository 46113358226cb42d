"""Leases and the capacity they reserve."""
