"""Mutual TLS: handshake and transport, SSL contexts, readable TLS errors, monitoring of live certificates."""
