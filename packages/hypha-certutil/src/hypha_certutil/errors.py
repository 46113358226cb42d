"""What can go wrong when certificates are made."""

from __future__ import annotations


class CertutilError(Exception):
    """A certificate, key, request or list cannot be made, read or written; the message says why and what to do."""
