"""Offline certificate authority for Hypha networks."""
