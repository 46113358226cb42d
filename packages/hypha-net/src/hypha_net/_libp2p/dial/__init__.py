"""Connections: dial, accept, upgrade, select and prune them."""
