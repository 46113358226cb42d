"""Errors of certificate creation and storage."""

from __future__ import annotations


class CertutilError(Exception):
    """A certificate, key, request or list cannot be made, read or written; the message says why and what to do."""
