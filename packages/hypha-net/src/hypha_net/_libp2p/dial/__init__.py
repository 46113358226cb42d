"""Connections: dialling, accepting, upgrading, choosing and pruning them."""
