"""Mutual TLS: handshake, certificate contexts, monitoring of live certificates."""
