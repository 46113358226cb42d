"""Removes a job's access tokens from everything that the executor writes.

A worker replaces tokens by null in jobs for executors and inserts them again when it fetches. If a token arrives
anyway (from another worker implementation, or in an error text that quotes a request), it is redacted from log records
before any handler sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from hypha_proto.job_spec import HuggingFaceReference, TrainConfig

BLOT: Final = "***"


class Redaction(logging.Filter):
    """Replaces secrets in the text of log records."""

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__()
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact secrets in the message and traceback; every record passes."""
        message, text = record.getMessage(), record.exc_text
        if record.exc_info and not text:
            text = logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_text = self.clean(message), None, text and self.clean(text)
        return True

    def clean(self, text: str) -> str:
        """Return the text with secrets redacted."""
        for secret in self._secrets:
            text = text.replace(secret, BLOT)
        return text


def secrets_of(config: TrainConfig) -> frozenset[str]:
    """Return the tokens in a job."""
    references = [config.model.artifact, config.data, config.updates, config.results]
    if config.preprocessor is not None:
        references.append(config.preprocessor.artifact)
    found = (reference.token for reference in references if isinstance(reference, HuggingFaceReference))
    return frozenset(token for token in found if token)


def hide(secrets: Collection[str]) -> None:
    """Redact secrets in everything that this process logs from now on."""
    if not secrets:
        return
    redaction = Redaction(secrets)
    for handler in logging.getLogger().handlers:
        handler.addFilter(redaction)
